"""Results of a run: what one method reached on one task, and the folder that keeps them.

A run folder holds `config.json`, the sampled tasks in `tasks/`, and `results.jsonl` with one
`Result` per line. Results are written as soon as they are there, durably, by one process at a
time. Lines are only ever appended; a line that a kill or a full disk truncated is dropped when the
run resumes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import torch
from filelock import FileLock, Timeout

from mivhead._util.files import write_text
from mivhead._util.schema import from_json, parse_json, to_json
from mivhead._version import __version__
from mivhead.errors import InputError, NotAvailableError, reading, reason_of
from mivhead_bench.benchmark.clock import Seconds
from mivhead_bench.benchmark.config import RunConfig, extend, read_config
from mivhead_bench.benchmark.open_set import OpenResult

RESULTS = "results.jsonl"
CONFIG = "config.json"
TASKS = "tasks"
SECONDS = "seconds.json"  # measured duration of a backbone's pass over one image
WEIGHTS = "weights.json"  # SHA-256 of the weights of each backbone
FEATURES = "features"  # where they are stored if the feature cache is disabled
IMAGES = "images"  # images that pip packages contain, if no data folder is given
COMMANDS = "commands.jsonl"  # when, where and how the run was started or resumed
LOCK = "lock"
OWNER = "lock.pid"  # the process that holds the lock

VERSION = "mivhead"  # key of the version in config.json
LARGEST = 1e15  # number in results that is believed


@dataclass(frozen=True)
class Result:
    """The result of one method on one task.

    Parameters
    ----------
    backbone, set, protocol, method : str
        What was run, by the names in the run's configuration; each variant of a method has a name
        of its own.
    task : int
        Number of the task in its set.
    tasks : str
        Hash of the task set (`TaskSet.hash`): only results with equal hashes may be paired.
    ways, shots, views, queries : int
        Number of classes, support images, augmented views and query images of the task.
    accuracy : float or None
        Fraction of correctly classified queries; None if the task failed.
    error : str or None
        Why the task failed. Failures for lack of memory start with `memory:`, numerical ones with
        `numerical:`.
    adapt_seconds, infer_seconds : float
        Duration of the adaptation to the support features, and of the prediction of all queries,
        in one thread, after a warm-up. For methods that tune the backbone, both include its passes.
    backbone_seconds : float
        One pass of support images and views through the frozen backbone, from its measured
        duration per image; 0 for methods that tune the backbone.
        All three are measured by the same clock (`clock`), and none includes
        decoding, resizing or augmentation.
    peak_bytes : int
        Peak of the memory that adaptation took in addition.
    gflops_paper, gflops_authors : float
        Operations of the adaptation by the paper's rule, including the backbone's pass; and the
        same for the implementation of the paper's authors, as the paper prints it.
    calibration : tuple
        Per bin of confidence: queries, sum of confidences, correct ones; for the expected
        calibration error.
    adapt_wall, infer_wall, backbone_wall : float
        The same durations by the wall clock, which depend on what else the machine was doing.
    open : OpenResult or None, default=None
        How well the method told unknown queries from known ones, in an open task.
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
    accuracy: float | None = None
    error: str | None = None
    adapt_seconds: float = 0.0
    infer_seconds: float = 0.0
    backbone_seconds: float = 0.0
    peak_bytes: int = 0
    gflops_paper: float = 0.0
    gflops_authors: float = 0.0
    calibration: tuple[tuple[float, float, float], ...] = ()
    adapt_wall: float = 0.0
    infer_wall: float = 0.0
    backbone_wall: float = 0.0
    open: OpenResult | None = None

    @property
    def key(self) -> ResultKey:
        """Which method on which task this is the result of."""
        return ResultKey(self.backbone, self.set, self.protocol, self.task, self.method)


class ResultKey(NamedTuple):
    """One method on one task."""

    backbone: str
    set: str
    protocol: str
    task: int
    method: str


def read_results(run: str | Path) -> list[Result]:
    """Read all results of a run, which may be a stranger's: this imports nothing that it names.

    Parameters
    ----------
    run : str or Path
        The run folder.

    Returns
    -------
    list of Result
        One per method and task. A failure is included only if no other attempt succeeded.
    """
    path = Path(run) / RESULTS
    if not path.is_file():
        raise InputError(f"{run} does not contain results of `miv bench run`.")
    return _latest(_parse(path)[0])


