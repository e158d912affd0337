"""Raw downloads of the paper's sets to folders of class folders, one module a kind of download."""

from mivhead.benchmark.prepare.command import PREPARATIONS, prepare_set

__all__ = ["PREPARATIONS", "prepare_set"]
