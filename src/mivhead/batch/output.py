"""What a job writes: a folder of parts, and from them one file at the end.

A part is a Parquet file of some rows of one shard. It appears when it is complete, so that its
existence is its mark. A job that is killed and resumed computes the parts that are missing, and no
others: no row is lost or repeated.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from mivhead._util import files
from mivhead._util.files import locked, replacing
from mivhead._util.optional import need
from mivhead._util.schema import from_json, parse_json, to_json
from mivhead._util.text import shorten
from mivhead.batch.sources import Shard
from mivhead.errors import InputError
from mivhead.images import places
from mivhead.images.places import EXTRA, exists, file_system, is_address, open_file, reach
from mivhead.spreadsheets import number, to_csv
from mivhead.stores.parquet import read_table, write_tables

JOB, PLAN = "_job.json", "_plan.jsonl"
MARKS = "_done"  # a folder of jobs of versions up to 0.2.0
PART = re.compile(r"part-(\d{6,})-(\d{4,})\.parquet")
MERGED = "_merged."  # the one file at the end, until it is complete
TEMPORARY = (".", MERGED)
SUFFIXES = (".parquet", ".csv", ".jsonl")
FORMAT = 1
ERROR = "error"  # the column that says why a row has no result


@dataclass(frozen=True)
class Job:
    """What a job is about; one that is resumed must be the same."""

    format: int  # version of this description
    task: str  # "predict" or "extract"
    model: str  # SHA-256 of the model file, or the identity of the backbone
    sources: tuple[str, ...]  # what is read
    settings: dict[str, Any]  # everything else that changes the rows
    part_rows: int  # number of rows of a part
    complete: bool = False  # whether all parts are there
    rows: int | None = None  # their number, if it is known


class Done(NamedTuple):
    """How many rows there are, and how many of them hold an error."""

    rows: int
    errors: int

    @classmethod
    def of(cls, table: Any) -> Done:
        """Count the rows of a part."""
        return cls(table.num_rows, table.num_rows - table[ERROR].null_count)

    @classmethod
    def sum(cls, parts: Iterable[Done]) -> Done:
        """Add up parts."""
        return cls(*(sum(numbers) for numbers in zip((0, 0), *parts, strict=True)))


class Output:
    """The parts of a job, and where they go at the end.

    `out` is a file `.parquet`, `.csv` or `.jsonl`, or a folder, in which the parts stay.
    """

    def __init__(self, out: str) -> None:
        self.out = out = places.plain(out)
        suffix = "." + out.rpartition("/")[2].rpartition(".")[2].lower()
        self.suffix = suffix if suffix in SUFFIXES and not out.endswith("/") else None
        if self.suffix is None and "." in out.rstrip("/").rpartition("/")[2]:
            raise InputError(
                f"The output {out} must be a .parquet, .csv or .jsonl file, or a folder; a "
                "folder's name has no suffix, or ends with a slash."
            )
        target = places.absolute(out)
        self.address = target if self.suffix else f"{target}/"  # for other processes
        self.folder = Folder(f"{target}.parts" if self.suffix else target)
        parent, _, self._file = target.replace("\\", "/").rpartition("/")
        self._parent = Folder(parent)
        if not places.is_address(target):
            need("pyarrow", EXTRA)
            if not Path(parent or "/").is_dir():
                raise InputError(f"The output folder {parent} does not exist; create it first.")
            if self.suffix and Path(target).is_dir():
                raise InputError(f"The output {out} is a folder; choose another name.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process of this computer work on the same job."""
        if places.is_address(self.folder.path):
            yield
            return
        folder = Path(self.folder.path)
        folder.mkdir(exist_ok=True)
        beside = FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)
        try:
            # Windows cannot lock a folder.
            with locked(folder, wait=False) if files.LOCKS_FOLDERS else beside:
                try:
                    yield
                finally:
                    with suppress(OSError):
                        folder.rmdir()  # if it is empty
        except (BlockingIOError, Timeout):
            raise InputError(
                f"Another process is working on {self.out}: wait for it, or stop it."
            ) from None

    def prepare(self, job: Job, *, resume: bool, overwrite: bool) -> Job | None:
        """Check what is there; return the job that is resumed, or None for a new one."""
        found = self._read_job()
        finished = self.suffix is not None and self._parent.exists(self._file)
        if overwrite:
            self._clear()
            return None
        if found is None and not finished:
            self._clear()
            return None
        if not resume:
            what = "exists" if finished or (found and found.complete) else "was not finished"
            raise InputError(
                f"The output {self.out} {what}: complete it with --resume, or replace it with "
                "--overwrite."
            )
        if found is None:
            return replace(job, complete=True)  # the parts have become one file
        self._check_same(found, job)
        return found

    def _read_job(self) -> Job | None:
        if not self.folder.exists(JOB):
            return None
        try:
            document = parse_json(self.folder.read(JOB))
            number = document.get("format") if isinstance(document, dict) else None
            if isinstance(number, int) and number > FORMAT:
                raise InputError("it was written by a newer version of mivhead.")
            return from_json(Job, document, JOB)
        except ValueError as error:
            raise InputError(f"{self.folder / JOB} cannot be used: {error}") from error

    def _clear(self) -> None:
        """Remove an earlier job, but nothing that is not one."""
        names = self.folder.names()
        parts = [name for name in names if PART.fullmatch(name)]
        known = (JOB, PLAN, MARKS, *parts)
        foreign = [each for each in names if each not in known and not each.startswith(TEMPORARY)]
        if foreign or (parts and JOB not in names):
            raise InputError(
                f"The folder {self.folder.path} holds {(foreign or parts)[0]}, which is not a part "
                "of a job: choose another output, or empty the folder."
            )
        self.folder.remove(*parts)
        if MARKS in names:
            Folder(self.folder / MARKS).remove_all()
        self.folder.remove(JOB, PLAN)  # last: until then the job could be resumed

    def _check_same(self, found: Job, job: Job) -> None:
        texts = {
            "task": "for another command",
            "model": "with another model",
            "sources": "on other images",
            "part_rows": "with another --part-rows",
        }
        for name, text in texts.items():
            if getattr(found, name) != getattr(job, name):
                raise InputError(
                    f"{self.out} was started {text} ({_short(getattr(found, name))}, now "
                    f"{_short(getattr(job, name))}): use the same, or --overwrite."
                )
        for name in {**found.settings, **job.settings}:
            old, new = found.settings.get(name), job.settings.get(name)
            if old != new:
                raise InputError(
                    f"{self.out} was started with another {name.replace('_', '-')} "
                    f"({_short(old)}, now {_short(new)}): use the same, or --overwrite."
                )

    # The plan: the shards of the sources, as they were when the job started.

    def write_plan(self, job: Job, shards: Iterator[Shard]) -> Job:
        """Write the shards, then the job; return the job with its number of rows, if known."""
        rows: int | None = 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, PLAN)
            with path.open("w", encoding="utf-8") as file:
                for shard in shards:
                    file.write(json.dumps(to_json(shard)) + "\n")
                    rows = rows + shard.count if rows is not None and shard.count else None
            self.folder.put(PLAN, path)
        job = replace(job, rows=rows)
        self.folder.write_json(JOB, to_json(job))
        return job

    def read_plan(self) -> Iterator[tuple[int, Shard]]:
        """Yield the shards with their numbers."""
        with places.open_file(self.folder / PLAN) as file:
            for number, line in enumerate(file):
                try:
                    yield number, from_json(Shard, parse_json(line), f"shard {number}")
                except ValueError as error:
                    raise InputError(
                        f"{self.folder / PLAN} is corrupted: {error} Start again with --overwrite."
                    ) from error

    # Parts.

    def write_part(self, shard: int, part: int, table: Any) -> None:
        """Write one part."""
        buffer = BytesIO()
        write_tables(buffer, table.schema, [table])
        self.folder.write(_part_name(shard, part), buffer.getvalue())

    def has_part(self, shard: int, part: int) -> bool:
        """Return whether a part is there."""
        return self.folder.exists(_part_name(shard, part))

    def read_part(self, shard: int, part: int) -> Any:
        """Read one part; an error says what to do if it is corrupted."""
        name = _part_name(shard, part)
        try:
            return read_table(self.folder.read(name))
        except (ValueError, OSError, RuntimeError) as error:  # pyarrow's errors derive from these
            raise InputError(
                f"The part {self.folder / name} is corrupted: run the same command with --resume, "
                "which computes it again."
            ) from error

    def parts(self) -> list[tuple[int, int]]:
        """Return the shard and the number of every part that is there, in the order of the rows."""
        found = filter(None, map(PART.fullmatch, self.folder.names()))
        return sorted((int(match[1]), int(match[2])) for match in found)

    def check_parts(self) -> tuple[dict[int, dict[int, Done]], list[str]]:
        """Read every part; return what is in each, by shard and part, and remove corrupted ones.

        Returns
        -------
        dict and list of str
            Rows and errors by shard and part; and the names of what was removed.
        """
        found: dict[int, dict[int, Done]] = {}
        removed = []
        for shard, part in self.parts():
            name = _part_name(shard, part)
            try:
                done = Done.of(read_table(self.folder.read(name)))
            except (ValueError, OSError, RuntimeError, KeyError):
                self.folder.remove(name)
                removed.append(name)
            else:
                found.setdefault(shard, {})[part] = done
        return found, removed

    # The end.

    def finish(self, job: Job, schema: Any, *, raw: bool = False, excel: bool = False) -> None:
        """Make one file of the parts and remove them; a folder of parts stays as it is."""
        if self.suffix is None:
            self.folder.write_json(JOB, to_json(replace(job, complete=True)))
            self.folder.remove(PLAN)
            Folder(self.folder / MARKS).remove_all()
            return
        local = None if places.is_address(self.folder.path) else self.folder.path
        with tempfile.TemporaryDirectory(dir=local, prefix=MERGED) as folder:
            path = Path(folder, self._file)
            tables = itertools.starmap(self.read_part, self.parts())
            if self.suffix == ".parquet":
                write_tables(path, schema, tables)
            elif self.suffix == ".jsonl":
                _write_jsonl(path, tables)
            else:
                _write_csv(path, schema, tables, raw=raw, excel=excel)
            self._parent.put(self._file, path)
        self._clear()
        self.folder.remove_all()


