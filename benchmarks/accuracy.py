"""The MIV-head against plain heads on the same features, tasks and augmented views.

    python benchmarks/accuracy.py --data DIR -o RUN

Runs 10-way (or all classes, if fewer) 5-shot tasks from all 16 sets with `mivhead.benchmark` and
writes RUN/report. The MIV-head has the library's preset for EfficientNet-Lite0 and recipe "paper";
logistic regression and nearest centroid (cosine to the class mean) get the global average of the
deepest map, 1280-d. Takes about half an hour on two free cores, nearly all of it the MIV-head with
views. The results are discussed in docs/research-log.md.
"""

from __future__ import annotations

from _bench import arguments, measure

GRID = (0.01, 0.1, 1.0, 10.0, 100.0)
C = 10.0  # of the logistic regression: the best of GRID on the tuning sets


def logistic(name: str, c: float, *, views: bool) -> dict[str, object]:
    params = {"C": c, "normalise": False, "max_iter": 2000, "use_views": views}
    return {"name": name, "method": "logistic", "params": params}


METHODS = [
    {"name": "miv", "recipe": "paper"},
    logistic("logistic", C, views=True),
    {"name": "ncc"},
    {"name": "miv, no views", "method": "miv", "recipe": "paper", "threshold": 0},
    logistic("logistic, no views", C, views=False),
    {"name": "ncc, views", "method": "ncc", "params": {"use_views": True}},
]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--choose-c", action="store_true", help="only compare logistic regressions by their C"
    )
    args = parser.parse_args()
    if args.choose_c:
        pairs = [(c, views) for views in (True, False) for c in GRID]
        methods = [
            logistic(f"C={c:g}{'' if views else ', no views'}", c, views=views)
            for c, views in pairs
        ]
    else:
        methods = METHODS
    measure({"methods": methods}, args)


if __name__ == "__main__":
    main()
