"""The tables and the chart of the documentation, from results/accuracy.csv.

    python benchmarks/figures.py                    # renews docs/how-good.md, docs/research-log.md
    python benchmarks/figures.py --jsonl FILE...    # adds files of benchmarks/which_backbone.py

results/accuracy.csv has a row per backbone, protocol, set, task and method, so that differences can
be paired. A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from _bench import CORRECTED, SETS, read_jsonl
from mivhead._version import __version__
from mivhead_bench.benchmark.compare import Paired, paired_test

ROOT = Path(__file__).parent.parent
FILE = ROOT / "results" / "accuracy.csv"
PAGES = ROOT / "docs" / "how-good.md", ROOT / "docs" / "research-log.md"
CHART = ROOT / "docs" / "pictures" / "by-set.svg"
COLUMNS = ("backbone", "protocol", "set", "task", "method", "accuracy", "library")
START, END = "<!-- figures: {} -->", "<!-- end of figures -->"

BACKBONE = "efficientnet_lite0"
PROTOCOLS = {  # as users would say it
    "10-way 5-shot": "10 classes, 5 photos each",
    "5-way 1-shot": "5 classes, 1 photo each",
    "unequal shots": "5 to 10 classes, 1 to 12 photos",
}
UNSEEN = {  # protocols of results/unseen.csv
    "10-way 5-shot": "10 classes, 5 photos",
    "5 to 10 classes, 5 shots": "5 to 10, 5 photos",
    "5 to 10 classes, 3 shots": "5 to 10, 3 photos",
    "5-way 1-shot": "5, 1 photo",
    "5 to 10 classes, 1 to 12 shots": "5 to 10, 1 to 12 photos",
}
METHODS = {
    "miv": "**mivhead**",
    "miv-paper": "the paper's recipe",
    "experts": 'mivhead without its head (`recipe="experts"`)',
    "ridge": "ridge regression",
    "ridge-sqrt": "ridge regression on square roots",
    "ridge-all": "ridge regression on all blocks",
    "logistic": "logistic regression",
    "logistic-all": "logistic regression on all blocks",
    "ncc": "nearest centroid",
    "laplacianshot": "LaplacianShot, which sees all new photos at once",
}
NOT_PLAIN = ("miv", "experts", "laplacianshot")  # it names the queries of a task together
NAMES = {
    "cub200_birds": "birds",
    "gtsrb_traffic_signs": "traffic signs",
    "cifar10": "CIFAR-10",
    "omniglot": "Omniglot",
    "fgvc_aircraft": "aircraft",
    "dtd_textures10": "textures",
    "eurosat": "EuroSAT",
    "plantvillage_cropdisease": "crop disease",
    "quickdraw345": "Quick Draw",
    "vgg_flower102": "flowers",
    "mnist": "MNIST",
    "isic_skin_lesions": "skin lesions",
    "chestx_nih": "chest X-rays",
    "food101_small": "food",
    "mushrooms7": "mushrooms",
    "mscoco_crops": "COCO crops",
}

Scores = dict[str, dict[str, list[float]]]  # by set and method, in the order of the tasks


def read(path: Path = FILE, backbone: str = BACKBONE) -> dict[str, Scores]:
    """Read the accuracies of a backbone, by protocol."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["backbone"] == backbone:
                scores = found[row["protocol"]][row["set"]][row["method"]]
                scores[int(row["task"])] = float(row["accuracy"]) / 100
    return {
        protocol: {
            name: {method: [by[task] for task in sorted(by)] for method, by in methods.items()}
            for name, methods in sets.items()
        }
        for protocol, sets in found.items()
    }


def corrected(scores: Scores) -> Scores:
    """Let rivals count with their correction, where they have one."""
    return {
        name: methods
        | {
            method.removesuffix(CORRECTED): values
            for method, values in methods.items()
            if method.endswith(CORRECTED)
        }
        for name, methods in scores.items()
    }


