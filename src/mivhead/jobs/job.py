"""Predict any number of images: streamed, in parts, and resumable.

A job goes through its shards, each of which becomes a part: a Parquet file whose name says what it
was made from, and that appears when it is complete. A job that was killed is completed with
`resume`, which skips the parts that exist. At the end, the parts become one file, or stay in a
folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL import Image

from mivhead._util.files import locked
from mivhead._util.imports import need
from mivhead._util.text import progress_bar
from mivhead._util.threads import thread_count
from mivhead.backbones.base import to_picture
from mivhead.decision import MAX_ERRORS, REJECT
from mivhead.errors import ImageError, InputError, NotAvailableError, reading
from mivhead.images.decoding import load_image
from mivhead.images.imageset import ImageSource
from mivhead.jobs.sources import Shard, list_shards
from mivhead.jobs.urls import absolute, exists, is_url, names_in, open_file, remove, writing
from mivhead.prediction import Prediction

if TYPE_CHECKING:
    from mivhead.decision import Prior
    from mivhead.fewshot import FewShotClassifier
    from mivhead.jobs.executors import LocalExecutor, RayExecutor
    from mivhead.model.exported import ExportedClassifier

PART = re.compile(r"part-\d{6,}-[0-9a-f]{8}-[0-9a-f]{8}\.parquet")  # number, job, shard
PART_ROWS = 4096
CHUNK = 32  # images that are read, decoded and computed at a time
READERS = 16  # threads that read from a network
ATTEMPTS = 3  # of a shard whose worker dies
# Large JPEGs are decoded at a fraction of their size, at least this many times the backbone's. That
# is three times as fast at 12 megapixels and moves probabilities by less than 0.01
# (research log, *Large jobs*).
SCALED = 2

Done = Counter[str]  # numbers of "rows", of "errors" among them, and of "skipped" files


@dataclass(frozen=True)
class JobResult:
    """What a job did."""

    out: str  # where the rows are
    rows: int
    errors: int  # rows with an error instead of a result
    skipped: int  # files in the sources that are not images
    resumed: int  # rows that an earlier run had written
    seconds: float  # of this run


def predict(
    model: str | os.PathLike[str],
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    reject: float | None = REJECT,
    max_errors: float | None = MAX_ERRORS,
    class_prior: Prior | None = None,
    backbone: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    column: str | None = None,
    allow_remote: bool = False,
    part_rows: int = PART_ROWS,
    resume: bool = False,
    overwrite: bool = False,
    workers: int = 0,
    ray: str | bool = False,
    verbose: bool = True,
) -> JobResult:
    """Predict any number of images, and write the predictions in parts.

    Memory does not grow with the number of rows. A run that was interrupted, even killed, is
    completed with `resume`; no row is lost or repeated. An image that cannot be read becomes a row
    with an error. Decisions (`reject` to `class_prior`) are as for `FewShotClassifier.classify`.

    Parameters
    ----------
    sources : path, URL, or sequence of these
        Folders, zips, images, patterns, tars as WebDataset writes them, lists of paths (`.csv`,
        `.tsv`, `.txt`, `.parquet`); each on this computer or at a URL that fsspec opens, such as
        `s3://bucket/photos`.
    out : path or URL
        A `.parquet` file, or a folder of Parquet files.
    column : str or None, default=None
        The column of the paths in lists; None: it is found by its name.
    allow_remote : bool, default=False
        Whether lists of paths may name URLs, such as `https://...`, which are then opened.
    part_rows : int, default=4096
        Number of rows of a part. A killed run computes at most one part again, per worker.
    workers : int, default=0
        Number of worker processes with one thread each; 0 computes in this process.
    ray : str or bool, default=False
        Compute on the Ray cluster with this address; True starts one on this computer.

    Examples
    --------
    >>> import mivhead  # doctest: +SKIP
    >>> mivhead.jobs.predict("birds.onnx", "s3://photos", "names.parquet")  # doctest: +SKIP
    """
    if resume and overwrite:
        raise InputError("A job can be resumed or overwritten, not both.")
    if workers and ray:
        raise InputError("A Ray cluster chooses its workers itself: omit --workers.")
    started = time.perf_counter()
    paths = [sources] if isinstance(sources, str | os.PathLike) else sources
    names = [os.fspath(source) for source in paths]
    shards = partial(list_shards, names, part_rows, column=column, allow_remote=allow_remote)
    path = str(Path(model).absolute())
    file = ModelFile(path, hash_file(path), backbone, weights, device)
    decision = (reject, max_errors, class_prior)
    places = [absolute(name) for name in names]
    key = _hash([file.sha256, backbone, weights, decision, names, places, column])
    output = Output(os.fspath(out))
    with ExitStack() as stack:
        if not is_url(output.target):
            stack.enter_context(locked(output.target))
        existing = output.parts(key, resume=resume, overwrite=overwrite)
        if existing is None:
            remove(output.folder)  # empty, if a kill has left it
            _, done = _footer(output.target)
            counts = done["rows"], done["errors"], done["skipped"], done["rows"]
            return JobResult(output.out, *counts, time.perf_counter() - started)
        # Listed here for the total, and again below: a list of all images might not fit in memory.
        sizes = [None if shard.kind == "tar" else len(shard.items) for shard in shards()]
        if not sizes:
            raise InputError("There are no images: give at least one source.")
        loaded = load_model(file)
        loaded.check_takes(features=False)
        loaded.thresholds(*decision)  # an error now, not in a worker
        schema = _schema(loaded.classes_.tolist())
        if overwrite:
            output.remove(filter(PART.fullmatch, names_in(output.folder)))
        executor = None
        if workers or ray:
            from mivhead.jobs import executors

            address = ray if isinstance(ray, str) else None
            executor = executors.RayExecutor(address) if ray else executors.LocalExecutor(workers)
            stack.callback(executor.close)
        total = None if None in sizes else sum(filter(None, sizes))
        advance = stack.enter_context(progress_bar("predicting", total, show=verbose))
        parts: list[str] = []
        earlier: Done = Counter()

        def calls() -> Iterator[ShardCall]:
            for number, shard in enumerate(shards()):
                name = f"part-{number:06d}-{key}-{_hash(asdict(shard))}.parquet"
                parts.append(name)
                if name in existing:
                    _, done = _footer(f"{output.folder}/{name}")
                    earlier.update(done)
                    advance(done["rows"])
                else:
                    yield ShardCall(file, decision, schema, f"{output.folder}/{name}", shard)

        computed: Done = Counter()
        for done in _compute(calls(), executor, advance):
            computed.update(done)
        both = earlier + computed
        if not both["rows"]:
            output.remove(parts)
            raise InputError(f"The sources hold no images, but {both['skipped']} other files.")
        output.finish(parts, schema, key, both)
    counts = both["rows"], both["errors"], both["skipped"], earlier["rows"]
    return JobResult(output.out, *counts, time.perf_counter() - started)


def _compute(
    calls: Iterable[ShardCall],
    executor: LocalExecutor | RayExecutor | None,
    advance: Callable[[int], object],
) -> Iterator[Done]:
    """Run the calls, and yield what each has done; a shard whose worker dies is tried again."""
    if executor is None:
        for call in calls:
            yield call.run(advance)
        return
    deaths: Counter[str] = Counter()
    while True:
        died: list[ShardCall] = []
        for finished, done in executor.run(calls):
            if isinstance(done, Counter):
                advance(done["rows"])
                yield done
                continue
            call = cast("ShardCall", finished)
            deaths[call.part] += 1
            if deaths[call.part] == ATTEMPTS:
                raise NotAvailableError(
                    f"The workers that computed {call.shard.name or 'images'} died {ATTEMPTS} "
                    f"times: {done.reason}. Run the same command with --resume."
                )
            died.append(call)
        if not died:
            return
        calls = died


@dataclass(frozen=True)
class ModelFile:
    """Which model predicts: a small description that can be sent to another process."""

    path: str  # on a cluster, the same on every machine
    sha256: str  # by which workers notice another file
    backbone: str | None
    weights: str | None
    device: str | None


@lru_cache(maxsize=1)
def load_model(file: ModelFile) -> FewShotClassifier | ExportedClassifier:
    """Load a model, once per process."""
    if hash_file(file.path) != file.sha256:  # on another machine, or replaced meanwhile
        raise InputError(f"{file.path} is not the model file that the job was started with.")
    from mivhead.fewshot import load

    model = load(file.path, backbone=file.backbone, weights=file.weights, device=file.device)
    model.verbose = False
    return model


@dataclass(frozen=True)
class ShardCall:
    """Computes one shard; can be sent to another process."""

    model: ModelFile
    decision: tuple[Any, ...]  # the arguments of `thresholds`
    schema: Any
    part: str  # the file to write
    shard: Shard

    def __call__(self) -> Done:
        """Compute in another process."""
        return self.run(lambda _: None)

    def run(self, advance: Callable[[int], object]) -> Done:
        """Write the part, a chunk at a time."""
        pa, model = need("pyarrow"), load_model(self.model)
        thresholds = model.thresholds(*self.decision)
        assert model.identity_ is not None
        size = model.identity_.preprocessing.size
        done: Done = Counter(rows=0, errors=0, skipped=self.shard.skipped)
        waiting: list[Any] = []
        with writing(self.part) as path, _writer(path, self.schema) as writer:
            for ids, pictures in self._read(size, done):
                good = [picture for picture in pictures if not isinstance(picture, ImageError)]
                named = iter(model.classify_pictures(good, thresholds=thresholds) if good else [])
                results = [p if isinstance(p, ImageError) else next(named) for p in pictures]
                rows = [_row(name, result) for name, result in zip(ids, results, strict=True)]
                waiting.append(pa.Table.from_pylist(rows, self.schema))
                if len(waiting) * CHUNK >= PART_ROWS:  # as in a large tar
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
                done.update(rows=len(ids), errors=len(ids) - len(good))
                advance(len(ids))
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
            writer.add_key_value_metadata(_as_text(done))
        return done

    def _read(
        self, size: int, done: Done
    ) -> Iterator[tuple[list[str], list[Image.Image | ImageError]]]:
        """Yield ids and pictures; the next are decoded while these are computed."""
        images = self.shard.rows(done)
        threads = max(READERS, thread_count()) if is_url(self.shard.path) else thread_count()
        with ThreadPoolExecutor(threads) as pool:

            def start() -> tuple[list[str], Iterator[Image.Image | ImageError]]:
                chunk = list(islice(images, CHUNK))
                return [image.id for image in chunk], pool.map(partial(_prepare, size), chunk)

            following = start()
            while following[0]:
                (ids, pictures), following = following, start()
                yield ids, list(pictures)


def _prepare(size: int, image: ImageSource) -> Image.Image | ImageError:
    """Decode an image and resize it, so that no large picture is kept."""
    try:
        picture = load_image(image.get(), name=image.name, at_least=SCALED * size)
    except ImageError as error:
        return error
    return to_picture(picture, 0, size)


def _schema(classes: Sequence[object]) -> Any:
    pa = need("pyarrow")
    text, number = pa.string(), pa.float32()
    columns = {"file": text, "decision": text, "closest": text}
    columns |= {"probability": number, "unknown": number}
    columns["probabilities"] = pa.struct([(str(name), number) for name in classes])
    return pa.schema(columns | {"error": text})


def _row(name: str, result: Prediction | ImageError) -> dict[str, Any]:
    if isinstance(result, ImageError):
        return {"file": name, "error": str(result)}
    return {
        "file": name,
        "decision": str(result.decision),
        "closest": str(result.label),
        "probability": result.probability,
        "unknown": result.unknown,
        "probabilities": {str(label): p for label, p in result.probabilities.items()},
    }


class Output:
    """Where a job writes: a `.parquet` file, or a folder, in which the parts stay."""

    def __init__(self, out: str) -> None:
        self.out, self.target = out, absolute(out)
        self.is_folder = out.endswith("/") or not out.lower().endswith(".parquet")
        self.folder = self.target if self.is_folder else f"{self.target}.parts"
        path = Path(self.target)
        if self.is_folder and "." in path.name and not out.endswith("/"):
            raise InputError(f"The output {out} must be a .parquet file, or a folder: {out}/.")
        if not is_url(self.target):
            if not path.parent.is_dir():
                raise InputError(f"The folder of the output {out} does not exist.")
            if path.exists() and path.is_dir() != self.is_folder:
                raise InputError(f"The output {out} exists, and is something else.")

    def parts(self, key: str, *, resume: bool, overwrite: bool) -> set[str] | None:
        """Return the parts of this job that can be used, or None if it is complete."""
        names = [name for name in names_in(self.folder) if not name.startswith(".")]
        for name in names:
            if not PART.fullmatch(name):
                raise InputError(f"{self.folder} holds {name}, which is not a part of a job.")
        finished = not self.is_folder and exists(self.target)
        if overwrite:
            if finished and not _footer(self.target)[0]:
                raise InputError(f"{self.out} is not the output of a job: choose another name.")
            return set()
        if (names or finished) and not resume:
            raise InputError(
                f"The output {self.out} exists: complete it with --resume, or replace it with "
                "--overwrite."
            )
        keys = {name.split("-")[2] for name in names}
        if finished and not names:
            keys = {_footer(self.target)[0]}
        if keys - {key}:
            raise InputError(
                f"{self.out} was started with another model, other sources or other options: use "
                "the same, or --overwrite."
            )
        return set(names) if names or not finished else None

    def finish(self, parts: Sequence[str], schema: Any, key: str, done: Done) -> None:
        """Make one file of the parts, in this order; a folder loses parts of other jobs."""
        if self.is_folder:
            self.remove(set(filter(PART.fullmatch, names_in(self.folder))) - set(parts))
            return
        pa = need("pyarrow")
        with writing(self.target) as path, _writer(path, schema) as writer:
            for part in parts:
                with _open(f"{self.folder}/{part}") as file:
                    for batch in file.iter_batches(PART_ROWS):
                        writer.write_table(pa.Table.from_batches([batch], schema))
            writer.add_key_value_metadata({"job": key, **_as_text(done)})
        remove(self.folder)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of its folder."""
        for name in names:
            remove(f"{self.folder}/{name}")


def _writer(path: Path, schema: Any) -> Any:
    pq = need("pyarrow.parquet")
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)


@contextmanager
def _open(path: str) -> Iterator[Any]:
    pq = need("pyarrow.parquet")
    with (
        reading(f"{path} (if it is corrupted, remove it and use --resume)", ValueError),
        open_file(path) as source,
        pq.ParquetFile(source, page_checksum_verification=True) as file,
    ):
        yield file


def _as_text(done: Done) -> dict[str, str]:
    return {name: str(count) for name, count in done.items()}


def _footer(path: str) -> tuple[str, Done]:
    """Read which job made a file (of a part, its name says that), and what is in it."""
    with _open(path) as file:
        stored = file.metadata.metadata or {}
        counts = {name: int(stored.get(name.encode(), 0)) for name in ("errors", "skipped")}
        job = stored.get(b"job", b"").decode(errors="replace")
        return job, Counter(rows=file.metadata.num_rows, **counts)


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    with reading(path), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
