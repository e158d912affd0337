"""`miv bench`: compare backbones and methods on many few-shot tasks."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.output import plural, print_json, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.benchmark.compare import Row, Side
    from mivhead.benchmark.config import RunConfig
    from mivhead.benchmark.results import Result

DATA = "MIV_DATA"


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    actions = options.new_group(
        subparsers,
        "bench",
        "compare methods on many few-shot tasks",
        "Compare methods on the same few-shot tasks, with costs and intervals.",
        "miv bench run small -o try",
    )
    for add in (_add_run, _add_open_set, _add_report, _add_compare):
        add(actions)


# miv bench run


RUN_EXAMPLES = """
miv bench run small -o try                          # on images that pip packages contain
miv bench run --data sets/ --methods miv,ncc --tasks 50 -o run
miv bench run my.toml --data sets/ -o run           # run it again to resume
miv bench run --data sets/ --protocol "5-way 1-shot" --views 15 -o one-shot
miv bench run main --data /shared/sets --executor ray --address auto \\
  --cache /shared/features --cache-gb 200 -o /shared/run
"""


def _add_run(actions: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        actions,
        "run",
        "run a benchmark, or resume one",
        "Sample tasks from data sets and run every method on every task. Each image passes the "
        "backbone once; its features are kept in the feature cache. Every result is written as "
        "soon as it is available: to resume a run that was stopped or killed, run the same command "
        "again.",
        RUN_EXAMPLES,
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a .toml file, or the name of a ready-made configuration",
    )
    parser.add_argument("-o", "--output", required=True, metavar="RUN", help="folder for results")
    _add_what(parser.add_argument_group("what to compare (overrides the configuration)"))
    _add_how(parser.add_argument_group("where and how to run"))
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run_run)


def _add_what(group: argparse._ArgumentGroup) -> None:
    def add_list(name: str, text: str, split: Any = options.names) -> None:
        group.add_argument(name, type=split, action="extend", metavar="A,B", help=text)

    add_list("--sets", "data sets (default: all in the data folder)")
    add_list("--methods", "names from `miv methods`, or from the configuration")
    add_list("--backbone", "backbones, as for --backbone of `miv fit`")
    group.add_argument("--weights", metavar="FILE", help="checkpoint; only with a single backbone")
    add_list("--protocol", "'varying', or ways and shots such as '5-way 1-shot'", _protocols)
    group.add_argument(
        "--tasks",
        type=options.positive,
        metavar="N",
        help="tasks per data set (default: as configured, or 600)",
    )
    group.add_argument(
        "--seed",
        type=options.not_negative,
        metavar="N",
        help="random seed (default: as configured, or 0)",
    )
    group.add_argument(
        "--views",
        type=_views,
        metavar="V",
        help="maximum number of augmented views per image; preset: as the backbone's preset gives",
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", metavar="DIR", help=f"folder of data sets (default: the variable {DATA})"
    )
    group.add_argument(
        "--workers",
        type=options.not_negative,
        metavar="N",
        help="processes of one thread each (default: one per core; 0: in this process)",
    )
    group.add_argument(
        "--executor", choices=("local", "ray"), default="local", help="this machine, or a cluster"
    )
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of a Ray cluster; `auto` finds the one on this machine",
    )
    group.add_argument(
        "--cache",
        metavar="DIR",
        help="folder of the feature cache (default: the one that `miv cache info` shows)",
    )
    group.add_argument(
        "--cache-gb", type=_gigabytes, metavar="GB", help="size up to which the cache may grow"
    )
    for old, advice in (
        ("--bank", "use --cache DIR"),
        ("--bank-gb", "use --cache-gb GB"),
        ("--drop-bank", "the cache removes the features that were not used for the longest time"),
    ):
        group.add_argument(old, nargs="?", const="", type=_removed(advice), help=argparse.SUPPRESS)


def _removed(advice: str) -> Callable[[str], None]:
    """Make the type of an option of earlier versions: an error that says what to use instead."""

    def refuse(_: str) -> None:
        raise argparse.ArgumentTypeError(f"this option no longer exists: {advice}")

    return refuse


def _protocols(text: str) -> list[str]:
    """Split a list of protocols, whose names may contain commas themselves.

    >>> _protocols("varying, max_ways 20,5-way 1-shot")
    ['varying, max_ways 20', '5-way 1-shot']
    """
    return re.split(r"\s*,\s*(?=varying\b|\d+-way)", text.strip())


def _views(text: str) -> int | str:
    return text if text == "preset" else options.not_negative(text)


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes, like 50")
    return value


def run_run(args: argparse.Namespace) -> int:
    """Run the action."""
    options.prepare(args)
    from mivhead.benchmark import runner
    from mivhead.benchmark.executors import make_executor
    from mivhead.benchmark.live import LiveView

    config, data = _what(args)
    place = runner.Place(
        folder=Path(args.output),
        data=data,
        cache=None if args.cache is None else Path(args.cache),
        cache_gb=args.cache_gb,
        device=args.device,
    )
    workers = runner.default_workers() if args.workers is None else args.workers
    executor = make_executor(args.executor, workers, args.address)
    try:
        results = runner.run(config, place, executor, view=LiveView(quiet=args.quiet))
    except KeyboardInterrupt:
        print("Give the same command again to resume.", file=sys.stderr)
        raise
    finally:
        executor.close()
    if not results:
        raise InputError(
            f"No task could be sampled from {', '.join(config.sets)}: each is left out for the "
            "reason above (not shown with --quiet)."
        )
    _report(args, config, results)
    return 0


def _what(args: argparse.Namespace) -> tuple[RunConfig, Path]:
    """Return what to compare, and where the data is."""
    from mivhead.benchmark.results import IMAGES, check_run_folder
    from mivhead.datasets.bundled import BUNDLED, write_bundled
    from mivhead.datasets.sets import find_sets

    config = _join(args)
    data = args.data or os.environ.get(DATA)
    wants_bundled = bool(config.sets) and set(config.sets) <= set(BUNDLED)
    if args.data is None and wants_bundled:
        folder = Path(args.output)
        check_run_folder(folder)
        return config, write_bundled(folder / IMAGES)
    if data is None:
        raise InputError(
            f"Give the folder of your data sets with --data or in the variable {DATA}; "
            f"`--sets {','.join(BUNDLED)}` runs on images that pip packages contain instead."
        )
    return replace(config, sets=config.sets or find_sets(data)), Path(data)


def _join(args: argparse.Namespace) -> RunConfig:
    """Join the configuration and the options, which take precedence."""
    from mivhead.benchmark.config import RunConfig, load_config, read_config
    from mivhead.benchmark.samplers import Protocol

    document = (RunConfig() if args.config is None else load_config(args.config)).as_json()
    given = {
        "sets": args.sets,
        "methods": _pick(args.methods, document["methods"]),
        "backbones": _pick(args.backbone, document["backbones"]),
    }
    given |= {name: getattr(args, name) for name in ("tasks", "seed", "views")}
    given["protocols"] = args.protocol and [Protocol.parse(each).name for each in args.protocol]
    changes = {key: value for key, value in given.items() if value is not None}
    config = read_config(document | changes)
    if args.weights is None:
        return config
    if len(config.backbones) > 1:
        names = ", ".join(backbone.name for backbone in config.backbones)
        raise InputError(
            f"--weights {args.weights} may belong to any of {names}: choose one with --backbone."
        )
    return replace(config, backbones=(replace(config.backbones[0], weights=args.weights),))


def _pick(names: list[str] | None, entries: list[dict[str, Any]]) -> list[Any] | None:
    """Keep the configuration's settings for names that it contains."""
    known = {entry["name"]: entry for entry in entries}
    return names and [known.get(name, name) for name in names]