def mean(scores: Scores, method: str, sets: Iterable[str]) -> float:
    """Return the mean over sets, in %."""
    return 100 * float(np.mean([np.mean(scores[name][method]) for name in sets]))


def lead(scores: Scores, other: str, sets: Iterable[str]) -> Paired:
    """Compare mivhead with another method over all tasks of some sets."""
    ours, theirs = ([x for name in sets for x in scores[name][method]] for method in ("miv", other))
    return paired_test(ours, theirs)


def best_plain(scores: Scores, sets: Iterable[str]) -> str:
    """Return the plain head with the highest mean on these sets."""
    own = set.intersection(*({*scores[name]} for name in sets))
    plain = [method for method in sorted(own) if not method.startswith(NOT_PLAIN)]
    return max(plain, key=lambda method: mean(scores, method, sets))


def accuracy_table(found: dict[str, Scores]) -> list[str]:
    """Return the means over the confirmation sets and how far mivhead is ahead."""
    protocols = [name for name in PROTOCOLS if name in found]
    head, rule = ["on our 8 confirmation sets"], ["---"]
    for name in protocols:
        head += [PROTOCOLS[name], "mivhead leads by"]
        rule += ["---:", "---:"]
    rows = []
    for method, title in METHODS.items():
        row = [title]
        for name in protocols:
            scores = corrected(found[name])
            sets = [each for each in SETS["confirmation"] if each in scores]
            if not all(method in scores[each] for each in sets):
                row += ["", ""]
                continue
            value = f"{mean(scores, method, sets):.1f}%"
            ours = method == "miv"
            row += [f"**{value}**" if ours else value]
            row += ["" if ours else lead(scores, method, sets).difference.signed]
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def cells(scores: Scores, sets: list[str]) -> list[str]:
    """Return mivhead's accuracy, and its lead over the best plain head."""
    test = lead(scores, best_plain(scores, sets), sets)
    return [f"{mean(scores, 'miv', sets):.1f}", test.difference.signed]


def sets_table(found: dict[str, Scores]) -> list[str]:
    """Return mivhead's accuracy on each set, and its lead over the best plain head there."""
    protocols = [name for name in PROTOCOLS if name in found]
    head, rule = ["set"], ["---"]
    for name in protocols:
        head += [name, "lead over the best plain head"]
        rule += ["---:"] * 2
    rows = []
    for group, members in SETS.items():
        if group not in ("tuning", "confirmation"):
            continue
        for each in members:
            row = [NAMES[each]]
            for name in protocols:
                scores = corrected({each: found[name][each]})
                row += cells(scores, [each])
            rows.append(row)
        row = [f"*8 {group} sets*"]
        for name in protocols:
            row += [
                f"*{cell}*" if cell else "" for cell in cells(corrected(found[name]), list(members))
            ]
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def unequal_table(found: dict[str, Scores]) -> list[str]:
    """Return all methods on tasks with unequal shots of the confirmation sets, as corrected."""
    scores = found["unequal shots"]
    sets = list(SETS["confirmation"])
    rows = [
        ["method", "as it is", "corrected", "`miv` minus that"],
        ["---", "---:", "---:", "---:"],
    ]
    rivals = {each.removesuffix(CORRECTED) for each in scores[sets[0]]}
    for method in sorted(rivals, key=lambda each: -mean(scores, each, sets)):
        row = [f"`{method}`", f"{mean(scores, method, sets):.1f}", ""]
        other = method + CORRECTED
        if other in scores[sets[0]]:
            row[2] = f"{mean(scores, other, sets):.1f}"
        test = lead(corrected(scores), method, sets)
        rows.append([*row, "" if method == "miv" else test.difference.signed])
    return ["| " + " | ".join(row) + " |" for row in rows]


