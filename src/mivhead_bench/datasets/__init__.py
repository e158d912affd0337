"""The benchmark's image sets: a catalogue, preparation of downloads, Meta-Dataset's records.

Any folder of class folders in the data folder is a set, without any code. To describe a set, add it
to `sets.toml`; to prepare a download that is no folder of class folders, add a function to
`downloads.py`.
"""

from mivhead_bench.datasets.bundled import write_bundled
from mivhead_bench.datasets.sets import find_sets, open_set

__all__ = ["find_sets", "open_set", "write_bundled"]
