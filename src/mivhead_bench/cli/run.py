"""`miv bench run` and `miv bench list`: run a benchmark, and what is ready-made."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from mivhead.backbones.base import default_device, may_be_named_by_file
from mivhead.cli import options
from mivhead.cli.output import Output, plural, seconds, table
from mivhead.errors import InputError
from mivhead_bench.benchmark import runner
from mivhead_bench.benchmark.config import (
    RunConfig,
    assign_weights,
    choose_sets,
    describe_table,
    list_tables,
    load_config,
    read_config,
)
from mivhead_bench.benchmark.estimate import Plan, estimate
from mivhead_bench.benchmark.executors import make_executor
from mivhead_bench.benchmark.live import LiveView
from mivhead_bench.benchmark.results import IMAGES, Result, check_run_folder
from mivhead_bench.benchmark.samplers import Protocol
from mivhead_bench.cli.data import DATA
from mivhead_bench.datasets.bundled import BUNDLED, write_bundled
from mivhead_bench.datasets.sets import find_sets

WIDE = 80  # characters of a title in a table
RUN_EXAMPLES = """
miv bench run small -o try                          # on images that pip packages contain
miv bench run --data sets/ --methods miv,ncc --tasks 50 -o run
miv bench run my.toml --data sets/ -o run           # run it again to resume
miv bench run --data sets/ --protocol "5-way 1-shot" --views 15 -o one-shot
miv bench run --data sets/ --protocol "10-way 5-shot, open" --tasks 20 -o open   # unknown images
miv bench run main --data sets/ --dry-run           # what it would take, and what is missing
miv bench run main --data /shared/sets --ray auto --cache /shared/features -o /shared/run
"""


@options.command("miv bench list")
def tables(out: Output) -> None:
    """List the ready-made configurations.

    Shows what each is, which tables and figures of the paper it reproduces (by their labels there),
    and roughly how many hours of one core it takes. `miv bench run NAME --dry-run` estimates the
    hours for your machine and your sets.
    """
    rows = []
    for name in list_tables():
        about, config = describe_table(name), load_config(name)
        columns = sum(len(config.methods_on(b.name)) for b in config.backbones)
        facts = {"title": about.title, "paper": about.paper, "columns": columns}
        rows.append({"name": name, **facts, "core_hours": about.hours})
    header = ["name", "what", "in the paper", "columns", "core hours"]
    cells = [
        [f"{value:,g}" if isinstance(value, float) else value or "-" for value in row.values()]
        for row in rows
    ]
    out.result({"tables": rows}, table(header, cells, right="columns core hours", limit=WIDE))


tables.name = "list"


def names(text: str) -> list[str]:
    """Split a list of names; a protocol may contain commas itself.

    >>> names("miv, ncc"), names("varying, max_ways 20,5-way 1-shot")
    (['miv', 'ncc'], ['varying, max_ways 20', '5-way 1-shot'])
    """
    separator = r"\s*,\s*(?=varying\b|\d+-way)" if re.match(r"varying|\d+-way", text) else r"[,\s]+"
    return [name for name in re.split(separator, text.strip()) if name]


def views(text: str) -> int | str:
    """Read a maximum number of views, or `preset`."""
    if text != "preset" and not text.isdecimal():
        raise InputError(f"{text!r} is neither a number nor 'preset'.")
    return text if text == "preset" else int(text)


def parameter(text: str) -> tuple[str, Any]:
    """Read a hyperparameter: a number, true or false, or else a string.

    >>> parameter("steps=20"), parameter("prototype=mean")
    (('steps', 20), ('prototype', 'mean'))
    """
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise InputError(f"{text!r:.80} is not NAME=VALUE, such as steps=20.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


NAMES = options.Checked(names, "A,B")
_what = options.in_group("what")
_where = options.in_group("where")
WHAT = options.together(
    _what("--sets", type=NAMES, help="Data sets (default: all in the data folder)."),
    _what("--methods", type=NAMES, help="Names from `miv bench methods`, or of CONFIG."),
    _what("--backbone", "backbones", type=NAMES, help="Backbones, as for `miv fit`."),
    _what(
        "--protocol",
        "protocols",
        type=NAMES,
        help="'varying', or ways and shots such as '5-way 1-shot'; '10-way 5-shot, open' also has "
        "queries of unknown classes and of other sets.",
    ),
    _what("--tasks", type=options.POSITIVE, help="Tasks per data set (default: 600)."),
    _what("--seed", type=options.NOT_NEGATIVE, help="Random seed (default: 0)."),
    _what(
        "--views",
        type=options.Checked(views, "V"),
        help="Maximum number of augmented views per image; preset: as many as the backbone's "
        "preset gives (default: 4).",
    ),
    _what(
        "--paper-sizes/--no-paper-sizes",
        default=None,
        help="First resize MNIST and CIFAR to 84 x 84 pixels, as the paper's authors did.",
    ),
)
WHERE = options.together(
    _where("--cache", type=Path, metavar="DIR", help="Folder of the feature cache."),
    _where(
        "--cache-gb", type=click.FloatRange(0, min_open=True), help="Size up to which it may grow."
    ),
    _where(
        "--features",
        type=click.Choice(["auto", "cache", "task"]),
        help="Keep features in the cache, or compute them for each task and drop them; auto keeps "
        "them if they fit (default: auto).",
    ),
    _where(
        "--device",
        type=options.Checked(options.device, "NAME"),
        help="Where all backbones and methods run (default: a GPU if there is one).",
    ),
)


@options.command(RUN_EXAMPLES)
@click.argument("config", required=False, help="A .toml file, or a name of `miv bench list`.")
@click.option("-o", "--output", metavar="RUN", help="Folder for results.")
@click.option("--dry-run", is_flag=True, help="Only say what it would take, and what is missing.")
@DATA
@WHAT
@click.option(
    "--param",
    "params",
    type=options.Checked(parameter, "NAME=VALUE"),
    multiple=True,
    help="Hyperparameter of all methods, from `miv bench methods NAME`; repeatable.",
)
@click.option(
    "--weights",
    multiple=True,
    metavar="NAME=FILE",
    help="Checkpoint of a backbone; repeatable. Also: FILE, with a single backbone; a folder of "
    "checkpoints named as their backbones or as their authors publish them; random.",
)
@click.option(
    "--allow-code",
    is_flag=True,
    help="Also run code, and send images to services, that only CONFIG names.",
)
@WHERE
@click.option(
    "--workers",
    type=options.NOT_NEGATIVE,
    help="Processes of one thread each (default: one per core, or per GPU; 0: in this process).",
)
@click.option("--ray", metavar="HOST:PORT", help="Run on a Ray cluster; auto finds one here.")
def run(
    out: Output,
    config: str | None,
    output: str | None,
    dry_run: bool,
    data: str | None,
    what: dict[str, Any],
    params: Sequence[tuple[str, Any]],
    weights: Sequence[str],
    allow_code: bool,
    where: dict[str, Any],
    workers: int | None,
    ray: str | None,
) -> None:
    """Run a benchmark, or resume one.

    Samples tasks from data sets and runs every method on every task. Each image passes the backbone
    once; its features are kept in the feature cache. Every result is written as soon as it is
    available: to resume a run that was stopped or killed, run the same command again. Options
    override CONFIG.
    """
    joined = join(config, what, weights, dict(params))
    if not allow_code:
        _check_code(joined, config, what)
    device = str(default_device(where.get("device")))
    workers = runner.default_workers(device) if workers is None else workers
    if dry_run:
        with TemporaryDirectory() as folder:
            found = _data(joined, data, Path(folder))
            plan = estimate(joined, found, device)
        document = asdict(plan) | {"core_hours": plan.hours, "hours": plan.hours / max(1, workers)}
        out.result(document, _describe(plan, max(1, workers)))
        return
    if output is None:
        raise InputError("Name a folder for the results with -o RUN.")
    with runner.discard_if_failed(Path(output)):
        check_run_folder(Path(output))
        found = _data(joined, data, Path(output, IMAGES))
        if found is None:
            raise InputError(
                "Name the folder of your data sets with --data or in the variable MIV_DATA; "
                f"`--sets {','.join(BUNDLED)}` runs on images that pip packages contain instead."
            )
        joined = replace(joined, sets=choose_sets(joined, found))
        workspace = runner.Workspace(Path(output), found, **where)
        executor = make_executor(workers, ray, device)
        try:
            results = runner.run(joined, workspace, executor, view=LiveView(quiet=out.quiet))
        except KeyboardInterrupt:
            print("Run the same command again to resume.", file=sys.stderr)
            raise
        finally:
            executor.close()
    if not results:
        raise InputError(f"No task could be sampled from {', '.join(joined.sets)}.")
    rows = _summary(results)
    cells = [
        [f"{100 * x:.1f}%" if isinstance(x, float) else "-" if x is None else x for x in r.values()]
        for r in rows
    ]
    failed = sum(row["errors"] for row in rows)
    again = f"\n{plural(failed, 'result')} failed; run the same command again to retry."
    text = table(list(rows[0]), cells, right="tasks accuracy errors") + (again if failed else "")
    out.report({"run": output, "results": rows}, text)


def join(
    source: str | None,
    what: Mapping[str, Any],
    weights: Sequence[str],
    params: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Join a configuration and the options, which take precedence."""
    document = (RunConfig() if source is None else load_config(source)).as_json()
    known = {entry["name"] for entry in document["backbones"]}
    chosen = dict(what)
    for key in ("methods", "backbones"):  # the configuration's settings of names that it contains
        if key in chosen:
            settings = {entry["name"]: entry for entry in document[key]}
            chosen[key] = [settings.get(name, name) for name in chosen[key]]
    if "protocols" in chosen:
        chosen["protocols"] = [Protocol.parse(text).name for text in chosen["protocols"]]
    document |= chosen
    if "backbones" in what:
        methods = [_restrict(m, what["backbones"], known) for m in document["methods"]]
        document["methods"] = [method for method in methods if method is not None]
    if params:
        methods = [{"name": m} if isinstance(m, str) else dict(m) for m in document["methods"]]
        for method in methods:
            method["params"] = {**method.get("params", {}), **params}
        document["methods"] = methods
    config = read_config(document)
    return replace(config, backbones=assign_weights(config.backbones, weights))