def protocols_table(found: dict[str, Scores]) -> list[str]:
    """Return how mivhead and the best corrected plain head compare, however unequal shots are."""
    head = ["protocol", "tasks, sets", "`miv`", "recipe `experts`", "best plain head, corrected"]
    rows = [[*head, "`miv` minus that (p)"], ["---", *["---:"] * 5]]
    for protocol in (
        "1 to 3 shots",
        "3 to 8 shots",
        "unequal shots",
        "varying",
        "60 to 1",
        "300 to 1",
    ):
        if protocol not in found:
            continue
        scores = corrected(found[protocol])
        sets = list(scores)
        plain = best_plain(scores, sets)
        test = lead(scores, plain, sets)
        experts = mean(scores, "experts", sets)
        rows.append(
            [
                protocol,
                f"{test.difference.n}, {len(sets)}",
                f"{mean(scores, 'miv', sets):.1f}",
                f"{experts:.1f}",
                f"`{plain}` {mean(scores, plain, sets):.1f}",
                f"{test.difference.signed} ({test.p:.1g})",
            ]
        )
    return ["| " + " | ".join(row) + " |" for row in rows]


def unseen_table(_: dict[str, Scores]) -> list[str]:
    """Return the means over further sets; the interval of a lead is that over the sets."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    with (FILE.parent / "unseen.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["protocol"]][row["method"]][row["set"]] = float(row["accuracy"]) / 100
    protocols = [name for name in UNSEEN if name in found]
    rows = [["on 17 further image sets"], ["---"]]
    for name in protocols:
        rows[0] += [UNSEEN[name], "lead"]
        rows[1] += ["---:", "---:"]
    for method, title in METHODS.items():
        row = [title]
        for name in protocols:
            theirs = found[name][method]
            ours = [found[name]["miv"][each] for each in theirs]
            row += [f"{100 * np.mean([*theirs.values()]):.1f}%" if theirs else ""]
            ahead = theirs and method != "miv"
            row += [paired_test(ours, [*theirs.values()]).difference.signed if ahead else ""]
        if any(row[1:]):
            rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


NETWORKS = {
    BACKBONE: "EfficientNet-Lite0",
    "vit_tiny_patch16_224": "ViT-Ti/16",
    "deit_tiny_patch16_224": "DeiT-Ti/16",
    "ese_vovnet19b_dw": "VoVNet-19b",
}
RIVALS = ("experts", "miv-paper", "ridge", "ridge-all", "logistic", "ncc", "laplacianshot")


def networks_table(_: dict[str, Scores]) -> list[str]:
    """Return mivhead's accuracy on each network, and its lead over each rival."""
    rows = [
        ["confirmation sets", "tasks", "`miv`", *(f"minus `{rival}`" for rival in RIVALS)],
        ["---", *["---:"] * (2 + len(RIVALS))],
    ]
    sets = SETS["confirmation"]
    for protocol in PROTOCOLS:
        for network, title in NETWORKS.items():
            if network == BACKBONE:  # in the table of all methods
                continue
            scores = corrected(read(backbone=network)[protocol])
            known = [all(rival in scores[name] for name in sets) for rival in RIVALS]
            leads = [
                lead(scores, rival, sets).difference.signed if has else ""
                for rival, has in zip(RIVALS, known, strict=True)
            ]
            count = sum(len(scores[name]["miv"]) for name in sets)
            value = f"{mean(scores, 'miv', sets):.1f}"
            rows.append([f"{title}, {protocol}", str(count), value, *leads])
    return ["| " + " | ".join(row) + " |" for row in rows]


def head_table(_: dict[str, Scores]) -> list[str]:
    """Return what the head adds to the experts alone, on every network."""
    rows = [["minus `experts`", *("tuning: tasks", "`miv`", "difference")]]
    rows[0] += ["confirmation: tasks", "`miv`", "difference"]
    rows.append(["---", *["---:"] * 6])
    for protocol in PROTOCOLS:
        for network, title in NETWORKS.items():
            scores = read(backbone=network)[protocol]
            row = [f"{title}, {protocol}"]
            for group in ("tuning", "confirmation"):
                test = lead(scores, "experts", SETS[group])
                whole = f"{mean(scores, 'miv', SETS[group]):.1f}"
                row += [str(test.difference.n), whole, test.difference.signed]
            rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


