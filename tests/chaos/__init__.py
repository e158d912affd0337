"""The campaign of faults: `make chaos`, or `python -m tests.chaos --minutes 60`.

Thousands of kills, damaged files, hostile servers and clients, full disks and extreme numbers, from
a seed and bounded in time. A case fails if something is lost, served wrongly, not finite, hangs, or
ends in an error that is not a `MivError`.
"""