def describe_device(device: str | None) -> str:
    """Name a device and, if it is a GPU, its model.

    >>> describe_device("cpu")
    'cpu'
    """
    if device is None or torch.device(device).type != "cuda":
        return device or "cpu"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def describe_process() -> dict[str, str]:
    """Describe this process for the record: time, version, machine and command."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.machine()}, {cores} cores"
    program = Path(sys.argv[0]).name.replace("__main__.py", "miv")  # python -m mivhead
    return {
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": f"mivhead {__version__}, Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}, NumPy {np.__version__}",
        "commit": _commit(),
        "machine": system,
        "command": _without_secrets(shlex.join([program, *sys.argv[1:]])),
    }


def _commit() -> str:
    """Return the commit of the working tree that this package is a part of, or nothing."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", "HEAD:./"]
    try:
        process = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout[:7]


def _without_secrets(command: str) -> str:
    """Remove passwords and parameters from addresses.

    >>> _without_secrets("miv bench run --backbone https://me:word@host/v1?key=1 -o run")
    'miv bench run --backbone https://...@host/v1?... -o run'
    """
    command = re.sub(r"(?<=://)[^/@\s]+@", "...@", command)
    return re.sub(r"(://[^\s?]+)\?[^\s']+", r"\1?...", command)


def read_origin(run: str | Path) -> dict[str, str]:
    """Read how the results of a run were made: its first command, and how often it was resumed."""
    try:
        lines = (Path(run) / COMMANDS).read_text(encoding="utf-8").splitlines()
        entries = [dict(json.loads(line)) for line in lines if line]
        origin = {str(key): str(value) for key, value in entries[0].items()}
    except (OSError, ValueError, TypeError, LookupError):  # results may be copied without it
        return {}
    devices = dict.fromkeys(str(e["device"]) for e in entries if "device" in e)
    if len(devices) > 1:
        origin["device"] = (
            f"{', '.join(devices)}: times of different devices cannot be compared with each other"
        )
    if len(entries) > 1:
        origin["resumed"] = f"{len(entries) - 1} times, last {entries[-1].get('time', 'unknown')}"
    return origin


def read_weights(run: str | Path) -> dict[str, str]:
    """Read the SHA-256 of the weights of each backbone."""
    with suppress(OSError, ValueError, TypeError):
        stored = parse_json((Path(run) / WEIGHTS).read_text(encoding="utf-8"))
        return {k: v for k, v in dict(stored).items() if re.fullmatch("[0-9a-f]{64}", v)}
    return {}


def read_run_config(run: str | Path) -> RunConfig:
    """Read the configuration of a run."""
    path = Path(run) / CONFIG
    with reading(path, ValueError):
        document = dict(parse_json(path.read_text(encoding="utf-8")))
    document.pop(VERSION, None)
    return read_config(document, str(path))


