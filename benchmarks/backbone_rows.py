"""Rows of results/backbones.csv: one per backbone, protocol, set and method.

    python benchmarks/backbone_rows.py RUN...          # run folders of `miv bench run modern`
    python benchmarks/backbone_rows.py --jsonl FILE    # a file of benchmarks/which_backbone.py
    python benchmarks/backbone_rows.py --page          # renews table and chart of the documentation

Replaces the rows of the same backbone, protocol, set and method; other rows stay. Rows of a run
have the version of the library and the hashes of the tasks and of the weights: only rows of equal
tasks may be compared in pairs. In older files, `vit` is the ViT-S/14 and `resnet50` the Keras
network of docs/research-log.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mivhead.benchmark.compare import student_95

FILE = Path(__file__).parent.parent / "results" / "backbones.csv"
PAGE = FILE.parent.parent / "docs" / "research-log.md"
CHART = PAGE.parent / "pictures" / "backbones.png"
SHOWN = {"miv": "MIV-head", "ridge": "ridge", "logistic": "logistic regression", "ncc": "centroids"}
START, END = "<!-- results/backbones.csv -->", "<!-- end of the table -->"
COLUMNS = (
    *("backbone", "protocol", "set", "method", "tasks", "accuracy", "half_width", "seconds"),
    *("library", "tasks_hash", "weights_hash", "source"),
)
KEY = COLUMNS[:4]


def summarise(scores: Iterable[float]) -> dict[str, Any]:
    """Return the number of tasks, the mean and the half-width of its 95 % interval, in %."""
    values = 100 * np.array(list(scores))
    half = 0.0
    if len(values) > 1:
        half = student_95(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return {
        "tasks": len(values),
        "accuracy": f"{values.mean():.2f}",
        "half_width": f"{half:.2f}",
    }


def of_jsonl(path: Path, library: str) -> Iterator[dict[str, Any]]:
    """Read a file of benchmarks/which_backbone.py."""
    found: dict[Any, dict[int, list[float]]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for method, result in row["methods"].items():
            key = (row["backbone"], row["protocol"], row["set"], method)
            found[key][row["task"]] = result
    for (backbone, protocol, set_, method), results in found.items():
        yield {
            "backbone": backbone,
            "protocol": protocol,
            "set": set_,
            "method": method,
            **summarise(score for score, _ in results.values()),
            "seconds": f"{np.median([spent for _, spent in results.values()]):.3f}",
            "library": library,
            "tasks_hash": "",
            "weights_hash": "",
            "source": f"{path.name}",
        }


def of_run(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the results of a run folder."""
    from mivhead.benchmark.results import read_origin, read_results, read_weights

    origin, weights = read_origin(folder), read_weights(folder)
    groups: dict[Any, list[Any]] = defaultdict(list)
    for result in read_results(folder):
        if result.accuracy is not None:
            key = (result.backbone, result.protocol, result.set, result.method)
            groups[key].append(result)
    for (backbone, protocol, set_, method), results in groups.items():
        yield {
            "backbone": backbone,
            "protocol": protocol,
            "set": set_,
            "method": method,
            **summarise(each.accuracy for each in results),
            "seconds": f"{np.median([each.adapt_seconds for each in results]):.3f}",
            "library": origin.get("version", "").partition(",")[0].removeprefix("mivhead "),
            "tasks_hash": results[0].tasks[:12],
            "weights_hash": weights.get(backbone, "")[:12],
            "source": folder.name,
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


Means = dict[str, dict[str, float]]  # accuracy by backbone and method


def means(rows: list[dict[str, str]]) -> Iterator[tuple[str, Means]]:
    """Yield, per protocol, its title and the means over the sets that all backbones have."""
    for protocol in sorted({row["protocol"] for row in rows}):
        own = [row for row in rows if row["protocol"] == protocol]
        backbones = sorted({row["backbone"] for row in own})
        sets = {b: {row["set"] for row in own if row["backbone"] == b} for b in backbones}
        common = set.intersection(*sets.values())
        scores: dict[str, dict[str, list[float]]] = {b: defaultdict(list) for b in backbones}
        for row in own:
            if row["set"] in common:
                scores[row["backbone"]][row["method"]].append(float(row["accuracy"]))
        found = {
            backbone: {m: float(np.mean(x)) for m, x in own.items() if len(x) == len(common)}
            for backbone, own in scores.items()
        }
        yield f"{protocol}, {len(common)} sets", found


def table(rows: list[dict[str, str]]) -> str:
    """Return the means as Markdown."""
    lines = []
    for title, found in means(rows):
        methods = sorted({method for own in found.values() for method in own})
        lines += [f"| {title} | " + " | ".join(methods) + " |", "|---|" + "---:|" * len(methods)]
        for backbone, own in found.items():
            cells = [f"{own[method]:.1f}" if method in own else "" for method in methods]
            lines.append(f"| {backbone} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]], path: Path = CHART) -> None:
    """Draw the means: a row per backbone, a mark per method."""
    from matplotlib.figure import Figure

    panels = list(means(rows))
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


def renew_page(path: Path = PAGE, chart: Path = CHART) -> None:
    """Replace the table between the markers of the page, and the chart."""
    before, _, rest = path.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    rows = read()
    path.write_text(f"{before}{START}\n\n{table(rows)}\n{END}{after}", encoding="utf-8")
    draw(rows, chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--page", action="store_true", help="renew the table and the chart")
    parser.add_argument("--library", default="0.2.0", help="version that measured the .jsonl file")
    args = parser.parse_args()
    rows = [row for run in args.runs for row in of_run(run)]
    if args.jsonl:
        rows += of_jsonl(args.jsonl, args.library)
    if args.page:
        renew_page()
        return
    print(f"{FILE} has {write(rows)} rows, {len(rows)} of them new or replaced.")


if __name__ == "__main__":
    main()
