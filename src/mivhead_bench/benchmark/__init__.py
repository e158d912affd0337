"""The benchmark: methods compared on the same few-shot tasks.

A *task* is a support set and a query set (`tasks`, sampled by `samplers`). A *run* applies every
method of a configuration (`config`) to every task (`runner`): it extracts the features that tasks
need (`inputs`), fits and measures each method (`measuring`), and stores each *result* in the run
folder (`results`). `clock` measures time, `memory` says how many tasks fit, `estimate` what a run
would take, and `live` shows the progress. `report` and `compare` read results; `published` holds
the figures of the paper. `open_set` judges how well a method tells unknown images from its classes,
in tasks that have some.
"""

from mivhead_bench.benchmark.config import RunConfig, read_config
from mivhead_bench.benchmark.report import write_report
from mivhead_bench.benchmark.results import read_results
from mivhead_bench.benchmark.runner import Workspace, run
from mivhead_bench.benchmark.samplers import Protocol, sample_tasks
from mivhead_bench.benchmark.tasks import TaskSet

__all__ = [
    "Protocol",
    "RunConfig",
    "TaskSet",
    "Workspace",
    "read_config",
    "read_results",
    "run",
    "sample_tasks",
    "write_report",
]
