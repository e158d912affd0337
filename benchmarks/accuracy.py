"""The MIV-head against plain heads on the same features, tasks and augmented views.

    python benchmarks/accuracy.py --data DIR --results accuracy.jsonl

10-way (or all classes, if fewer) 5-shot tasks from all 16 sets. The MIV-head has the library's
preset for EfficientNet-Lite0 and recipe "paper"; logistic regression and nearest centroid (cosine
to the class mean) get the global average of the deepest map, 1280-d. Prints Markdown tables with
95 % intervals and paired two-sided t-tests over the same tasks. Takes about half an hour on two
free cores, nearly all of it the MIV-head with views. The tables are in docs/results/accuracy.md.
"""

from __future__ import annotations

from _backbones import efficientnet_lite
from _methods import Centroid, Logistic, Method, Miv
from _runs import Score, Scores, arguments, markdown, mean_over_sets, paired, run
from _tasks import CONFIRMATION, TUNING
from mivhead.backbones.efficientnet_lite import PRESETS

BACKBONE = efficientnet_lite()
PRESET = PRESETS[BACKBONE.name]
GRID = (0.01, 0.1, 1.0, 10.0, 100.0)
C = 10.0  # of the logistic regression: the best of GRID on the tuning sets

METHODS: dict[str, Method] = {
    "MIV-head": Miv(PRESET, views=True),
    "logistic regression": Logistic(C, views=True),
    "nearest centroid": Centroid(views=False),
    "MIV-head, no views": Miv(PRESET, views=False),
    "logistic, no views": Logistic(C, views=False),
    "centroid, views": Centroid(views=True),
}
OURS, RIVALS = "MIV-head", ("logistic regression", "nearest centroid")


def figures(scores: Scores) -> list[list[str]]:
    """One row per set, and the mean over sets; the best method of a row is bold."""
    keys = [method.key for method in METHODS.values()]
    rows = []
    for name, by_method in scores.items():
        rows.append(
            [name, *emphasised([(by_method[k].mean, by_method[k].half_width) for k in keys])]
        )
    return [*rows, ["**mean**", *emphasised([mean_over_sets(scores, key) for key in keys])]]


def emphasised(values: list[tuple[float, float]]) -> list[str]:
    best = max(round(mean, 1) for mean, _ in values)
    return [
        f"**{mean:.1f}** ± {width:.1f}" if round(mean, 1) == best else f"{mean:.1f} ± {width:.1f}"
        for mean, width in values
    ]


def tests(scores: Scores) -> list[list[str]]:
    """Differences to the rivals per set, and over the tasks of all sets together."""
    rows = [[name, *compared([by_method])] for name, by_method in scores.items()]
    return [*rows, ["**all tasks**", *compared(list(scores.values()))]]


def compared(parts: list[dict[str, Score]]) -> list[str]:
    cells = []
    for rival in RIVALS:
        difference, p = paired(parts, METHODS[OURS].key, METHODS[rival].key)
        verdict = "" if p >= 0.01 else "better" if difference > 0 else "worse"
        cells += [f"{difference:+.1f}", f"{p:.2g}", verdict]
    return cells


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "all")
    parser.add_argument(
        "--choose-c", action="store_true", help="only compare logistic regressions by their C"
    )
    args = parser.parse_args()
    if args.choose_c:
        grid = [Logistic(c, views=views) for views in (True, False) for c in GRID]
        scores = run(BACKBONE, grid, args)
        for method in grid:
            mean, width = mean_over_sets(scores, method.key)
            print(f"{method.key}: {mean:.1f} ± {width:.1f}")
        return
    scores = run(BACKBONE, list(METHODS.values()), args)
    header = [cell for rival in RIVALS for cell in (f"minus {rival}", "p", "p < 0.01")]
    for title, names in {"Tuning": TUNING, "Confirmation": CONFIRMATION, "All": args.sets}.items():
        if part := {name: scores[name] for name in names if name in scores}:
            rows = slice(-1, None) if title == "All" else slice(None)  # the sums suffice
            print(f"\n{title} sets, {args.tasks} tasks a set, accuracy in %:\n")
            print(markdown(["set", *METHODS], figures(part)[rows]))
            print(f"\n{title} sets, {OURS} against each rival, paired t-test:\n")
            print(markdown(["set", *header], tests(part)[rows]))


if __name__ == "__main__":
    main()