class RunFolder:
    """A run folder that is open for writing, by this process alone.

    It is created if it does not exist; a folder that holds anything but a run is refused. What
    earlier commands ran in it is added to `config`, and both must agree (`config.extend`).
    `results` are what is finished, `seconds` the measured duration of one image's pass by backbone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RunFolder(folder, RunConfig(sets=("birds",))) as run_folder:
    ...         print(len(run_folder.results), read_run_config(folder).sets)
    0 ('birds',)
    """

    def __init__(self, folder: str | Path, config: RunConfig, device: str | None = None) -> None:
        self.folder = Path(folder)
        self.config = config
        self.device = device
        self.results: dict[ResultKey, Result] = {}
        self.seconds: dict[str, Seconds] = {}
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Lock the folder and read what is finished."""
        check_run_folder(self.folder)
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock(stack)
                self._open(stack)
            except OSError as error:
                raise NotAvailableError(
                    f"Cannot write into {self.folder}: {reason_of(error)}."
                ) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder."""
        self._stack.close()

    def _lock(self, stack: ExitStack) -> None:
        """Take the lock, which the system releases when the process dies."""
        owner = self.folder / OWNER
        try:
            stack.enter_context(FileLock(self.folder / LOCK, timeout=0))
        except Timeout:
            process_id = owner.read_text(encoding="utf-8").strip() if owner.exists() else "unknown"
            raise NotAvailableError(
                f"Another run is writing into {self.folder} (process {process_id}); wait for it to "
                "finish, or choose another folder."
            ) from None
        owner.write_text(f"{os.getpid()}\n", encoding="utf-8")

    def _open(self, stack: ExitStack) -> None:
        config = self.config
        if (self.folder / CONFIG).exists():
            self.config = config = extend(read_run_config(self.folder), config)
        path = self.folder / RESULTS
        # Unbuffered: data that a full disk rejected must not be written later.
        self._file = stack.enter_context(path.open("ab", buffering=0))
        finished, complete = _parse(path)
        self._file.truncate(complete)
        self.results = {result.key: result for result in _latest(finished)}
        with suppress(OSError, ValueError, TypeError):  # otherwise it is measured again
            stored = parse_json((self.folder / SECONDS).read_text(encoding="utf-8"))
            self.seconds = {
                str(name): Seconds(*map(float, values)) for name, values in dict(stored).items()
            }
        self._write_json(CONFIG, {VERSION: __version__} | config.as_json())
        with (self.folder / COMMANDS).open("a", encoding="utf-8", errors="backslashreplace") as log:
            used = {} if self.device is None else {"device": self.device}
            log.write(json.dumps(describe_process() | used) + "\n")

    def _write_json(self, name: str, document: dict[str, Any]) -> None:
        write_text(self.folder / name, json.dumps(document, indent=2) + "\n")

    def is_done(self, key: ResultKey) -> bool:
        """Return whether a method on a task is finished; a failure is retried."""
        return key in self.results and self.results[key].error is None

    def check_tasks(self, name: str, protocol: str, expected: str) -> None:
        """Refuse to mix results of different tasks."""
        for result in self.results.values():
            if (result.set, result.protocol) == (name, protocol) and result.tasks != expected:
                raise InputError(
                    f"{self.folder} contains results of other tasks of {name} ({protocol}): their "
                    f"hash is {result.tasks[:12]}, that of the task file is {expected[:12]}. "
                    "Choose another folder, or restore the task file."
                )

    def check_weights(self, backbone: str, weights: str) -> None:
        """Record the weights of a backbone, and refuse to mix results of different ones."""
        recorded = read_weights(self.folder)
        if recorded.get(backbone) == weights:
            return
        used = any(result.backbone == backbone for result in self.results.values())
        if used and backbone in recorded:
            raise InputError(
                f"{self.folder} contains results of other weights of {backbone}: their hash is "
                f"{recorded[backbone][:12]}, that of the weights now is {weights[:12]}. Choose "
                "another folder, or use the same weights."
            )
        self._write_json(WEIGHTS, recorded | {backbone: weights})

    def add(self, results: Iterable[Result]) -> None:
        """Write results; when this method returns, they are on the disk."""
        assert self._file is not None, "the run folder is not open"
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
            with suppress(OSError):  # a truncated line is dropped now, or by the next run
                os.ftruncate(handle, end)
            raise NotAvailableError(
                f"Cannot write {self.folder / RESULTS}: {reason_of(error)}. Free some space "
                "and run the same command again: it resumes where it stopped."
            ) from error
        self.results |= {result.key: result for result in added}

    def set_seconds(self, backbone: str, seconds: Seconds) -> None:
        """Record the measured duration of the pass of one image through a backbone."""
        self.seconds[backbone] = seconds
        self._write_json(SECONDS, self.seconds)


def check_run_folder(folder: Path) -> None:
    """Raise an error if a folder holds anything but a run."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; results need a folder.")
    check_no_links(folder)
    is_run = any((folder / name).exists() for name in (LOCK, CONFIG))  # reports may be there too
    if folder.is_dir() and not is_run and any(p.name != IMAGES for p in folder.iterdir()):
        raise InputError(
            f"{folder} contains something other than the results of a benchmark; choose another "
            "folder."
        )


def check_no_links(folder: Path) -> None:
    """Refuse to write into a folder with links, which may be a stranger's and lead elsewhere."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (path := Path(place, name)).is_symlink():
                raise InputError(f"{path} is a link: remove it, or choose another folder.")
        folders[:] = [name for name in folders if name != FEATURES]


def _parse(path: Path) -> tuple[list[Result], int]:
    """Read all complete lines; also return how many bytes they take."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    results = []
    for number, line in enumerate(content[:complete].splitlines(), start=1):
        where = f"{path}, line {number},"
        with reading(where, ValueError, RecursionError):
            document = parse_json(line)
        result = from_json(Result, document, where)
        numbers = [x for x in vars(result).values() if isinstance(x, int | float)]
        numbers += [x for row in result.calibration for x in row]
        if not all(0 <= x <= LARGEST for x in numbers) or (result.accuracy or 0) > 1:
            raise InputError(f"{where} has a number that cannot be one of a result.")
        results.append(result)
    return results, complete


def _latest(results: Iterable[Result]) -> list[Result]:
    """Keep one result per method and task: the last, but never a failure after a success."""
    kept: dict[ResultKey, Result] = {}
    for result in results:
        key = result.key
        if result.error is None or key not in kept or kept[key].error is not None:
            kept[key] = result
    return list(kept.values())