def _report(args: argparse.Namespace, config: RunConfig, results: list[Result]) -> None:
    rows = _summary(config, results)
    if args.json:
        names = ("backbone", "set", "protocol", "method", "tasks", "accuracy", "errors")
        print_json(
            {"run": args.output, "results": [dict(zip(names, r, strict=True)) for r in rows]}
        )
        return
    if args.quiet:
        return
    cells = [(*r[:5], "-" if r[5] is None else f"{100 * r[5]:.1f} %", r[6]) for r in rows]
    header = ["backbone", "set", "protocol", "method", "tasks", "accuracy", "errors"]
    print(table(header, cells, right="tasks accuracy errors"))
    failed = sum(row[6] for row in rows)
    if failed:
        print(f"{plural(failed, 'result')} failed; give the same command again to retry.")


def _summary(config: RunConfig, results: list[Result]) -> list[tuple[Any, ...]]:
    """Mean accuracy and number of failures by backbone, set, protocol and method."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for r in results:
        groups.setdefault((r.backbone, r.set, r.protocol, r.method), []).append(r)
    rows: list[tuple[Any, ...]] = []
    for backbone in config.backbones:
        for name in config.sets:
            for protocol in config.protocols:
                for method in config.methods:
                    key = (backbone.name, name, protocol, method.name)
                    found = groups.get(key, [])
                    right = [r.accuracy for r in found if r.accuracy is not None]
                    mean = sum(right) / len(right) if right else None
                    if found:
                        rows.append((*key, len(right), mean, len(found) - len(right)))
    return rows


# miv bench open-set


OPEN_SET_EXAMPLES = """
miv bench open-set --data sets/ --tasks 20 -o open
miv bench open-set --data sets/ --sets birds,signs,leaves --methods miv,ncc -o open
miv bench open-set --data sets/ --protocol "5-way 1-shot" -o open   # run it again to resume
"""


def _add_open_set(actions: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        actions,
        "open-set",
        "can methods tell unknown images from their classes?",
        "Run the open-set protocol: tasks with queries of known classes, of unknown classes of the "
        "same set, and of other sets. The table shows, as means over the sets, AUROC and the share "
        "of unknown images that are accepted with 95 %% of the known ones, for each method and "
        "score; for miv also its decisions and 90 %% prediction sets.".replace("%%", "%"),
        OPEN_SET_EXAMPLES,
    )
    parser.add_argument("-o", "--output", required=True, metavar="RUN", help="folder for results")
    parser.add_argument(
        "--data", metavar="DIR", help=f"folder of data sets (default: the variable {DATA})"
    )
    parser.add_argument(
        "--sets", type=options.names, metavar="A,B", help="data sets (default: all; at least 2)"
    )
    parser.add_argument(
        "--methods",
        type=options.names,
        metavar="A,B",
        help="methods on features (default: miv,miv-paper,ncc,logistic,ridge,knn)",
    )
    parser.add_argument(
        "--protocol",
        type=_protocols,
        default=["10-way 5-shot", "5-way 1-shot"],
        metavar="A,B",
        help="ways and shots (default: 10-way 5-shot,5-way 1-shot)",
    )
    parser.add_argument(
        "--tasks", type=options.positive, default=20, metavar="N", help="tasks per data set"
    )
    parser.add_argument(
        "--views",
        type=options.not_negative,
        default=4,
        metavar="V",
        help="maximum number of augmented views per image",
    )
    parser.add_argument(
        "--seed", type=options.not_negative, default=0, metavar="N", help="random seed"
    )
    options.add_json(parser)
    parser.set_defaults(run=run_open_set)


def run_open_set(args: argparse.Namespace) -> int:
    """Run the action."""
    options.prepare(args)
    from mivhead.benchmark import open_set
    from mivhead.benchmark.samplers import Protocol
    from mivhead.datasets.sets import find_sets

    data = args.data or os.environ.get(DATA)
    if data is None:
        raise InputError(
            f"Give the folder of your data sets with --data or in the variable {DATA}."
        )
    chosen = [Protocol.parse(each) for each in args.protocol]
    fixed = [(each.ways, each.shots) for each in chosen if each.ways and each.shots]
    if len(fixed) < len(chosen):
        raise InputError("The open-set protocol needs ways and shots, such as '5-way 1-shot'.")
    results = open_set.run_open_set(
        args.sets or find_sets(data),
        data,
        args.output,
        protocols=fixed,
        methods=args.methods or open_set.METHODS,
        tasks=args.tasks,
        views=args.views,
        seed=args.seed,
        verbose=not args.quiet,
    )
    rows = open_set.summarise(results)
    if args.json:
        print_json({"run": args.output, "results": [vars(row) for row in rows]})
        return 0
    names = [
        *("auroc_same", "auroc_other", "fpr_same", "fpr_other", "accuracy", "accuracy_80"),
        *("calibration_error", "coverage", "size"),
    ]
    cells = [
        (row.protocol, row.method, row.score, row.tasks, *(_number(row.means[n]) for n in names))
        for row in rows
    ]
    header = ["protocol", "method", "score", "tasks", *names]
    print(table(header, cells, right=" ".join(("tasks", *names))))
    return 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# miv bench report


REPORT_EXAMPLES = """
miv bench report run                  # writes run/report/report.html and other files
miv bench report run -o docs/results --title "Heads on Lite0"
"""


def _add_report(actions: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        actions,
        "report",
        "tables and charts of a run",
        "Write report.html (a single page that works offline), report.md, tables.tex (the paper's "
        "layout) and results.csv. The run may still be in progress.",
        REPORT_EXAMPLES,
    )
    parser.add_argument("folder", metavar="RUN", help="folder of `miv bench run`")
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="folder for the report (default: RUN/report)"
    )
    parser.add_argument("--title", help="title of the report (default: the name of the run)")
    options.add_json(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Run the action."""
    from mivhead.benchmark.report import write_report
    from mivhead.benchmark.results import read_results

    folder = Path(args.folder)
    title = args.title or f"Benchmark: {folder.resolve().name}"
    paths = write_report(read_results(folder), args.output or folder / "report", title)
    if args.json:
        print_json({"files": [str(path) for path in paths]})
    elif not args.quiet:
        print("Wrote " + ", ".join(str(path) for path in paths))
    return 0


