"""What a run compares: backbones x data sets x protocols x methods, read from TOML.

A method runs on all backbones, or on those that it names. A column of a table is a method on a
backbone, written `METHOD@BACKBONE`; comparisons put columns of several backbones side by side.

How it runs (where the data is, how many workers) is not part of the configuration, so that two
machines can share a configuration and a results folder.

A configuration may come from a stranger, with a file or with results: reading one imports nothing
that it names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from mivhead._util.schema import from_json, to_json
from mivhead.backbones import DEFAULT_BACKBONE
from mivhead.backbones.presets import PAPER
from mivhead.errors import InputError, check_one_of, reading
from mivhead.images.augmentation import ViewsRule
from mivhead_bench.benchmark.authors import CHECKPOINTS, LOWERED
from mivhead_bench.benchmark.samplers import Protocol as SamplingProtocol
from mivhead_bench.datasets.catalogue import BENCHMARKS, find_declared, paper_size
from mivhead_bench.datasets.sets import find_sets
from mivhead_bench.methods import Method, get_method

ABOUT = "about"  # a table of a TOML file that describes it (`describe_table`)
MAX_BYTES = 2**20  # of a TOML file
PRESET_VIEWS = "preset"  # instead of a maximum number of views
TABLES = Path(__file__).parent / "tables"  # ready-made configurations, one TOML file each

T = TypeVar("T", bound="_Named")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class BackboneConfig:
    """A backbone of a run.

    Parameters
    ----------
    name : str
        Its name in the results.
    spec : str, default=name
        What to load, as in `mivhead.backbones.load_backbone`.
    weights : str, optional
        A checkpoint, as in `mivhead.backbones.load_backbone`.
    image_size : int, optional
        Side of its input, as in `mivhead.backbones.load_backbone`.
    preset : str, optional
        A backbone of the paper whose taps, pool sizes and preprocessing it has.
    """

    name: str
    spec: str = ""
    weights: str | None = None
    image_size: int | None = None
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.preset is not None:
            check_one_of(f"preset of {self.name}", self.preset, PAPER)

    @property
    def settings(self) -> dict[str, Any]:
        """Its input size and preset, as in `mivhead.backbones.load_backbone`."""
        preset = None if self.preset is None else PAPER[self.preset].preset
        return {"image_size": self.image_size, "preset": preset}

    @property
    def source(self) -> str:
        """The `spec`, or the name if there is none."""
        return self.spec or self.name


@dataclass(frozen=True)
class MethodConfig:
    """A method of a run, or a variant of one.

    Parameters
    ----------
    name : str
        Its name in the results.
    method : str, default=name
        One of `mivhead_bench.methods.METHODS`, or `module:Class`.
    recipe : str, optional
        How the MIV-head is trained; by default as the method defines.
    threshold : int, optional
        T: classes with at most T shots get augmented views; by default as in the backbone's preset.
    params : dict, optional
        Hyperparameters by name.
    backbones : tuple of str, optional
        Names of the run's backbones that the method runs on; by default all of them.
    """

    name: str
    method: str = ""
    recipe: str | None = None
    threshold: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    backbones: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.is_own:
            self.check()
        if self.threshold is not None and self.threshold < 0:
            raise InputError(f"The threshold of {self.name!r} is negative.")

    def check(self) -> None:
        """Check the parameters and the recipe; this imports a class of the user's."""
        method = self.facts
        known = method.hyperparameters() if self.params else {}
        for name in self.params:
            check_one_of(f"parameter of {self.kind}", name, known)
        if self.recipe is not None and not method.has_recipe:
            raise InputError(f"{self.name!r} has a recipe; only the MIV-head takes one.")

    @property
    def kind(self) -> str:
        """The name of the method in `mivhead_bench.methods.METHODS`, or `module:Class`."""
        return self.method or self.name

    @cached_property
    def facts(self) -> Method:
        """What the registry knows of the method; this imports a class of the user's."""
        return get_method(self.kind)

    @property
    def is_own(self) -> bool:
        """Whether the method is a class of the user's, given as `module:Class`."""
        return ":" in self.kind

    def runs_on(self, backbone: str) -> bool:
        """Return whether the method runs on a backbone of the run."""
        return not self.backbones or backbone in self.backbones

    @property
    def needs_images(self) -> bool:
        """Whether the method tunes the backbone, so that features are not enough."""
        return self.facts.needs == "images"

    @property
    def last_blocks(self) -> int | None:
        """How many blocks the method uses, counted from the last; None: all of them."""
        recipe = None if self.is_own else self.facts.recipe(self.recipe, self.params)
        return None if recipe is None else recipe.last_blocks

    @cached_property
    def views_rule(self) -> ViewsRule | None:
        """The rule for the number of augmented views, or None if the method trains on none."""
        return self.facts.views_rule(self.recipe, self.params)


