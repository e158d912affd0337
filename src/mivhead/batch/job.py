"""Predict, or extract features of, any number of images: streamed, in parts, and resumable."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from mivhead._util.optional import need
from mivhead._util.progress import progress_bar
from mivhead._util.threads import available_cores
from mivhead.batch.output import FORMAT, Done, Job, Output
from mivhead.batch.sources import (
    Shard,
    ShardRow,
    backbone_of,
    check_named,
    hash_boxes,
    list_boxes,
    list_shards,
)
from mivhead.batch.work import Extracting, Failed, Predicting
from mivhead.errors import ImageError, InputError, NotAvailableError
from mivhead.images import places
from mivhead.images.boxes import CONFIDENCE, MARGIN
from mivhead.images.places import EXTRA

if TYPE_CHECKING:
    from mivhead.executors import Executor

CHUNK = 32  # rows that are read, decoded and computed at a time
PART_ROWS = 4096  # predictions of a part
FEATURE_ROWS = 256  # images of a part of features, which are large
READERS = 16  # threads that read from a network
ATTEMPTS = 3  # of a shard whose worker dies

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobResult:
    """What a job did.

    Parameters
    ----------
    out : str
        Where the rows are.
    rows : int
        Number of rows.
    errors : int
        How many of them hold an error instead of a result.
    resumed : int
        How many rows an earlier run had written.
    seconds : float
        Duration of this run.
    complete : bool, default=False
        Whether there was nothing left to do; the rows of a file are then not counted again.
    """

    out: str
    rows: int
    errors: int
    resumed: int
    seconds: float
    complete: bool = False


Result = JobResult  # its name in 0.2.0


def predict(
    model: str | os.PathLike[str] | Predicting,
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    backbone: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    column: str | None = None,
    allow_remote: bool = False,
    part_rows: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int = 0,
    ray: str | bool = False,
    raw: bool = False,
    excel: bool = False,
    boxes: str | None = None,
    box_margin: float = MARGIN,
    box_confidence: float = CONFIDENCE,
    verbose: bool = True,
    **decision: float,
) -> JobResult:
    """Predict any number of images or features, and write the predictions in parts.

    Memory does not grow with the number of rows. A run that was interrupted, even killed, is
    completed with `resume`; no row is lost or repeated. An image that cannot be read becomes a row
    with an error.

    Parameters
    ----------
    model : path
        A model file, or an exported model; or a `Predicting` that has opened one.
    sources : path, address, or sequence of these
        Folders, zips, images, patterns, lists of paths (`.csv`, `.tsv`, `.txt`), tars as WebDataset
        writes them, Parquet files of images or of embeddings, other files or tables of features;
        each on this computer or at an address that fsspec opens, such as `s3://bucket/photos`.
    out : path or address
        A file `.parquet`, `.csv` or `.jsonl`, or a folder of Parquet files.
    backbone, weights, device : str or None, default=None
        As for `mivhead.load`.
    threads : int or None, default=None
        Number of threads; None: the cores that this process may use.
    column : str or None, default=None
        The column of the images in Parquet files, or of the paths in lists; None: it is found by
        its type or name.
    allow_remote : bool, default=False
        Whether lists of paths may name addresses, such as `https://...`, which are then opened.
    part_rows : int or None, default=None
        Number of rows that are written at a time; None: 4,096. A killed run computes at most that
        many rows again, per worker.
    resume : bool, default=False
        Complete what an earlier run began.
    overwrite : bool, default=False
        Replace what an earlier run wrote.
    workers : int, default=0
        Number of worker processes with one thread each; 0 computes in this process.
    ray : str or bool, default=False
        Compute on the Ray cluster with this address; True starts one on this computer.
    raw, excel : bool, default=False
        How text is written to a `.csv` file; as for `miv predict`.
    boxes : str or None, default=None
        A document of boxes, as for `mivhead.images.boxes.read_boxes`: the rows are the crops of
        the boxes of the photos in the one folder that is the source.
    box_margin, box_confidence : float, default=0.1 and 0.2
        As for `mivhead.images.boxes.BoxFile.images`.
    verbose : bool, default=True
        Show a progress bar if it takes more than two seconds.
    **decision : float
        `reject`, `max_errors`, `coverage` and `class_prior`, as for `FewShotClassifier.classify`.

    Returns
    -------
    JobResult

    Examples
    --------
    >>> import mivhead  # doctest: +SKIP
    >>> mivhead.batch.predict("birds.onnx", "s3://photos", "names.parquet")  # doctest: +SKIP
    """
    if not isinstance(model, Predicting):
        how = {"backbone": backbone, "weights": weights, "device": device, "threads": threads}
        model = Predicting.open(model, **how)
    return _run(
        replace(model, decision=tuple(decision.items())),
        sources,
        out,
        column=column,
        allow_remote=allow_remote,
        part_rows=part_rows or PART_ROWS,
        resume=resume,
        overwrite=overwrite,
        threads=threads,
        workers=workers,
        ray=ray,
        verbose=verbose,
        form={"raw": raw, "excel": excel},
        boxes=None if boxes is None else (os.fspath(boxes), box_margin, box_confidence),
    )


def extract(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    backbone: str | None = None,
    weights: str | None = None,
    image_size: int | None = None,
    device: str | None = None,
    threads: int | None = None,
    column: str | None = None,
    allow_remote: bool = False,
    part_rows: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int = 0,
    ray: str | bool = False,
    verbose: bool = True,
) -> JobResult:
    """Extract features of any number of images, and write them in parts.

    Parameters
    ----------
    sources : path, address, or sequence of these
        Images, as for `predict`.
    out : path or address
        A `.parquet` file, or a folder of Parquet files; `mivhead.stores.open` and `predict` read
        both.
    backbone, weights, image_size, device : default=None
        As for `mivhead.backbones.load_backbone`; None: the default backbone.
    threads, column : default=None
        As for `predict`.
    allow_remote : bool, default=False
        As for `predict`.
    part_rows : int or None, default=None
        Number of rows that are written at a time; None: 256.
    resume, overwrite : bool, default=False
        As for `predict`.
    workers : int, default=0
        As for `predict`.
    ray : str or bool, default=False
        As for `predict`.
    verbose : bool, default=True
        Show a progress bar if it takes more than two seconds.

    Returns
    -------
    JobResult
    """
    from mivhead.backbones import DEFAULT_BACKBONE

    if os.fspath(out).lower().endswith((".csv", ".jsonl")):
        raise InputError(f"Features are written to a .parquet file or a folder, not to {out}.")
    work = Extracting(backbone or DEFAULT_BACKBONE, weights, image_size, device)
    return _run(
        work,
        sources,
        out,
        column=column,
        allow_remote=allow_remote,
        part_rows=part_rows or FEATURE_ROWS,
        resume=resume,
        overwrite=overwrite,
        threads=threads,
        workers=workers,
        ray=ray,
        verbose=verbose,
        form={},
    )


def _run(
    work: Predicting | Extracting,
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    column: str | None,
    allow_remote: bool,
    part_rows: int,
    resume: bool,
    overwrite: bool,
    threads: int | None,
    workers: int,
    ray: str | bool,
    verbose: bool,
    form: dict[str, bool],
    boxes: tuple[str, float, float] | None = None,
) -> JobResult:
    started = time.perf_counter()
    if resume and overwrite:
        raise InputError("A job can be resumed or overwritten, not both.")
    listed = [sources] if isinstance(sources, str | os.PathLike) else sources
    names = tuple(os.fspath(each) for each in listed)
    if not names:
        raise InputError("There are no images: give at least one source.")
    output = Output(os.fspath(out))
    checked = (lambda shard: shard) if allow_remote else partial(check_named, sources=names)
    settings = {**work.settings, "column": column}
    if boxes is not None:
        if len(names) != 1:
            raise InputError("With boxes, give one folder: the one that paths are relative to.")
        settings["boxes"] = [hash_boxes(boxes[0]), *boxes[1:]]
    job = Job(FORMAT, work.task, work.identity, names, settings, part_rows)
    with output.locked():
        found = output.prepare(job, resume=resume, overwrite=overwrite)
        if found is not None and found.complete:
            rows = _count(output)
            return JobResult(
                output.out, rows, 0, rows, time.perf_counter() - started, complete=True
            )
        schema = work.schema()
        if found is None:
            if boxes is None:
                listed_shards: Iterator[Shard] = map(checked, list_shards(names, part_rows, column))
            else:
                listed_shards = list_boxes(names[0], part_rows, *boxes)
            shards = _checked(listed_shards, work)
            found = output.write_plan(job, shards)
        executor = _executor(workers, ray)
        try:
            rows, errors, resumed = _complete(
                work, output, found, executor, threads, verbose, checked
            )
        finally:
            if executor is not None:
                executor.close()
        output.finish(found, schema, **form)
    return JobResult(output.out, rows, errors, resumed, time.perf_counter() - started)


def _count(output: Output) -> int:
    """Return the rows of a folder of parts; 0 for a file, which is not read."""
    if output.suffix is not None:
        return 0
    found, removed = output.check_parts()
    if removed:
        raise InputError(
            f"{output.out} was complete, but {removed[0]} is corrupted now: use --overwrite."
        )
    return sum(part.rows for parts in found.values() for part in parts.values())


def _checked(shards: Iterator[Shard], work: Predicting | Extracting) -> Iterator[Shard]:
    """Check with the first shard that the model takes what the sources hold."""
    first = next(shards, None)
    if first is None:
        raise InputError("The source contains no images.")
    features = first.holds_features
    work.check(features=features, backbone=backbone_of(first) if features else None)
    for shard in itertools.chain([first], shards):
        if shard.holds_features != features:
            raise InputError(
                f"The sources hold images and features ({first.name}, {shard.name}): use a job for "
                "each."
            )
        yield shard


def _executor(workers: int, ray: str | bool) -> Executor | None:
    if not workers and not ray:
        return None
    from mivhead.executors import make_executor

    if workers and ray:
        raise InputError("A Ray cluster chooses its workers itself: omit --workers.")
    if ray:
        return make_executor("ray", 0, None if ray is True else str(ray))
    return make_executor("local", workers)


def _complete(
    work: Predicting | Extracting,
    output: Output,
    job: Job,
    executor: Executor | None,
    threads: int | None,
    verbose: bool,
    checked: Callable[[Shard], Shard],
) -> tuple[int, int, int]:
    """Compute the shards that lack rows; return the rows, errors and rows that were there."""
    found, removed = output.check_parts()
    for name in removed:
        _log.warning("The part %s was corrupted; it is computed again.", name)
    description = {"predict": "predicting", "extract": "extracting"}[work.task]
    before = Done.sum(part for parts in found.values() for part in parts.values())
    complete: list[Done] = []
    with progress_bar(description, job.rows, show=verbose) as advance:
        if executor is None:
            advance(before.rows)

        def calls() -> Iterator[ShardCall]:
            for number, shard in output.read_plan():
                parts = found.get(number, {})
                if shard.is_complete({part: each.rows for part, each in parts.items()}, part_rows):
                    complete.append(Done.sum(parts.values()))
                    if executor is not None:  # workers report whole shards
                        advance(complete[-1].rows)
                else:
                    yield ShardCall(work, output.address, number, checked(shard), part_rows)

        part_rows = job.part_rows
        computed = Done.sum(_computed(calls(), executor, threads, advance))
    total = Done.sum([computed, *complete])
    return total.rows, total.errors, before.rows


def _computed(
    calls: Iterator[ShardCall],
    executor: Executor | None,
    threads: int | None,
    advance: Callable[[int], object],
) -> Iterator[Done]:
    """Run the calls, and yield what each has done."""
    if executor is None:
        for call in calls:
            yield call.run(threads or available_cores(), advance)
        return
    from mivhead.executors import Died

    deaths: dict[int, int] = {}
    again: list[ShardCall] = []
    while True:
        died: list[ShardCall] = []
        for done, outcome in executor.run(itertools.chain(again, calls)):
            call = cast("ShardCall", done)
            if not isinstance(outcome, Died):
                advance(outcome.rows)
                yield outcome
                continue
            deaths[call.number] = deaths.get(call.number, 0) + 1
            if deaths[call.number] == ATTEMPTS:
                raise NotAvailableError(
                    f"The workers that computed {call.shard.name or 'images'} (shard "
                    f"{call.number}) died {ATTEMPTS} times: {outcome.reason}. Run the same command "
                    "with --resume."
                )
            died.append(call)
        if not died:
            return
        again, calls = died, iter(())


@dataclass(frozen=True)
class ShardCall:
    """Computes the rows of one shard that are missing; can be sent to another process."""

    work: Predicting | Extracting
    out: str
    number: int
    shard: Shard
    part_rows: int

    def __call__(self) -> Done:
        """Compute in one thread of another process."""
        self.work.check_same()
        return self.run(1, lambda _: None)

    def run(self, threads: int, advance: Callable[[int], object]) -> Done:
        """Write the missing parts."""
        output = Output(self.out)
        there = cache(partial(output.has_part, self.number))
        numbered = self.shard.rows(lambda row: not there(row // self.part_rows))
        parts: dict[int, Done] = {}
        with _Reader(self.work, threads, places.is_address(self.shard.path)) as reader:
            for part in itertools.count():
                if self.shard.is_complete(
                    {i: each.rows for i, each in parts.items()}, self.part_rows
                ):
                    return Done.sum(parts.values())
                taken = itertools.islice(numbered, self.part_rows)
                if there(part):
                    deque(taken, maxlen=0)
                    table = output.read_part(self.number, part)
                else:
                    table = reader.compute(taken, advance)
                    self.shard.check_unchanged()
                    output.write_part(self.number, part, table)
                parts[part] = Done.of(table)
        raise AssertionError


class _Reader:
    """Reads, decodes and computes rows, a chunk at a time; the next chunk is read meanwhile."""

    def __init__(self, work: Predicting | Extracting, threads: int, remote: bool) -> None:
        self._work = work
        self._readers = ThreadPoolExecutor(READERS if remote else threads, "read")
        self._decoders = ThreadPoolExecutor(threads, "decode")

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._readers, self._decoders):
            pool.shutdown(cancel_futures=True)

    def compute(self, rows: Iterator[ShardRow | None], advance: Callable[[int], object]) -> Any:
        """Return a table of the results of rows, all of which are wanted."""
        tables = []
        ahead = self._read(rows)
        while ahead:
            chunk, ahead = ahead, self._read(rows)
            contents = [future.result() for _, future in chunk]
            names = [row.id for row, _ in chunk]
            pictures = list(self._decoders.map(self._prepare, contents, names))
            good = [each for each in pictures if not isinstance(each, Failed)]
            found: Iterator[Any] = iter(self._work.compute(good) if good else ())
            results = [each if isinstance(each, Failed) else next(found) for each in pictures]
            tables.append(self._work.table(names, results))
            advance(len(chunk))
        return need("pyarrow", EXTRA).concat_tables(tables or [self._work.schema().empty_table()])

    def _read(self, rows: Iterator[ShardRow | None]) -> list[Any]:
        taken = list(itertools.islice(rows, CHUNK))
        return [(row, self._readers.submit(_load, row)) for row in taken if row is not None]

    def _prepare(self, content: Any, name: str) -> Any:
        if isinstance(content, Failed):
            return content
        try:
            return self._work.prepare(content, name)
        except ImageError as error:
            return Failed(str(error))


def _load(row: ShardRow) -> Any:
    try:
        return row.load()
    except ImageError as error:
        return Failed(str(error))
