"""`miv bench run`: run a benchmark, or go on with one."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mivhead.cli import options
from mivhead.cli.files import print_json
from mivhead.cli.text import plural, table
from mivhead.errors import InputError

if TYPE_CHECKING:
    from mivhead.benchmark.config import RunConfig
    from mivhead.benchmark.results import Result

DATA = "MIV_DATA"
EXAMPLES = """
miv bench run small -o try                          # on images that pip carries
miv bench run --data sets/ --methods miv,ncc --tasks 50 -o run
miv bench run my.toml --data sets/ -o run           # again: goes on where it was
miv bench run --data sets/ --protocol "5-way 1-shot" --views 15 -o one-shot
miv bench run main --data /shared/sets --executor ray --address auto \\
  --bank /shared/bank -o /shared/run
"""


def add_parser(subparsers: Any) -> None:
    """Add the action."""
    parser = options.new_command(
        subparsers,
        "run",
        "run a benchmark, or go on with one",
        "Draw tasks from data sets and run every method on every one of them. Features are "
        "extracted once a set. Every finished task is written at once: a run that was stopped, "
        "or killed, goes on where it was when the same command is given again.",
        EXAMPLES,
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a .toml file, or a ready-made one by its name"
    )
    parser.add_argument("-o", "--output", required=True, metavar="RUN", help="folder for results")
    _add_what(parser.add_argument_group("what to compare (instead of the configuration's)"))
    _add_how(parser.add_argument_group("where and how to run"))
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sets", type=_names, metavar="A,B", help="data sets (default: all found)")
    group.add_argument(
        "--methods",
        type=_names,
        metavar="A,B",
        help="names of `miv methods`, or of the configuration",
    )
    group.add_argument(
        "--backbone", action="append", metavar="NAME", help="what --backbone of `miv fit` takes"
    )
    group.add_argument(
        "--weights",
        metavar="FILE",
        help="checkpoint of the backbone, if there is one backbone only",
    )
    group.add_argument(
        "--protocol",
        action="append",
        metavar="TEXT",
        help="varying, or such as '5-way 1-shot'; may be given several times",
    )
    group.add_argument("--tasks", type=options.positive, metavar="N", help="tasks a set")
    group.add_argument(
        "--seed", type=options.not_negative, metavar="N", help="of all that is random"
    )
    group.add_argument(
        "--views", type=options.not_negative, metavar="V", help="at most so many views of an image"
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
        "--address", metavar="HOST:PORT", help="of a Ray cluster; auto: the one of this machine"
    )
    group.add_argument(
        "--bank", metavar="DIR", help="where features are kept (default: beside the feature cache)"
    )
    group.add_argument(
        "--bank-gb", type=float, metavar="GB", help="most that the features of a set may take"
    )
    group.add_argument(
        "--drop-bank", action="store_true", help="remove the features of a set when it is done"
    )


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    options.prepare(args)
    from mivhead.benchmark import runner
    from mivhead.benchmark.executors import make_executor
    from mivhead.benchmark.live import LiveView

    config, data = _what(args)
    place = runner.Place(
        folder=Path(args.output),
        data=data,
        bank=None if args.bank is None else Path(args.bank),
        bank_gb=runner.BANK_GB if args.bank_gb is None else args.bank_gb,
        drop_bank=args.drop_bank,
        device=args.device,
    )
    workers = runner.default_workers() if args.workers is None else args.workers
    executor = make_executor(args.executor, workers, args.address)
    try:
        results = runner.run(config, place, executor, view=LiveView(quiet=args.quiet))
    except KeyboardInterrupt:
        print("Give the same command again to go on.", file=sys.stderr)
        raise
    finally:
        executor.close()
    if not results:
        raise InputError(
            f"No task could be drawn from {', '.join(config.sets)}: each is left out for the "
            "reason above (not shown with --quiet)."
        )
    _report(args, config, results)
    return 0


def _what(args: argparse.Namespace) -> tuple[RunConfig, Path]:
    """Find out what to compare, and where the data is."""
    from mivhead.benchmark.carried import CARRIED, write_carried
    from mivhead.benchmark.journal import IMAGES, check_run_folder
    from mivhead.benchmark.sets import find_sets

    config = _join(args)
    data = args.data or os.environ.get(DATA)
    wants_carried = bool(config.sets) and set(config.sets) <= set(CARRIED)
    if args.data is None and (wants_carried or (data is None and not config.sets)):
        folder = Path(args.output)
        check_run_folder(folder)
        return replace(config, sets=config.sets or CARRIED), write_carried(folder / IMAGES)
    if data is None:
        raise InputError(f"Give the folder of your data sets with --data, or in {DATA}.")
    return replace(config, sets=config.sets or find_sets(data)), Path(data)


def _join(args: argparse.Namespace) -> RunConfig:
    """Join the configuration and the options, which count more."""
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
            f"--weights {args.weights} can belong to any of {names}: name one with --backbone."
        )
    return replace(config, backbones=(replace(config.backbones[0], weights=args.weights),))


def _pick(names: list[str] | None, entries: list[dict[str, Any]]) -> list[Any] | None:
    """Keep the settings of the configuration for names that it has."""
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
        print(f"{plural(failed, 'result')} failed; the same command tries them again.")


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


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