# miv bench compare


COMPARE_EXAMPLES = """
miv bench compare run:miv run:ncc        # two methods of a run
miv bench compare before after           # all methods that both runs share
miv bench compare before:miv after:miv
"""


def _add_compare(actions: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        actions,
        "compare",
        "paired comparison of two runs, or of two methods",
        "Compare accuracies on the same tasks: the mean difference with its interval, a two-sided "
        "paired t-test, its p-value corrected for the number of rows (Holm), and Wilcoxon's "
        "signed-rank test. Results of different tasks cannot be compared.",
        COMPARE_EXAMPLES,
    )
    parser.add_argument("first", metavar="A", help="a run, or RUN:METHOD")
    parser.add_argument("second", metavar="B", help="a run, or RUN:METHOD")
    options.add_json(parser)
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Run the action."""
    from mivhead.benchmark.compare import pair

    found = [(a, b, pair(a, b)) for a, b in _sides(args.first, args.second)]
    if args.json:
        print_json({"rows": [_as_json(a, b, row) for a, b, rows in found for row in rows]})
    else:
        print("\n\n".join(_as_text(a, b, rows) for a, b, rows in found))
    return 0


def _sides(first: str, second: str) -> list[tuple[Side, Side]]:
    """Return the two named methods, or each method that the runs share."""
    from mivhead.benchmark.compare import choose
    from mivhead.benchmark.results import read_results

    (folder_a, a), (folder_b, b) = map(_parse, (first, second))
    results = [read_results(folder_a), read_results(folder_b)]
    if a is None and b is None:
        shared = sorted(set.intersection(*({r.method for r in side} for side in results)))
        if Path(folder_a).resolve() == Path(folder_b).resolve():
            raise InputError(f"Name two methods of {first}, such as {first}:miv {first}:ncc.")
        if shared:
            return [
                (choose(results[0], m, folder_a), choose(results[1], m, folder_b)) for m in shared
            ]
    return [(choose(results[0], a, folder_a), choose(results[1], b, folder_b))]


def _parse(text: str) -> tuple[str, str | None]:
    """Split RUN:METHOD; a folder may have a colon in its name, and a method, as module:Class.

    >>> _parse("run"), _parse("run:ncc"), _parse("run:my_module:MyHead")
    (('run', None), ('run', 'ncc'), ('run', 'my_module:MyHead'))
    """
    if Path(text).is_dir() or ":" not in text:
        return text, None
    parts = text.split(":")
    splits = [(":".join(parts[:i]), ":".join(parts[i:])) for i in range(1, len(parts))]
    return next((split for split in splits if Path(split[0]).is_dir()), splits[0])


def _as_text(first: Side, second: Side, rows: list[Row]) -> str:
    from mivhead.benchmark.report.formats import p_value

    lines = [
        (
            row.backbone,
            row.protocol,
            row.set,
            row.paired.difference.n,
            row.first,
            row.second,
            row.paired.difference.signed,
            p_value(row.paired.p),
            p_value(row.holm),
            p_value(row.paired.p_wilcoxon),
        )
        for row in rows
    ]
    header = ["backbone", "protocol", "set", "tasks", "A", "B", "A-B", "p", "Holm", "Wilcoxon"]
    right = "tasks A B A-B p Holm Wilcoxon"
    return f"A = {first.name}, B = {second.name}\n" + table(header, lines, right=right)


def _as_json(first: Side, second: Side, row: Row) -> dict[str, Any]:
    return {
        "first": first.name,
        "second": second.name,
        "backbone": row.backbone,
        "protocol": row.protocol,
        "set": row.set,
        "tasks": row.paired.difference.n,
        "accuracies": [row.first.mean, row.second.mean],
        "difference": row.paired.difference.mean,
        "half_width": row.paired.difference.half_width,
        "p": row.paired.p,
        "p_holm": row.holm,
        "p_wilcoxon": row.paired.p_wilcoxon,
    }
