"""`miv` as in `tests/cli`."""

from tests.cli.conftest import fails, miv, model, new, shots  # noqa: F401
