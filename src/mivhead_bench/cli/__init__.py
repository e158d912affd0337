"""`miv bench`: the commands of the laboratory."""

from mivhead_bench.cli.main import main

__all__ = ["main"]
