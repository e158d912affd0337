"""The benchmark: methods compared on the same few-shot tasks.

A *task* is a support set and a query set (`tasks`, sampled by `samplers`). A *run* applies every
method of a configuration (`config`) to every task (`runner`): it extracts the features that tasks
need (`inputs`), fits and measures each method (`measuring`) in some executor (`executors`), and
stores each *result* in the run folder (`results`). `report` and `compare` read results.
"""
