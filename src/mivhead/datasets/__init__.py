"""The benchmark's image sets: a catalogue, preparation of downloads, Meta-Dataset's records.

Any folder of class folders in the data folder is a set, without any code. To describe a set and to
prepare its download, add it to `catalogue.py` and a function to `downloads.py`.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.datasets.bundled import write_bundled as write_bundled
    from mivhead.datasets.catalogue import SETS as SETS
    from mivhead.datasets.catalogue import DataSet as DataSet
    from mivhead.datasets.catalogue import find_declared as find_declared
    from mivhead.datasets.prepare import prepare_set as prepare_set
    from mivhead.datasets.sets import find_sets as find_sets
    from mivhead.datasets.sets import open_set as open_set

__getattr__, __dir__ = lazy(
    __name__,
    {
        "bundled": "write_bundled",
        "catalogue": "SETS DataSet find_declared",
        "prepare": "prepare_set",
        "sets": "find_sets open_set",
    },
)
