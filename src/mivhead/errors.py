"""The errors a user can cause, and nothing else.

Every message is one sentence that names what is wrong and what to do about it. The command line
prints the message of a `MivError` and exits with code 2; anything else is a bug and keeps its
traceback.
"""


class MivError(Exception):
    """Base of every error that mivhead raises on purpose."""


class InputError(MivError, ValueError):
    """An argument, an array or a file holds something that cannot be used."""


class ImageError(InputError):
    """An image file cannot be read, or is not allowed."""


class ModelFileError(InputError):
    """A model or features file is damaged, foreign, too large or too new."""


class NotAvailableError(MivError, RuntimeError):
    """Something that is needed is not here: a package, weights, a writable disk."""
