"""`Result`: what one method reached on one task; the line of the journal and the row of tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from mivhead._files import write_text
from mivhead._schema import from_json, to_json
from mivhead.benchmark.config import RunConfig, extend, read_config
from mivhead.errors import InputError, NotAvailableError


@dataclass(frozen=True)
class Result:
    """Outcome of one method on one task.

    Parameters
    ----------
    backbone, set, protocol, method
        What was run, by the names the run's configuration gives; a variant of a method has a name
        of its own.
    task
        Number of the task in its set.
    tasks
        Hash of the task set (`TaskSet.hash`): only results with equal hashes may be paired.
    ways, shots, views, queries
        Classes, support images, augmented views and query images of the task.
    accuracy
        Share of queries named rightly, 0 to 1; None if the task failed.
    error
        Why the task failed; None if it did not. `memory` and `numerical` failures begin with
        these words and a colon.
    adapt_seconds, infer_seconds
        From features to the trained head, and prediction of all queries, one thread, warmed up.
        For methods that tune the backbone, its passes are part of both.
    backbone_seconds
        One pass of support and views through the frozen backbone, from the rate measured when the
        features were extracted; 0 for methods that tune the backbone.
    peak_bytes
        Most memory taken during adaptation beyond what was taken before it.
    gflops, gflops_paper
        Adaptation, counted honestly and by the paper's rule, the backbone's pass included; None
        for a method that does not count its work.
    calibration
        Per bin of confidence: queries, sum of confidences, rightly named; for the expected
        calibration error.
    """

    backbone: str
    set: str
    protocol: str
    method: str
    task: int
    tasks: str
    ways: int
    shots: int
    views: int
    queries: int
    accuracy: float | None
    error: str | None
    adapt_seconds: float
    infer_seconds: float
    backbone_seconds: float
    peak_bytes: int
    gflops: float | None
    gflops_paper: float | None
    calibration: tuple[tuple[float, float, float], ...]


# The results of a run on disk: every finished task at once, durably, by one process only.
#
# A run folder holds `config.json`, the sampled tasks in `tasks/`, and `results.jsonl` with one
# `Result` a line. Lines are only ever added; a line that a kill or a full disk cut short is
# dropped when the run goes on.


RESULTS = "results.jsonl"
CONFIG = "config.json"
LOCK = "lock"
TASKS = "tasks"
BANK = "bank"  # features, where no other folder is given
IMAGES = "images"  # images that pip carries, where no data folder is given
AGAIN = "Free some space and run the same command again: it goes on where it was."


class Unit(NamedTuple):
    """One method on one task."""

    backbone: str
    set: str
    protocol: str
    task: int
    method: str


def unit_of(result: Result) -> Unit:
    """Tell which unit a result belongs to."""
    return Unit(result.backbone, result.set, result.protocol, result.task, result.method)


def read_results(run: str | Path) -> list[Result]:
    """All results of a run, one a unit; an error is there only if no later attempt succeeded."""
    path = Path(run) / RESULTS
    if not path.is_file():
        raise InputError(f"{run} holds no results of `miv bench run`.")
    return _latest(_parse(path, path.read_bytes())[0])


def read_run_config(run: str | Path) -> RunConfig:
    """Read the configuration of a run."""
    path = Path(run) / CONFIG
    try:
        return read_config(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {error}.") from error


class Journal:
    """A run folder that is open for writing, by this process alone.

    Parameters
    ----------
    folder
        Made if it is not there; one that holds something else than a run is refused.
    config
        What is to be run. What an earlier command ran into the folder is kept beside it, but
        the two must agree (`mivhead.benchmark.config.extend`).

    Attributes
    ----------
    results
        What is finished, by unit.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Journal(folder, RunConfig(sets=("birds",))) as journal:
    ...         print(len(journal.results), read_run_config(folder).sets)
    0 ('birds',)
    """

    def __init__(self, folder: str | Path, config: RunConfig) -> None:
        self.folder = Path(folder)
        self.config = config
        self.results: dict[Unit, Result] = {}
        self._file: IO[bytes] | None = None
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        """Lock the folder and read what is finished."""
        check_run_folder(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.folder / LOCK)
            self._open()
        except OSError as error:
            self.close()
            raise NotAvailableError(
                f"Cannot write into {self.folder}: {error.strerror or error}."
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Let others write."""
        self.close()

    def close(self) -> None:
        """Close the files; the lock goes with its file."""
        for file in (self._file, self._lock):
            if file is not None:
                file.close()

    def _open(self) -> None:
        path = self.folder / RESULTS
        config = self.config
        if (self.folder / CONFIG).exists():
            config = extend(read_run_config(self.folder), config)
        # Unbuffered: what a full disk refuses must not be written later, behind our back.
        self._file = path.open("ab", buffering=0)
        found, good = _parse(path, path.read_bytes())
        self._file.truncate(good)
        self.results = {unit_of(result): result for result in _latest(found)}
        write_text(self.folder / CONFIG, json.dumps(config.as_json(), indent=2) + "\n")

    def is_done(self, unit: Unit) -> bool:
        """Tell whether a unit needs no more work; one that failed is tried again."""
        return unit in self.results and self.results[unit].error is None

    def check_tasks(self, name: str, protocol: str, expected: str) -> None:
        """Refuse to mix results of different tasks."""
        for result in self.results.values():
            if (result.set, result.protocol) == (name, protocol) and result.tasks != expected:
                raise InputError(
                    f"{self.folder} holds results of other tasks of {name} ({protocol}): their "
                    f"hash is {result.tasks[:12]}, that of the task file is {expected[:12]}. "
                    "Choose another folder, or put the task file back."
                )

    def add(self, results: Iterable[Result]) -> None:
        """Write results; when this returns they are on the disk."""
        assert self._file is not None, "the journal is not open"
        added = list(results)
        lines = "".join(json.dumps(to_json(result), allow_nan=False) + "\n" for result in added)
        handle = self._file.fileno()
        end = os.fstat(handle).st_size
        try:
            left = lines.encode()
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        except OSError as error:
            with suppress(OSError):  # what was cut short is dropped now, or by the next run
                os.ftruncate(handle, end)
            raise NotAvailableError(
                f"Cannot write {self.folder / RESULTS}: {error.strerror or error}. {AGAIN}"
            ) from error
        self.results |= {unit_of(result): result for result in added}