def _restrict(method: Any, backbones: Sequence[str], known: set[str]) -> Any:
    """Restrict a method to backbones that the options name; one that is new gets all methods."""
    if isinstance(method, str) or not method.get("backbones"):
        return method
    kept = [b for b in backbones if b in method["backbones"] or b not in known]
    return {**method, "backbones": kept} if kept else None


def _check_code(config: RunConfig, source: str | None, what: Mapping[str, Any]) -> None:
    """Refuse code and URLs that only a file names: it may come from a stranger."""
    methods = {m.kind for m in config.methods if m.is_own} - set(what.get("methods", ()))
    sources = {b.source for b in config.backbones} - set(what.get("backbones", ()))
    unsafe = {each for each in sources if not may_be_named_by_file(each)}
    for name in sorted(methods | unsafe):
        raise InputError(
            f"{source} names {name!r:.200}, but a file alone must not run code or send images to a "
            "service: name it with --methods or --backbone, or add --allow-code."
        )


def _data(config: RunConfig, data: str | None, folder: Path) -> Path | None:
    """Return the data folder; bundled sets that it does not have are written to a folder."""
    sets = set(config.sets)
    if sets and sets <= set(BUNDLED) and (data is None or not sets <= set(find_sets(data))):
        return write_bundled(folder)
    return None if data is None else Path(data)