@dataclass(frozen=True)
class ComparisonConfig:
    """Columns that a report shows side by side, of any backbones."""

    title: str  # title of the group of columns
    columns: tuple[str, ...]  # as `METHOD@BACKBONE`, in the order of the table
    # The column that ours is compared with, and whose cost is the basis of all percentages; by
    # default the costliest.
    rival: str | None = None
    # What is bold: what is significantly better, or simply the highest accuracy.
    bold: Literal["test", "highest"] = "test"

    @property
    def name(self) -> str:
        """The title, which is unique in a run."""
        return self.title


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run.

    Parameters
    ----------
    backbones : tuple of BackboneConfig, optional
        By default only efficientnet_lite0.
    methods : tuple of MethodConfig, optional
        By default `miv` and `ncc`.
    sets : tuple of str, default=()
        Names of data sets.
    protocols : tuple of str, default=("varying",)
        How to sample tasks, such as `varying` or `5-way 1-shot`.
    tasks : int, default=600
        Number of tasks per set and protocol.
    seed : int, default=0
        Random seed of the tasks, the views and the methods.
    views : int or None, default=4
        Maximum number of augmented views per image. None (`views = "preset"` in TOML): as many as
        the backbone's preset gives, as in the paper.
    benchmark : {"MD", "MD+"}, optional
        Without `sets`: the run uses the sets of this benchmark that are in the data folder, instead
        of all sets there.
    paper_sizes : bool, default=False
        Whether images of MNIST, CIFAR-10 and CIFAR-100 are first resized to 84 x 84 pixels
        (Lanczos), as the paper's authors did. All tables of the paper set it.
    paper_thresholds : bool, default=False
        Whether T is lowered on some sets, as the paper's authors did for lack of memory
        (`mivhead_bench.benchmark.authors`). All tables of the paper set it.
    comparisons : tuple of ComparisonConfig, optional
        What reports compare across backbones.
    interval : {"student", "normal"}, default="student"
        The rule for intervals in reports: Student's t, or 1.96 standard errors as in the paper. All
        tables of the paper set the second.

    Examples
    --------
    >>> config = read_config({"sets": ["birds"], "methods": ["miv", "ncc"], "tasks": 50})
    >>> [method.name for method in config.methods], config.protocols
    (['miv', 'ncc'], ('varying',))
    >>> read_config({"set": ["birds"]})
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: The configuration has the unknown key 'set'. Did you mean 'sets'?
    """

    backbones: tuple[BackboneConfig, ...] = (BackboneConfig(DEFAULT_BACKBONE),)
    methods: tuple[MethodConfig, ...] = (MethodConfig("miv"), MethodConfig("ncc"))
    sets: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ("varying",)
    tasks: int = 600
    seed: int = 0
    views: int | None = 4
    benchmark: Literal["MD", "MD+"] | None = None
    paper_sizes: bool = False
    paper_thresholds: bool = False
    comparisons: tuple[ComparisonConfig, ...] = ()
    interval: Literal["student", "normal"] = "student"

    def __post_init__(self) -> None:
        for name, least in (("tasks", 1), ("seed", 0), ("views", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; expected at least {least}.")
        for title in ("backbones", "methods", "sets", "protocols", "comparisons"):
            names = [getattr(entry, "name", entry) for entry in getattr(self, title)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise InputError(f"{title} contains {twice[0]!r} twice; use different names.")
        for text in self.protocols:
            if (name := SamplingProtocol.parse(text).name) != text:
                raise InputError(f"The protocol {text!r} must be written as {name!r}.")
        known = [backbone.name for backbone in self.backbones]
        without = [p for p in self.protocols if not SamplingProtocol.parse(p).unlabelled]
        for method in self.methods:
            if without and not method.is_own and method.facts.uses_unlabelled:
                raise InputError(
                    f"The method {method.name!r} needs unlabelled images, and tasks of the "
                    f"protocol {without[0]!r} have none: use one such as "
                    "'5-way 1-shot, unlabelled 60'."
                )
            for name in method.backbones:
                check_one_of(f"backbone of {method.name}", name, known)
        for comparison in self.comparisons:
            for column in (*comparison.columns, *filter(None, [comparison.rival])):
                if not re.fullmatch(r".+@.+", column):
                    raise InputError(f"The column {column!r} must be written as METHOD@BACKBONE.")

    @property
    def is_open(self) -> bool:
        """Whether a protocol has queries of unknown classes."""
        return any(SamplingProtocol.parse(protocol).open for protocol in self.protocols)

    def methods_on(self, backbone: str) -> tuple[MethodConfig, ...]:
        """Return the methods that run on a backbone."""
        return tuple(method for method in self.methods if method.runs_on(backbone))

    def threshold(self, backbone: str, name: str) -> int | None:
        """Return T where the paper's authors lowered it for a set; None: as in the preset."""
        sources = {entry.name: entry.source for entry in self.backbones}
        info = find_declared(name)
        if not self.paper_thresholds or info is None:
            return None
        return LOWERED.get(sources.get(backbone, backbone), {}).get(info.name)

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as plain values, which `read_config` reads."""
        document: dict[str, Any] = to_json(self)
        return document


def read_config(document: Mapping[str, Any], where: str = "The configuration") -> RunConfig:
    """Read a configuration; the error about an unknown key suggests the right one.

    A backbone or a method may be a name or a table of its settings.

    Parameters
    ----------
    document : mapping
        The keys and values of a TOML file.
    where : str, default="The configuration"
        What errors call the document.

    Returns
    -------
    RunConfig
    """
    expanded = {key: value for key, value in document.items() if key != ABOUT}
    for key in ("backbones", "methods"):
        if isinstance(entries := expanded.get(key), list):
            expanded[key] = [{"name": e} if isinstance(e, str) else e for e in entries]
    if expanded.get("views") == PRESET_VIEWS:  # TOML has no null
        expanded["views"] = None
    return from_json(RunConfig, expanded, where)


def load_config(source: str | Path) -> RunConfig:
    """Read a TOML file, or a ready-made configuration by name (see `list_tables`).

    Parameters
    ----------
    source : str or Path
        A `.toml` file, or the name of a ready-made configuration.

    Returns
    -------
    RunConfig
    """
    return read_config(_read_toml(source), str(source))


SUFFIXES = (".safetensors", ".pth", ".pt", ".pth.tar", ".bin")  # of checkpoints
RANDOM = "random"  # untrained weights


def assign_weights(
    backbones: Sequence[BackboneConfig], values: Sequence[str]
) -> tuple[BackboneConfig, ...]:
    """Assign checkpoints to backbones.

    Each value is `NAME=FILE`; a folder, in which a checkpoint has the name of its backbone or the
    one under which its authors publish it; `FILE`, if there is one backbone; or `random`.

    >>> assign_weights([BackboneConfig("dino_resnet50")], ["dino_resnet50=mine.pth"])[0].weights
    'mine.pth'
    """
    chosen: dict[str, str] = {}
    names = [backbone.name for backbone in backbones]
    for value in values:
        if value == RANDOM:
            chosen |= dict.fromkeys(names, RANDOM)
        elif Path(value).is_dir():
            files = {
                b.name: next(filter(Path.is_file, _checkpoints(b, value)), None) for b in backbones
            }
            if not any(files.values()):
                raise InputError(f"The folder {value} holds no checkpoint named like {names[0]}.")
            chosen |= {name: str(file) for name, file in files.items() if file}
        elif "=" in value and not Path(value).exists():
            name, _, file = value.partition("=")
            sources = {b.source: b.name for b in backbones}
            check_one_of("backbone of --weights", name, [*names, *sources])
            chosen[sources.get(name, name)] = file
        elif len(backbones) == 1:
            chosen[names[0]] = value
        else:
            raise InputError(f"Write --weights NAME={value}, with one of {', '.join(names)}.")
    return tuple(replace(b, weights=chosen.get(b.name, b.weights)) for b in backbones)


def _checkpoints(backbone: BackboneConfig, folder: str) -> Iterator[Path]:
    """Yield the files that may be the checkpoint of a backbone, the clearest name first."""
    for name in dict.fromkeys([backbone.name, backbone.source]):
        for suffix in SUFFIXES:
            yield Path(folder, f"{name}{suffix}")
    if backbone.source in CHECKPOINTS:
        yield Path(folder, CHECKPOINTS[backbone.source])


def choose_sets(config: RunConfig, data: str | Path) -> tuple[str, ...]:
    """Return the sets of a run: those it names, or those of its benchmark in the data folder.

    They are names of folders; if several hold the same set of the paper, the one with its own name.
    """
    if config.sets:
        return config.sets
    present = find_sets(data)
    if config.benchmark is None:
        return present
    folder_of: dict[str, str] = {}  # by declared name
    for name in present:
        declared = find_declared(name)
        if declared is not None and (name == declared.name or declared.name not in folder_of):
            folder_of[declared.name] = name
    chosen = tuple(folder_of[name] for name in BENCHMARKS[config.benchmark] if name in folder_of)
    if not chosen:
        raise InputError(
            f"{data} holds no set of {config.benchmark}, which this configuration runs on: name "
            "other sets with --sets, or see `miv bench data list`."
        )
    return chosen


@dataclass(frozen=True)
class ConfigInfo:
    """What a ready-made configuration is."""

    title: str  # in one line
    paper: str = ""  # which tables and figures of the paper it reproduces, by their labels there
    # Hours of one core for all sets and tasks, estimated by `miv bench run NAME --dry-run`.
    hours: float | None = None


def describe_table(name: str) -> ConfigInfo:
    """Describe a ready-made configuration.

    >>> describe_table("main").paper
    'tab:miv_acc, tab:miv_ci'
    """
    return from_json(ConfigInfo, _read_toml(name).get(ABOUT), f"{name}.{ABOUT}")


def _read_toml(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    # A run folder may have the name of the configuration.
    if path.suffix != ".toml" and not path.is_file():
        check_one_of("A configuration that is not a .toml file", str(source), list_tables())
        path = TABLES / f"{source}.toml"
    if path.exists() and (not path.is_file() or path.stat().st_size > MAX_BYTES):
        raise InputError(f"{path} is not a regular file of at most {MAX_BYTES:,} bytes.")
    with reading(path, ValueError, RecursionError):
        return tomllib.loads(path.read_text(encoding="utf-8"))


def list_tables() -> list[str]:
    """Return the names of the ready-made configurations.

    >>> "small" in list_tables()
    True
    """
    return sorted(path.stem for path in TABLES.glob("*.toml"))


def extend(old: RunConfig, new: RunConfig) -> RunConfig:
    """Add the backbones, methods, sets and protocols of a later command to a run.

    Settings that both define must agree.

    >>> first = read_config({"sets": ["birds"], "tasks": 50})
    >>> extend(first, read_config({"sets": ["signs"], "tasks": 50})).sets
    ('birds', 'signs')
    >>> extend(first, read_config({"sets": ["signs"], "tasks": 60}))
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: The results folder belongs to another configuration: tasks is 50 \
there and 60 here; choose another folder.
    """
    for name in ("tasks", "seed", "views"):
        _agree(name, getattr(old, name), getattr(new, name))
    if any(map(paper_size, old.sets + new.sets)):  # for other sets it has no effect
        _agree("paper_sizes", old.paper_sizes, new.paper_sizes)
    lowered = [
        (backbone.name, name)
        for config in (old, new)
        for backbone in config.backbones
        for name in config.sets
        if replace(config, paper_thresholds=True).threshold(backbone.name, name)
    ]
    if lowered:
        _agree("paper_thresholds", old.paper_thresholds, new.paper_thresholds)
    return replace(
        old,
        paper_sizes=new.paper_sizes,
        paper_thresholds=new.paper_thresholds,
        interval=new.interval,
        benchmark=new.benchmark,
        backbones=_merge("backbone", old.backbones, new.backbones),
        methods=_merge_methods(old, new),
        sets=tuple(dict.fromkeys(old.sets + new.sets)),
        protocols=tuple(dict.fromkeys(old.protocols + new.protocols)),
        comparisons=_merge("comparison", old.comparisons, new.comparisons),
    )


def _merge(title: str, old: Sequence[T], new: Sequence[T]) -> tuple[T, ...]:
    known = {entry.name: entry for entry in old}
    for entry in new:
        _agree(f"the {title} {entry.name!r}", known.setdefault(entry.name, entry), entry)
    return tuple(known.values())


def _merge_methods(old: RunConfig, new: RunConfig) -> tuple[MethodConfig, ...]:
    """Let each method run on the backbones of both commands; all else must agree."""
    known: dict[str, MethodConfig] = {}
    for config in (old, new):
        everywhere = tuple(backbone.name for backbone in config.backbones)
        for method in config.methods:
            earlier = known.get(method.name, replace(method, backbones=()))
            bare = [replace(entry, backbones=()) for entry in (earlier, method)]
            _agree(f"the method {method.name!r}", *bare)
            names = earlier.backbones + (method.backbones or everywhere)
            known[method.name] = replace(earlier, backbones=tuple(dict.fromkeys(names)))
    total = {backbone.name for config in (old, new) for backbone in config.backbones}
    return tuple(
        replace(method, backbones=()) if set(method.backbones) == total else method
        for method in known.values()
    )


def _agree(name: str, old: object, new: object) -> None:
    if old != new:
        raise InputError(
            f"The results folder belongs to another configuration: {name} is {old} there and "
            f"{new} here; choose another folder."
        )
