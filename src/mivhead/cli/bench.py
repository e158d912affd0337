"""`miv bench`: compare backbones and methods on many few-shot tasks."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mivhead._util.text import list_reasons
from mivhead.cli import options
from mivhead.cli.output import plural, print_json, seconds, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.benchmark.compare import Row, Side
    from mivhead.benchmark.config import RunConfig
    from mivhead.benchmark.estimate import Plan
    from mivhead.benchmark.results import Result

DATA = "MIV_DATA"
WIDE = 80  # characters of a title or a remark in a table


def add_parser(subparsers: Any) -> None:
    """Add the command and its actions."""
    actions = options.new_group(
        subparsers,
        "bench",
        "compare methods on many few-shot tasks",
        "Compare methods on the same few-shot tasks, with costs and intervals.",
        "miv bench run small -o try",
    )
    for add in (_add_list, _add_run, _add_report, _add_compare):
        add(actions)


# miv bench list


LIST_EXAMPLES = """
miv bench list
miv bench list --json
"""


def _add_list(subparsers: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        subparsers,
        "list",
        "list the ready-made configurations",
        "List every ready-made configuration: what it is, which tables and figures of the paper it "
        "reproduces (by their labels there), and how many hours of one core it takes on the sets "
        "of its table. `miv bench run NAME --dry-run` estimates the hours for your machine and "
        "your sets.",
        LIST_EXAMPLES,
    )
    options.add_json(parser)
    parser.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> int:
    """Run the action."""
    from mivhead.benchmark.config import describe_table, list_tables, load_config

    rows: list[dict[str, Any]] = []
    for name in list_tables():
        about, config = describe_table(name), load_config(name)
        rows.append(
            {
                "name": name,
                "title": about.title,
                "paper": about.paper,
                "backbones": [backbone.name for backbone in config.backbones],
                "columns": sum(len(config.methods_on(b.name)) for b in config.backbones),
                "tasks": config.tasks,
                "core_hours": about.hours,
            }
        )
    if args.json:
        print_json({"tables": rows})
        return 0
    header = ["name", "what", "in the paper", "columns", "core hours"]
    cells = [
        (r["name"], r["title"], r["paper"] or "-", r["columns"], _shorten(r["core_hours"]))
        for r in rows
    ]
    print(table(header, cells, right="columns core hours", limit=WIDE))
    print(
        "\nCore hours: all sets and tasks on one core of an ordinary CPU without a GPU, a rough "
        "estimate.\n`miv bench run NAME --dry-run` measures your machine and lists what is missing."
    )
    return 0


def _shorten(hours: float | None) -> str:
    if hours is None:
        return "-"
    if 0 < hours < 0.05:
        return "<0.1"
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}"


def _duration(hours: float) -> str:
    return seconds(3600 * hours) if hours < 1 else f"{_shorten(hours)} hours"


# miv bench run


RUN_EXAMPLES = """
miv bench run small -o try                          # on images that pip packages contain
miv bench run --data sets/ --methods miv,ncc --tasks 50 -o run
miv bench run my.toml --data sets/ -o run           # run it again to resume
miv bench run --data sets/ --protocol "5-way 1-shot" --views 15 -o one-shot
miv bench run --data sets/ --protocol "10-way 5-shot, open" --tasks 20 -o open   # unknown images
miv bench run main --data sets/ --dry-run           # what it would take, and what is missing
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
    parser.add_argument("-o", "--output", metavar="RUN", help="folder for results")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run nothing: list backbones, sets and methods, what is missing, and estimate disk "
        "space and hours from a few seconds of measurement",
    )
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
    group.add_argument(
        "--weights",
        action="append",
        metavar="NAME=FILE",
        help="checkpoint of a backbone; repeatable. Also: FILE, with a single backbone; a folder "
        "of checkpoints named as their backbones or as their authors publish them; random: "
        "untrained weights for all, to try",
    )
    options.add_image_size(group)
    group.add_argument(
        "--allow-code",
        action="store_true",
        help="also run code, and send images to services, that only CONFIG names; without this, "
        "name such methods and backbones with --methods and --backbone",
    )
    add_list(
        "--protocol",
        "'varying', or ways and shots such as '5-way 1-shot'; '10-way 5-shot, open' also has "
        "queries of unknown classes and of other sets",
        _protocols,
    )
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
        help="maximum number of augmented views per image; preset: as set by the backbone's preset",
    )
    group.add_argument(
        "--paper-sizes",
        action=argparse.BooleanOptionalAction,
        help="first resize MNIST, CIFAR-10 and CIFAR-100 to 84 x 84 pixels (Lanczos), as the "
        "paper's authors did (default: as configured; the paper's tables do)",
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", metavar="DIR", help=f"folder of data sets (default: the variable {DATA})"
    )
    group.add_argument(
        "--workers",
        type=options.not_negative,
        metavar="N",
        help="processes of one thread each (default: one per core, as far as memory allows, or one "
        "per GPU; 0: in this process)",
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
        "--features",
        choices=("auto", "cache", "task"),
        default="auto",
        help="keep features in the cache, or compute them for each task and drop them; auto keeps "
        "them if they fit (default: auto)",
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
    if args.dry_run:
        return _dry_run(args)
    if args.output is None:
        raise InputError("Name a folder for the results with -o RUN.")
    from mivhead.backbones.base import default_device
    from mivhead.benchmark import runner
    from mivhead.benchmark.live import LiveView
    from mivhead.executors import make_executor

    folder = Path(args.output)
    with runner.discard_if_failed(folder):
        config, data = _what(args)
        place = runner.Place(
            folder=folder,
            data=data,
            cache=None if args.cache is None else Path(args.cache),
            cache_gb=args.cache_gb,
            device=args.device,
            features=args.features,
        )
        device = str(default_device(args.device))
        workers = runner.default_workers(device) if args.workers is None else args.workers
        executor = make_executor(args.executor, workers, args.address, device=device)
        try:
            results = runner.run(config, place, executor, view=LiveView(quiet=args.quiet))
        except KeyboardInterrupt:
            print("Run the same command again to resume.", file=sys.stderr)
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


def _dry_run(args: argparse.Namespace) -> int:
    """Show what a run would take."""
    from dataclasses import asdict

    from mivhead.benchmark.config import describe_table, list_tables
    from mivhead.benchmark.estimate import estimate
    from mivhead.benchmark.memory import available_memory, fitting_workers
    from mivhead.benchmark.runner import Place, default_workers
    from mivhead.datasets.bundled import BUNDLED, write_bundled

    config = _join(args)
    data = args.data or os.environ.get(DATA)
    of_paper = args.config in list_tables() and bool(describe_table(args.config).paper)
    with TemporaryDirectory() as folder:
        if args.data is None and config.sets and set(config.sets) <= set(BUNDLED):
            data = str(write_bundled(Path(folder) / "images"))
        where = None if data is None else Path(data)
        plan = estimate(config, where, args.device, full=of_paper and not config.sets)
    workers = default_workers(args.device) if args.workers is None else max(1, args.workers)
    if args.workers is None:
        workers = fitting_workers(workers, plan.memory, available_memory())
    place = Place(Path(), Path(), None if args.cache is None else Path(args.cache), args.cache_gb)
    limit = place.find_cache()[1]
    kept = args.features == "cache" or (args.features == "auto" and plan.largest <= 0.9 * limit)
    if args.json:
        hours = plan.hours if kept else plan.hours - plan.extraction_hours + plan.task_hours
        totals = {"core_hours": hours, "hours": hours / workers, "workers": workers}
        print_json({**asdict(plan), **totals, "features": "cache" if kept else "task"})
    else:
        print(_show_plan(plan, workers, limit, args.features, kept=kept))
    return 0


def _show_plan(plan: Plan, workers: int, limit: int, how: str, *, kept: bool) -> str:
    backbones = [
        (
            b.name,
            f"{1000 * b.seconds:.0f}",
            f"{b.bytes / 1e6:.2f}",
            "missing" if b.missing else "found",
        )
        for b in plan.backbones
    ]
    sets = [(s.name, s.classes, s.images if s.found else "-", s.remark) for s in plan.sets]
    columns = [
        (c.method, c.backbone, "unknown", "unknown")
        if c.seconds is None
        else (c.method, c.backbone, f"{c.seconds:.3g}", _shorten(c.hours))
        for c in plan.columns
    ]
    missing = sum(not each.found for each in plan.sets)
    reasons = list_reasons({b.name: b.missing for b in plan.backbones if b.missing})
    hours = plan.hours if kept else plan.hours - plan.extraction_hours + plan.task_hours
    choice = "keep them" if kept else "drop them"
    if how == "auto" and not kept:
        choice = "drop those of sets that exceed the limit of the cache"
    parts = [
        table(
            ["backbone", "ms/image", "MB/image", "weights"], backbones, right="ms/image MB/image"
        ),
        reasons,
        table(["set", "classes", "images", "remark"], sets, right="classes images", limit=WIDE),
        table(["method", "on", "s per task", "core hours"], columns, right="s per task core hours"),
        f"{plural(plan.tasks, 'task')}. Features are computed once and kept, or for each task and "
        f"dropped (--features); this run would {choice}:",
        table(
            ["features", "passes", "core hours", "GB on disk", "largest set, GB"],
            [
                (
                    "kept",
                    f"{plan.passes:,}",
                    _shorten(plan.extraction_hours),
                    f"{plan.bytes / 1e9:.1f}",
                    f"{plan.largest / 1e9:.1f} (limit of the cache: {limit / 1e9:.0f})",
                ),
                ("dropped", f"{plan.task_passes:,}", _shorten(plan.task_hours), "0", "0"),
            ],
            right="passes core hours GB on disk",
        ),
        f"The largest task needs about {plan.memory / 1e9:.1f} GB of memory.\n"
        f"In total about {_duration(hours)} on one core: {_duration(hours / workers)} "
        f"with {plural(workers, 'worker')} on this machine, if it is otherwise idle."
        + (f" Missing sets are counted as if they were there ({missing})." if missing else ""),
    ]
    return "\n\n".join(part for part in parts if part)


def _what(args: argparse.Namespace) -> tuple[RunConfig, Path]:
    """Return what to compare, and where the data is."""
    from mivhead.benchmark.config import choose_sets
    from mivhead.benchmark.results import IMAGES, check_run_folder
    from mivhead.datasets.bundled import BUNDLED, write_bundled

    config = _join(args)
    data = args.data or os.environ.get(DATA)
    wants_bundled = bool(config.sets) and set(config.sets) <= set(BUNDLED)
    if args.data is None and wants_bundled:
        folder = Path(args.output)
        check_run_folder(folder)
        return config, write_bundled(folder / IMAGES)
    if data is None:
        raise InputError(
            f"Name the folder of your data sets with --data or in the variable {DATA}; "
            f"`--sets {','.join(BUNDLED)}` runs on images that pip packages contain instead."
        )
    return replace(config, sets=choose_sets(config, data)), Path(data)


def _join(args: argparse.Namespace) -> RunConfig:
    """Join the configuration and the options, which take precedence."""
    from mivhead.benchmark.config import RunConfig, load_config, read_config
    from mivhead.benchmark.samplers import Protocol
    from mivhead.benchmark.weights import assign_weights

    document = (RunConfig() if args.config is None else load_config(args.config)).as_json()
    known = {entry["name"] for entry in document["backbones"]}
    given = {
        "sets": args.sets,
        "methods": _pick(args.methods, document["methods"]),
        "backbones": _pick(args.backbone, document["backbones"]),
    }
    given |= {name: getattr(args, name) for name in ("tasks", "seed", "views", "paper_sizes")}
    given["protocols"] = args.protocol and [Protocol.parse(each).name for each in args.protocol]
    changes = {key: value for key, value in given.items() if value is not None}
    document |= changes
    document["methods"] = _on_given(document["methods"], known, args.backbone)
    config = read_config(document)
    backbones = assign_weights(config.backbones, args.weights or ())
    if args.image_size is not None:
        if len(backbones) > 1:
            names = ", ".join(backbone.name for backbone in backbones)
            raise InputError(
                f"--image-size may belong to any of {names}: choose one with --backbone."
            )
        backbones = tuple(replace(b, image_size=args.image_size) for b in backbones)
    if not args.allow_code:
        _check_code(config, args)
    return replace(config, backbones=backbones)


def _check_code(config: RunConfig, args: argparse.Namespace) -> None:
    """Refuse code and addresses that only a file names: it may come from a stranger."""
    from mivhead.backbones.base import may_be_named_by_file

    methods = {m.kind for m in config.methods if m.is_own} - set(args.methods or ())
    sources = {b.source for b in config.backbones} - set(args.backbone or ())
    backbones = {source for source in sources if not may_be_named_by_file(source, paths=True)}
    for option, names in (("--methods", methods), ("--backbone", backbones)):
        for name in sorted(names):
            raise InputError(
                f"{args.config} names {name!r:.200}, but a file alone must not run code or send "
                f"images to a service: if you trust it, add {option} {name:.200}, or --allow-code "
                "for all that the file names."
            )


def _pick(names: list[str] | None, entries: list[dict[str, Any]]) -> list[Any] | None:
    """Keep the configuration's settings for names that it contains."""
    known = {entry["name"]: entry for entry in entries}
    return names and [known.get(name, name) for name in names]


def _on_given(methods: list[Any], known: set[str], backbones: list[str] | None) -> list[Any]:
    """Restrict methods to the backbones that the options name; one that is new gets all methods."""
    if backbones is None:
        return methods
    chosen: list[Any] = []
    for method in methods:
        own = method.get("backbones") if isinstance(method, dict) else None
        if not own:
            chosen.append(method)
        elif kept := [b for b in backbones if b in own or b not in known]:
            chosen.append({**method, "backbones": kept})
    return chosen


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
        print(f"{plural(failed, 'result')} failed; run the same command again to retry.")


def _summary(config: RunConfig, results: list[Result]) -> list[tuple[Any, ...]]:
    """Mean accuracy and number of failures by backbone, set, protocol and method."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for r in results:
        groups.setdefault((r.backbone, r.set, r.protocol, r.method), []).append(r)
    rows: list[tuple[Any, ...]] = []
    for backbone in config.backbones:
        for name in config.sets:
            for protocol in config.protocols:
                for method in config.methods_on(backbone.name):
                    key = (backbone.name, name, protocol, method.name)
                    found = groups.get(key, [])
                    right = [r.accuracy for r in found if r.accuracy is not None]
                    mean = sum(right) / len(right) if right else None
                    if found:
                        rows.append((*key, len(right), mean, len(found) - len(right)))
    return rows


# miv bench report


REPORT_EXAMPLES = """
miv bench report run                  # writes run/report/report.html and other files
miv bench report run -o report --title "Heads on Lite0"
"""


def _add_report(actions: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        actions,
        "report",
        "write tables and charts of a run",
        "Write report.html (a single page that works offline), report.md, tables.tex (the paper's "
        "layout), results.csv (one line per task), summary.csv (one per set and method, with the "
        "paper's values), and the charts as PDF and PNG files for a paper. The run may still be in "
        "progress.",
        REPORT_EXAMPLES,
    )
    parser.add_argument("folder", metavar="RUN", help="folder of `miv bench run`")
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="folder for the report (default: RUN/report)"
    )
    parser.add_argument("--title", help="title of the report (default: the name of the run)")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="write names to results.csv unchanged; by default formulas and control characters in "
        "them are made harmless",
    )
    options.add_json(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Run the action."""
    from mivhead._util.inside import Inside
    from mivhead.benchmark.config import RunConfig
    from mivhead.benchmark.report import write_report
    from mivhead.benchmark.results import (
        CONFIG,
        describe_process,
        read_origin,
        read_results,
        read_run_config,
    )

    folder = Path(args.folder)
    if folder.is_dir() and not args.output:  # the report goes into it, and not through a link
        Inside(folder.resolve()).check_plain()
    origin = {**read_origin(folder), "report": describe_process()["time"]}
    title = args.title or f"Benchmark: {folder.resolve().name}"
    results = read_results(folder)
    known = (folder / CONFIG).exists()  # results may have been copied without it
    config = read_run_config(folder) if known else RunConfig()
    target = args.output or folder / "report"
    paths = write_report(
        results,
        target,
        title,
        config.comparisons,
        origin=origin,
        raw=args.raw,
        interval=config.interval,
    )
    if args.json:
        print_json({"files": [str(path) for path in paths]})
    elif not args.quiet:
        figures = [path for path in paths if path.parent.name == "figures"]
        shown = ", ".join(str(path) for path in paths if path not in figures)
        more = f", and the charts as PDF and PNG in {figures[0].parent}" if figures else ""
        print(f"Wrote {shown}{more}")
    return 0


# miv bench compare


COMPARE_EXAMPLES = """
miv bench compare run:miv run:ncc        # two methods of a run
miv bench compare before after           # all methods that both runs share
miv bench compare before:miv after:miv
miv bench compare run:miv@dino_vits8 run:ett@dino_vits16     # across backbones
"""


def _add_compare(actions: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        actions,
        "compare",
        "compare two runs, or two methods, task by task",
        "Compare accuracies on the same tasks: the mean difference with its interval, a two-sided "
        "paired t-test, its p-value corrected for the number of rows (Holm), and Wilcoxon's "
        "signed-rank test. Results of different tasks cannot be compared.",
        COMPARE_EXAMPLES,
    )
    parser.add_argument("first", metavar="A", help="a run, RUN:METHOD, or RUN:METHOD@BACKBONE")
    parser.add_argument("second", metavar="B", help="the same for the other side")
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