def check_run_folder(folder: Path) -> None:
    """Raise an error if a folder holds something else than a run."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; results need a folder.")
    begun = (folder / LOCK).exists()  # reports may be there too by now
    if folder.is_dir() and not begun and any(p.name != IMAGES for p in folder.iterdir()):
        raise InputError(
            f"{folder} holds something else than the results of a benchmark; choose another folder."
        )


def _parse(path: Path, content: bytes) -> tuple[list[Result], int]:
    """Read all whole lines; also return how many bytes they take."""
    good = content.rfind(b"\n") + 1
    results = []
    for number, line in enumerate(content[:good].splitlines(), start=1):
        try:
            results.append(from_json(Result, json.loads(line), f"{path}, line {number},"))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path} is damaged in line {number}: remove that line, and its task runs again."
            ) from error
    return results, good


def _latest(results: Iterable[Result]) -> list[Result]:
    """Keep one result a unit: the last, but never an error after a success."""
    kept: dict[Unit, Result] = {}
    for result in results:
        unit = unit_of(result)
        if result.error is None or unit not in kept or kept[unit].error is not None:
            kept[unit] = result
    return list(kept.values())


# One process at a time: a lock that the system takes back when its process dies.


_FAR = 2**30  # Windows locks bytes of the file: one that nobody reads


def lock_file(path: Path) -> IO[str]:
    """Take the lock of a file, or refuse at once; it lasts until the file is closed.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> held = lock_file(Path(folder.name, "lock"))
    >>> lock_file(Path(folder.name, "lock"))
    Traceback (most recent call last):
        ...
    mivhead.errors.NotAvailableError: Another run writes into ... (process ...); wait for it, or \
choose another folder.
    >>> held.close()
    >>> folder.cleanup()
    """
    file = path.open("a+", encoding="utf-8")
    try:
        _lock(file)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise NotAvailableError(
            f"Another run writes into {path.parent} (process {owner}); wait for it, or choose "
            "another folder."
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _lock(file: IO[str]) -> None:
    """Raise OSError if another process has it."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(_FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
