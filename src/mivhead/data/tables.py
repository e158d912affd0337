"""A CSV of image paths and labels."""

from __future__ import annotations

import csv
import io
from pathlib import Path, PurePosixPath

from mivhead.data.imageset import ImageSet, ImageSource, given
from mivhead.data.naming import is_image_name, normal
from mivhead.errors import InputError

PATH_NAMES = ("path", "file", "image", "filename")
LABEL_NAMES = ("label", "class")
MAX_TABLE_BYTES = 64 * 2**20


def open_table(path: Path) -> ImageSet:
    """Read a table with one row per image: its path and its label.

    The columns are found by a header (`path`, `file`, `image` or `filename`; `label` or `class`);
    without one they are the first two. Comma, semicolon or tab separates them. Paths are relative
    to the table's folder; absolute ones are allowed too. Rows keep their order.
    """
    rows = _read_rows(path)
    if not rows:
        raise InputError(f"{path} is empty; expected a row with a path and a label per image.")
    path_at, label_at, rows = _find_columns(path, rows)
    sources, labels, seen = [], [], set()
    for line, row in rows:
        if len(row) <= max(path_at, label_at) or not row[path_at] or not row[label_at]:
            raise InputError(f"{path}, line {line}: expected a path and a label, found {row}.")
        relative = PurePosixPath(row[path_at].replace("\\", "/"))
        if relative in seen:
            raise InputError(f"{path}, line {line}: {relative} is listed twice.")
        seen.add(relative)
        file = path.parent / relative
        name = f"{file} ({path.name}, line {line})"
        sources.append(ImageSource(normal(str(relative)), given(file), name))
        labels.append(normal(row[label_at]))
    if not sources:
        raise InputError(f"{path} has a header but no rows.")
    return ImageSet(tuple(sources), tuple(labels))


def _read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, with their line numbers."""
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise InputError(f"{path} is larger than {MAX_TABLE_BYTES // 2**20} MiB.")
        text = path.read_text(encoding="utf-8-sig")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text; save it as CSV in UTF-8.") from None
    except (OSError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    return [(line, row) for line, row in rows if any(row)]


def _find_columns(
    path: Path, rows: list[tuple[int, list[str]]]
) -> tuple[int, int, list[tuple[int, list[str]]]]:
    first = [cell.casefold() for cell in rows[0][1]]
    path_at = next((i for i, cell in enumerate(first) if cell in PATH_NAMES), None)
    label_at = next((i for i, cell in enumerate(first) if cell in LABEL_NAMES), None)
    if path_at is not None and label_at is not None:
        return path_at, label_at, rows[1:]
    if is_image_name(first[0]):
        return 0, 1, rows
    raise InputError(
        f"{path} needs a header with a path column ({', '.join(PATH_NAMES)}) and a label column "
        f"({', '.join(LABEL_NAMES)}); found {', '.join(rows[0][1])}."
    )
