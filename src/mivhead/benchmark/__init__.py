"""The benchmark: methods compared on the same few-shot tasks.

A *task* is a support set and a query set (`tasks`, sampled by `samplers`). A *run* applies every
method of a configuration (`config`) to every task (`runner`): it extracts the features that tasks
need (`inputs`), fits and measures each method (`measuring`) in some executor (`executors`), and
stores each *result* in the run folder (`results`). `gflops` counts operations, `clock` measures
time, `memory` says how many tasks fit, `estimate` what a run would take, `weights` which checkpoint
belongs to which backbone, and `live` shows the progress. `report` and `compare` read results;
`published` holds the figures of the paper, and `episode` draws its t-SNE figure. `open_set` judges
how well a method tells unknown images from its classes, in tasks that have some.
"""

from typing import TYPE_CHECKING

from mivhead._util.lazy import lazy

if TYPE_CHECKING:
    from mivhead.benchmark.config import BackboneConfig as BackboneConfig
    from mivhead.benchmark.config import MethodConfig as MethodConfig
    from mivhead.benchmark.config import RunConfig as RunConfig
    from mivhead.benchmark.config import load_config as load_config
    from mivhead.benchmark.config import read_config as read_config
    from mivhead.benchmark.report import write_report as write_report
    from mivhead.benchmark.results import Result as Result
    from mivhead.benchmark.results import read_results as read_results
    from mivhead.benchmark.runner import Place as Place
    from mivhead.benchmark.runner import run as run
    from mivhead.benchmark.samplers import Protocol as Protocol
    from mivhead.benchmark.samplers import sample_tasks as sample_tasks
    from mivhead.benchmark.tasks import Task as Task
    from mivhead.benchmark.tasks import TaskSet as TaskSet
    from mivhead.executors.local import LocalExecutor as LocalExecutor

__getattr__, __dir__ = lazy(
    __name__,
    {
        "config": "BackboneConfig MethodConfig RunConfig load_config read_config",
        "mivhead.executors.local": "LocalExecutor",
        "report": "write_report",
        "results": "Result read_results",
        "runner": "Place run",
        "samplers": "Protocol sample_tasks",
        "tasks": "Task TaskSet",
    },
)
