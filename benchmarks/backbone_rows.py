"""Rows of results/backbones.csv: one per backbone, protocol, set and method.

    python benchmarks/backbone_rows.py ROWS.csv...                 # of `miv bench report`
    python benchmarks/backbone_rows.py --jsonl FILE... --commit C  # of benchmarks/which_backbone.py
    python benchmarks/backbone_rows.py --page                      # renews the documentation

Replaces the rows of the same backbone, protocol, set and method; other rows stay. `--page` writes
results/page.csv, which docs/results.md shows, and a chart. In older rows, `vit` is the ViT-S/14,
and `resnet50` the Keras network, of docs/research-log.md.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from _bench import CORRECTED, SETS, read_jsonl
from mivhead._version import __version__
from mivhead_bench.benchmark.leaderboard import COLUMNS, KEY, ORIGIN, PAGE, page_rows, score

FILE = Path(__file__).parent.parent / "results" / "backbones.csv"
CHART = FILE.parent.parent / "docs" / "pictures" / "backbones.png"
DRAWN = ("10-way 5-shot", "5-way 1-shot")
SHOWN = {"miv": "MIV-head", "ridge": "ridge", "logistic": "logistic regression", "ncc": "centroids"}


def of_jsonl(paths: list[Path], commit: str) -> Iterator[dict[str, Any]]:
    """Read files of benchmarks/which_backbone.py."""
    found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for *key, _, method, accuracy, spent in read_jsonl(paths):
        found[(*key, method)].append((accuracy, spent))
    for (backbone, protocol, set_, method), results in found.items():
        yield {
            **dict(zip(KEY, (backbone, protocol, set_, method), strict=True)),
            **score(*zip(*results, strict=True)),
            "library": __version__,
            "commit": commit,
            "tasks_hash": "",
            "weights_hash": "",
            "command": f"which_backbone.py --backbones {backbone} --protocol '{protocol}' "
            f"--methods {method.removesuffix(CORRECTED)} --tasks {len(results)}",
        }


def read(path: Path = FILE) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(rows: Iterable[dict[str, Any]], path: Path = FILE) -> int:
    """Merge rows into the file; return how many it has."""
    merged = {tuple(row[name] for name in KEY): row for row in read(path)}
    merged |= {tuple(str(row[name]) for name in KEY): row for row in rows}
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged[key] for key in sorted(merged))
    return len(merged)


def draw(rows: list[dict[str, str]], path: Path = CHART) -> None:
    """Draw the means: a row per backbone, a mark per method."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, dict[str, dict[str, float]]]] = []
    for protocol in DRAWN:
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for row in page_rows(rows, {"confirmation": SETS["confirmation"]}):
            if row["protocol"] == protocol and row["sets"] == "8 confirmation":
                found[row["backbone"]][row["method"]] = float(row["accuracy"])
        panels.append((f"{protocol}, 8 confirmation sets", found))
    lines = max(len(found) for _, found in panels)
    size = 7.5, (0.9 + 0.32 * lines) * len(panels) + 0.3
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, found) in zip(axes, panels, strict=True):
        order = sorted(found, key=lambda backbone: found[backbone].get("miv", 0.0))
        for (method, label), mark in zip(SHOWN.items(), "osD^", strict=True):
            points = [(found[b][method], y) for y, b in enumerate(order) if method in found[b]]
            if points:
                axis.plot(*zip(*points, strict=True), mark, label=label, markersize=6)
        labels = [
            " + ".join(each.replace("efficientnet_", "") for each in b.split("+")) for b in order
        ]
        axis.set(yticks=range(len(order)), yticklabels=labels, ylim=(-0.6, len(order) - 0.4))
        axis.set_title(f"{title}: accuracy in %", fontsize=10, loc="left")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def page(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of the results page, the most accurate first."""
    groups = {name: SETS[name] for name in ("tuning", "confirmation")}
    shown = [row | {"command": f"`{row['command']}`"} for row in page_rows(rows, groups)]
    return sorted(shown, key=lambda row: -float(row["accuracy"]))


def renew_page() -> None:
    """Write the rows of the results page, and its chart."""
    rows = read()
    with (FILE.parent / "page.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*PAGE, *ORIGIN), lineterminator="\n")
        writer.writeheader()
        writer.writerows(page(rows))
    draw(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--jsonl", type=Path, nargs="*", default=[])
    parser.add_argument("--commit", default="", help="that measured the .jsonl files")
    parser.add_argument("--page", action="store_true", help="renew the documentation")
    args = parser.parse_args()
    rows = [row for file in args.files for row in read(file)]
    rows += of_jsonl(args.jsonl, args.commit)
    if rows:
        print(f"{FILE} has {write(rows)} rows, {len(rows)} of them new or replaced.")
    if args.page:
        renew_page()


if __name__ == "__main__":
    main()