class Folder:
    """A folder of small files, here or at an address, of which none is ever half there."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._fs: Any = None
        self._made: set[str] = set()
        self._inside = self.path
        if is_address(path):
            self._fs, self._inside = file_system(self.path)

    def __truediv__(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        return exists(self / name)

    def names(self) -> list[str]:
        """Return the names of files and folders in it, sorted; empty if it does not exist."""
        if self._fs is None:
            folder = Path(self.path)
            return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        fs, inside = self._fs, self._inside
        if not exists(self.path):
            return []
        fs.invalidate_cache()
        listed = reach(self.path, lambda: fs.ls(inside, detail=False))
        return sorted(filter(None, (each.rstrip("/").rpartition("/")[2] for each in listed)))

    def read(self, name: str) -> bytes:
        """Read a file."""
        with open_file(self / name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file; it appears when it is complete."""
        if self._fs is None:
            with replacing(self / name, make_folders=True) as part:
                part.write_bytes(data)
            return
        fs, path = self._fs, self._make(name)
        reach(self / name, lambda: fs.pipe_file(path, data))

    def write_json(self, name: str, document: Any) -> None:
        """Write a JSON document."""
        self.write(name, json.dumps(document, indent=1).encode())

    def put(self, name: str, local: Path) -> None:
        """Write a file of this computer into the folder; it appears when it is complete."""
        if self._fs is None:
            with replacing(self / name) as part:
                shutil.move(local, part)
            return
        fs, path = self._fs, self._make(name)
        reach(self / name, lambda: fs.put_file(str(local), path))

    def _make(self, name: str) -> str:
        """Create the folder of a file, where there are folders, and return the file's path."""
        path = f"{self._inside}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in self._made:
            reach(self / name, lambda: self._fs.makedirs(folder, exist_ok=True))
            self._made.add(folder)
        return path

    def remove(self, *names: str) -> None:
        """Remove files."""
        for name in names:
            if self._fs is None:
                Path(self / name).unlink(missing_ok=True)
            elif self.exists(name):
                self._fs.rm(f"{self._inside}/{name}")

    def remove_all(self) -> None:
        """Remove the folder."""
        if self._fs is None:
            if Path(self.path).exists():
                shutil.rmtree(self.path)
        elif exists(self.path):
            self._fs.rm(self._inside, recursive=True)


def _part_name(shard: int, part: int) -> str:
    return f"part-{shard:06d}-{part:04d}.parquet"


def _short(value: Any) -> str:
    return shorten(", ".join(map(str, value)) if isinstance(value, tuple) else str(value), 60)


def _write_jsonl(path: Path, tables: Iterator[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            for row in table.to_pylist():
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_csv(path: Path, schema: Any, tables: Iterator[Any], *, raw: bool, excel: bool) -> None:
    names = schema.empty_table().flatten().column_names
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(to_csv(names, [], raw=raw, excel=excel))
        for table in tables:
            columns = [column.to_pylist() for column in table.flatten().columns]
            rows = ([_cell(value) for value in row] for row in zip(*columns, strict=True))
            file.write(to_csv(None, rows, raw=raw, excel=excel))


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return number(value)
    return ";".join(map(str, value)) if isinstance(value, list) else value