TABLES = {
    "head": head_table,
    "networks": networks_table,
    "unseen": unseen_table,
    "unequal": unequal_table,
    "protocols": protocols_table,
    "accuracy": accuracy_table,
    "sets": sets_table,
}


def renew(text: str, found: dict[str, Scores]) -> str:
    """Replace the tables between the markers of a page."""
    for name, make in TABLES.items():
        before, marker, rest = text.partition(START.format(name))
        if marker:
            _, _, after = rest.partition(END)
            text = f"{before}{marker}\n\n" + "\n".join(make(found)) + f"\n\n{END}{after}"
    return text


STYLE = """
text { fill: #66707d; font: 14px system-ui, sans-serif; }
.grid { stroke: #8892a0; stroke-opacity: .3; } .bar { stroke: #0b6e8f; stroke-width: 3; }
.ours { fill: #0b6e8f; } .plain { fill: #fff; stroke: #8892a0; stroke-width: 2; }
"""


def chart(scores: Scores) -> str:
    """Draw a line per set, from the best plain head to mivhead."""
    ours = {name: mean(scores, "miv", [name]) for name in scores}
    names = sorted(scores, key=lambda name: -ours[name])
    left, width, top, step = 112, 340, 54, 24
    bottom = top + step * len(names)

    def text(words: str, x: float, y: float, anchor: str = "start") -> str:
        return f'<text x="{x:.1f}" y="{y + 5}" text-anchor="{anchor}">{words}</text>'

    def dot(kind: str, x: float, y: float) -> str:
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="6"/>'

    def line(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
        return f'<path class="{kind}" d="M{x:.1f} {y}L{to_x:.1f} {to_y}"/>'

    title = "Accuracy with five photos of each of ten classes, by image set"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 40} {bottom + 34}" '
        f'role="img" aria-labelledby="t"><title id="t">{title}</title><style>{STYLE}</style>',
        dot("ours", left, 20) + text("mivhead", left + 12, 20),
        dot("plain", left + 100, 20) + text("best of the plain heads", left + 112, 20),
    ]
    for percent in range(0, 101, 20):
        x = left + width * percent / 100
        parts.append(line("grid", x, top - 12, x, bottom))
        parts.append(text(f"{percent}%", x, bottom + 14, "middle"))
    for row, name in enumerate(names):
        y = top + step * row + 4
        plain = mean(scores, best_plain({name: scores[name]}, [name]), [name])
        start, end = (left + width * value / 100 for value in (plain, ours[name]))
        parts.append(text(NAMES[name], left - 14, y, "end"))
        parts.append(line("bar", start, y, end, y) + dot("plain", start, y) + dot("ours", end, y))
    return "\n".join([*parts, "</svg>", ""])


def add_jsonl(paths: list[Path], library: str) -> None:
    """Add the rows of files of benchmarks/which_backbone.py."""
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = {tuple(row[key] for key in COLUMNS[:5]): row for row in csv.DictReader(file)}
    for *where, accuracy, _ in read_jsonl(paths):
        values = (*map(str, where), f"{100 * accuracy:.2f}", library)
        rows[values[:5]] = dict(zip(COLUMNS, values, strict=True))
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows, key=lambda key: (*key[:3], key[4])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jsonl", type=Path, nargs="*", help="files of which_backbone.py")
    parser.add_argument("--library", default=__version__, help="that measured these files")
    args = parser.parse_args()
    if args.jsonl:
        add_jsonl(args.jsonl, args.library)
    found = read()
    for page in PAGES:
        page.write_text(renew(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    CHART.write_text(chart(found["10-way 5-shot"]), encoding="utf-8")


if __name__ == "__main__":
    main()