def _describe(plan: Plan, workers: int) -> str:
    rows = [(c.method, c.backbone, f"{c.seconds:.3g}", f"{c.hours:.2g}") for c in plan.columns]
    parts = [
        f"Sets that are missing: {', '.join(plan.missing_sets)}." if plan.missing_sets else "",
        runner.list_reasons(plan.missing_backbones),
        table(["method", "on", "s per task", "core hours"], rows, right="s per task core hours"),
        f"{plural(plan.tasks, 'task')}; {plan.passes:,} images and views pass a backbone, whose "
        f"features take {plan.bytes / 1e9:.1f} GB.\n"
        f"Roughly {seconds(3600 * plan.hours)} on one core, "
        f"{seconds(3600 * plan.hours / workers)} with {plural(workers, 'worker')}.",
    ]
    return "\n\n".join(part for part in parts if part)


def _summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Mean accuracy and number of failures by backbone, set, protocol and method."""
    groups: dict[tuple[str, ...], list[float | None]] = {}
    for r in results:
        groups.setdefault((r.backbone, r.set, r.protocol, r.method), []).append(r.accuracy)
    rows = []
    for key, accuracies in groups.items():
        done = [accuracy for accuracy in accuracies if accuracy is not None]
        rows.append(
            dict(zip(("backbone", "set", "protocol", "method"), key, strict=True))
            | {
                "tasks": len(done),
                "accuracy": sum(done) / len(done) if done else None,
                "errors": len(accuracies) - len(done),
            }
        )
    return rows
