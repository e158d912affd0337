"""Every method by name: what it is, what it needs and where its file is.

A method is an estimator with `fit` and `predict_proba`. Its class states its facts as attributes
(see `Method`) as annotated literals (`needs: ClassVar = "images"`), and counts its own cost in
`work`. To add a method, write a file and add a line to `_RIVALS`. A method of another package is
either an entry point of the group `mivhead.methods`, or given as `module:Class` wherever the name
of a method is expected.

Listing methods imports none of them, nor PyTorch.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mivhead.features import Features
    from mivhead.methods.cost import BackboneWork, TaskSize, Work

GROUP = "mivhead.methods"  # of entry points
FACTS = ("summary", "paper", "needs", "uses_views", "has_recipe")  # attributes of a class
MIV_HOME = "mivhead.classifier:MIVClassifier"
MIV_PAPER = "Few-shot Classification as Multi-instance Verification (the MIV-head)"


class Classifier(Protocol):
    """The protocol of every method: an estimator on features, or on pixels."""

    classes_: NDArray[Any]
    seed_: int
    random_state: Any
    device: str | None

    def fit(self, X: Any, y: Any, *, views: Any = None, view_of: Any = None) -> Self:
        """Train on a support set, and perhaps on augmented views."""
        ...

    def predict_proba(self, X: Any) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        ...

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Hyperparameters by name."""
        ...

    def _check_params(self) -> None:
        """Raise an error for hyperparameters that are not valid."""

    def _state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what a model file holds: a JSON document and tensors."""
        ...

    def _restore(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        """Set the fitted state from what `_state` returned, checking everything."""


@dataclass(frozen=True)
class Method:
    """One entry of the registry.

    Parameters
    ----------
    name : str
        The name that users give.
    home : str
        `module:Class` of its estimator, imported on first use.
    summary, paper : str, default=""
        A one-line summary, and the paper it comes from.
    needs : {"features", "images"}, default="features"
        `"features"`: the output of a frozen backbone is enough, wherever it comes from.
        `"images"`: the method tunes the backbone, so it needs the images and a torch module.
    uses_views : bool, default=False
        Whether it trains on augmented views by default.
    uses_unlabelled : bool, default=False
        Whether the benchmark gives it the unlabelled images of a task.
    has_recipe : bool, default=False
        Whether it takes a recipe and a preset, like the MIV-head.
    settings : Mapping, default={}
        Parameters of the estimator that make this variant of it.
    cost : str, default=""
        `module:function` that counts its work, where that is not the estimator's method `work`.
    """

    name: str
    home: str
    summary: str = ""
    paper: str = ""
    needs: Literal["features", "images"] = "features"
    uses_views: bool = False
    uses_unlabelled: bool = False
    has_recipe: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    cost: str = ""

    @classmethod
    def from_class(cls, name: str, home: str) -> Method:
        """Read the facts that an estimator's class has as attributes of the same names.

        Parameters
        ----------
        name : str
            Name of the method.
        home : str
            Where its class is, as `module:Class`.

        Returns
        -------
        Method
        """
        kind = _load(home, name)
        for member in ("fit", "predict_proba"):
            if not callable(getattr(kind, member, None)):
                raise InputError(f"{home} cannot be used as a method: it has no {member}().")
        documented = (inspect.getdoc(kind) or "").partition("\n")[0].rstrip(".")
        facts = {fact: getattr(kind, fact) for fact in FACTS if hasattr(kind, fact)}
        return cls(name, home, **{"summary": documented} | facts)

    def load(self) -> type[Any]:
        """Import the estimator's class.

        Returns
        -------
        type
        """
        kind: type[Any] = _load(self.home, self.name)
        return kind

    def hyperparameters(self) -> dict[str, Any]:
        """Return all parameters of the estimator and their values in this method.

        Returns
        -------
        dict of str to object

        Examples
        --------
        >>> METHODS["knn"].hyperparameters()["neighbours"]
        5
        """
        if self.home == MIV_HOME:
            from mivhead.methods.miv import head_parameters

            return head_parameters(self.settings)
        parameters = inspect.signature(self.load()).parameters.values()
        named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        defaults = {p.name: None if p.default is p.empty else p.default for p in named}
        return defaults | dict(self.settings)

    def make(self, *, random_state: Any = None, device: str | None = None, **params: Any) -> Any:
        """Make an estimator, with the settings of the variant unless they are given.

        Parameters
        ----------
        random_state : int or numpy.random.RandomState, default=None
            Source of randomness.
        device : str, default=None
            Where it computes, such as "cpu" or "cuda"; None: where its input is.
        **params : dict
            Hyperparameters of the method.

        Returns
        -------
        Classifier
            Not fitted yet.

        Examples
        --------
        >>> METHODS["miv-eta0"].make().recipe.eta
        0.0
        """
        known = self.hyperparameters()
        own = ("recipe", "preset") if self.has_recipe else ()
        for name in params:
            if name not in own:
                check_one_of(f"parameter of {self.name}", name, known)
        given = {**self.settings, **params}
        if self.home == MIV_HOME:
            from mivhead.methods.miv import make_head

            return make_head({**given, "random_state": random_state, "device": device})
        kind = self.load()
        if hasattr(kind, "_restore"):
            return kind(random_state=random_state, device=device, **given)
        from mivhead.methods.user import UserMethod  # a class that is not made for mivhead

        return UserMethod(self.home, given, random_state=random_state, device=device)

    def work(
        self, classifier: Any, size: TaskSize, features: Features, backbone: BackboneWork
    ) -> Work | None:
        """Count the work of fitting.

        Parameters
        ----------
        classifier : Classifier
            An estimator of this method, not necessarily fitted.
        size : TaskSize
            Number of shots and views of each class.
        features : Features
            Features of one image or more; only their layout matters.
        backbone : BackboneWork
            The work of one pass of the backbone.

        Returns
        -------
        Work or None
            None for a method that does not count its work.
        """
        if self.cost:
            counted: Work | None = _load(self.cost, self.name)(classifier, size, features, backbone)
            return counted
        count = getattr(classifier, "work", None)
        return None if count is None else count(size, features, backbone)


def _ablation(name: str, summary: str, **replaced: Any) -> Method:
    """Make an entry for the paper's recipe, or its preset, with fields replaced."""
    return Method(
        name,
        MIV_HOME,
        summary,
        MIV_PAPER,
        uses_views=replaced.get("use_views", True),
        has_recipe=True,
        settings={"recipe": "paper", **replaced},
        cost="mivhead.methods.miv:work",
    )


_MIV = Method(
    "miv",
    MIV_HOME,
    "the MIV-head: pooling by attention, cross-attention pooling, several blocks",
    MIV_PAPER,
    uses_views=True,
    has_recipe=True,
    cost="mivhead.methods.miv:work",
)

_UNLABELLED = replace(
    _MIV,
    name="miv+unlabelled",
    summary="miv, which also learns from unlabelled images, if there are any",
    uses_unlabelled=True,
)

_RIVALS = {
    "ncc": "mivhead.methods.ncc:NearestCentroid",
    "baseline": "mivhead.methods.baseline:Baseline",
    "baseline++": "mivhead.methods.baseline:BaselinePlusPlus",
    "fit-lda": "mivhead.methods.gaussian:FitLDA",
    "fit-qda": "mivhead.methods.gaussian:FitQDA",
    "fit-protonets": "mivhead.methods.gaussian:ProtoNets",
    "logistic": "mivhead.methods.logistic:LogisticProbe",
    "svm": "mivhead.methods.svm:SupportVectors",
    "knn": "mivhead.methods.knn:NearestNeighbours",
    "ridge": "mivhead.methods.ridge:RidgeRegression",
    "simpleshot": "mivhead.methods.simpleshot:SimpleShot",
    "tip-adapter": "mivhead.methods.tip_adapter:TipAdapter",
    "tsa": "mivhead.methods.tuning.tsa:TSA",
    "ett": "mivhead.methods.tuning.ett:ETT",
    "ln-tune": "mivhead.methods.tuning.ln_tune:LNTune",
    "finetune": "mivhead.methods.tuning.finetune:Finetune",
}

_ABLATIONS = (
    _ablation("miv-paper", "the recipe of the paper, with nothing changed"),
    _ablation("miv-ablation", "any combination of the changes below, set by parameters"),
    _ablation("miv-mean", "CAP replaced by the mean of a class's image vectors", prototype="mean"),
    _ablation("miv-no-attention", "CAP without cross-attention", cross_attention=False),
    _ablation("miv-eta0", "CAP with equal weights of all shots, keeping W^K", eta=0.0),
    _ablation("miv-no-skip", "CAP without the in-attention skip connection", skip=False),
    _ablation("miv-no-excitation", "CAP without co-excitation", co_excitation=False),
    _ablation("miv-gap", "plain averaging of one candidate, not attention", candidates=1, tau=0.0),
    _ablation("miv-d1", "one candidate per block", candidates=1),
    _ablation("miv-d2", "at most two candidates per block", candidates=2),
    _ablation("miv-d4", "at most four candidates per block", candidates=4),
    _ablation("miv-blocks1", "the last block only", last_blocks=1),
    _ablation("miv-blocks2", "the last two blocks only", last_blocks=2),
    _ablation("miv-no-views", "no augmented views in training", use_views=False),
    _ablation("miv-gap-blocks1", "miv-gap on the last block", candidates=1, tau=0.0, last_blocks=1),
    _ablation(
        "miv-gap-mean", "miv-gap and miv-mean at once", candidates=1, tau=0.0, prototype="mean"
    ),
    _ablation(
        "miv-gap-mean-blocks1",
        "miv-gap-mean on the last block: equivalent to NCC",
        candidates=1,
        tau=0.0,
        prototype="mean",
        last_blocks=1,
    ),
)

_ROWS: dict[str, str | Method] = {
    "miv": _MIV,
    **_RIVALS,
    "miv+unlabelled": _UNLABELLED,
    **{method.name: method for method in _ABLATIONS},
}


_REGISTERED: dict[str, str] = {}  # by `register_method`

T = TypeVar("T", bound=type[Any])


def register_method(name: str) -> Callable[[T], T]:
    """Give a class of your own a name, for this process: a decorator.

    Parameters
    ----------
    name : str
        The name, such as `"my-head"`; it must not be that of another method.

    Returns
    -------
    callable
        Takes a class with `fit` and `predict_proba` and returns it.

    Examples
    --------
    >>> import numpy as np
    >>> @register_method("coin")
    ... class Coin:
    ...     def fit(self, X, y):
    ...         self.classes = len(set(y))
    ...         return self
    ...
    ...     def predict_proba(self, X):
    ...         return np.full((len(X), self.classes), 1 / self.classes)
    >>> make_method("coin").fit(np.eye(2), ["a", "b"]).predict_proba(np.eye(2)).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def register(kind: T) -> T:
        home = f"{kind.__module__}:{kind.__qualname__}"
        if name in METHODS and _REGISTERED.get(name) != home:
            raise InputError(f"There is already a method {name!r}; choose another name.")
        if "<locals>" in home or ":" in name:
            raise InputError(
                f"{kind.__qualname__} cannot be registered as {name!r}: define the class at the "
                "top level of a module or notebook, and choose a name without a colon."
            )
        setattr(sys.modules[kind.__module__], kind.__qualname__, kind)  # found there from now on
        Method.from_class(name, home)  # refuses a class that lacks a method
        _REGISTERED[name] = home
        _rows.cache_clear()
        return kind

    return register


@cache
def _rows() -> Mapping[str, str | Method]:
    """Name every method: mivhead's own, then those of installed packages."""
    from importlib.metadata import entry_points

    installed = {each.name: each.value for each in entry_points(group=GROUP)}
    own = {**installed, **_REGISTERED}
    return _ROWS | {name: home for name, home in own.items() if name not in _ROWS}


class _Methods(Mapping[str, Method]):
    """The registered methods; one is imported when it is looked up, not when it is listed."""

    def __getitem__(self, name: str) -> Method:
        row = _rows()[name]
        if isinstance(row, Method):
            return row
        return Method(name, row, **_facts(row)) if name in _ROWS else Method.from_class(name, row)

    def __iter__(self) -> Iterator[str]:
        return iter(_rows())

    def __len__(self) -> int:
        return len(_rows())

    def __contains__(self, name: object) -> bool:
        return name in _rows()


METHODS: Mapping[str, Method] = _Methods()


def list_methods() -> list[Method]:
    """Return all registered methods, the MIV-head first.

    Returns
    -------
    list of Method

    Examples
    --------
    >>> [method.name for method in list_methods()][:4]
    ['miv', 'ncc', 'baseline', 'baseline++']
    """
    return list(METHODS.values())


def get_method(name: str) -> Method:
    """Look up a registered method by name, or a class of your own as `module:Class`.

    Parameters
    ----------
    name : str
        Name of the method, or `module:Class`.

    Returns
    -------
    Method

    Examples
    --------
    >>> get_method("ncc").needs
    'features'
    >>> get_method("nnc")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: ...Did you mean 'ncc'?
    """
    if ":" in name:
        return Method.from_class(name, name)
    check_one_of("method", name, METHODS)
    return METHODS[name]


def make_method(
    name: str,
    *,
    preset: Any = None,
    recipe: Any = None,
    random_state: Any = None,
    device: str | None = None,
    **params: Any,
) -> Any:
    """Make the estimator of a method, not fitted yet.

    Parameters
    ----------
    name : str
        One of `METHODS`, or `module:Class`.
    preset : Preset or list of BlockPreset, default=None
        Settings of the backbone; ignored by methods that have no recipe.
    recipe : str or Recipe, default=None
        How the MIV-head and its ablations are trained; an error for other methods.
    random_state : int or numpy.random.RandomState, default=None
        Source of randomness.
    device : str, default=None
        Where it computes, such as "cpu" or "cuda"; None: where its input is.
    **params : dict
        Hyperparameters of the method; see `METHODS[name].hyperparameters()`.

    Returns
    -------
    Classifier
        With `fit(X, y, views=None, view_of=None)` and `predict_proba(X)`. X are `Features`, except
        for a method that tunes the backbone: it takes pixels, after `attach(network)`.

    Examples
    --------
    >>> make_method("knn", neighbours=3).fit([[0.0, 1.0], [1.0, 0.0]], ["a", "b"]).classes_
    array(['a', 'b'], dtype='<U1')
    """
    method = get_method(name)
    if recipe is not None and not method.has_recipe:
        raise InputError(f"{name} has no recipe; only the MIV-head and its ablations have one.")
    if method.has_recipe:
        params |= {"preset": preset} | ({} if recipe is None else {"recipe": recipe})
    return method.make(random_state=random_state, device=device, **params)


def method_name(classifier: Any) -> str:
    """Return the name of the method that an estimator belongs to, for model files and tables.

    Parameters
    ----------
    classifier : Classifier
        The estimator.

    Returns
    -------
    str

    Examples
    --------
    >>> method_name(make_method("miv-eta0"))
    'miv-eta0'
    """
    kind = type(classifier)
    params = classifier.get_params(deep=False)
    home = getattr(classifier, "home", f"{kind.__module__}:{kind.__qualname__}")
    if home == MIV_HOME:
        from mivhead.methods.miv import head_name

        rows = [row for row in _rows().values() if isinstance(row, Method) and row.home == MIV_HOME]
        replaced = {
            row.name: {k: v for k, v in row.settings.items() if k != "recipe"} for row in rows
        }
        return head_name(classifier, replaced)
    names: dict[str, int] = {}  # with the number of settings that fit
    for name, row in _rows().items():
        at, settings = (row.home, row.settings) if isinstance(row, Method) else (row, {})
        if at == home and settings.items() <= params.items():
            names[name] = len(settings)
    if names:
        return max(names, key=lambda name: names[name])
    own = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    if own or hasattr(classifier, "home"):
        return home  # a class of the user's, as `module:Class`
    raise InputError(f"{kind.__name__} is not a registered method.")


@cache
def _facts(home: str) -> dict[str, Any]:
    """Read the facts of one of mivhead's own classes from its source.

    Importing the class would work too, but it imports PyTorch, which takes seconds.

    >>> _facts("mivhead.methods.tuning.tsa:TSA")["needs"]
    'images'
    """
    module, _, name = home.partition(":")
    spec = find_spec(module)
    source: str | None = spec.loader.get_source(module)  # type: ignore[union-attr]  # ours
    assert source is not None, "a wheel holds the source"
    body = ast.parse(source).body
    (kind,) = (each for each in body if isinstance(each, ast.ClassDef) and each.name == name)
    return {
        each.target.id: ast.literal_eval(each.value)
        for each in kind.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and each.target.id in FACTS
        and each.value is not None
    }


def _load(home: str, method: str) -> Any:
    """Import `module:name`; where it is not installed, from the current folder."""
    module, _, name = home.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InputError(
            f"{method!r:.200} cannot be a method: give an importable module and its class, such as "
            "my_module:MyHead."
        )
    try:
        found = _import(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"The method {method!r} cannot be imported ({error}): give an importable module and "
            "its class, such as my_module:MyHead."
        ) from error
    if not hasattr(found, name):
        raise InputError(f"The method {method!r} cannot be imported: {module} has no {name!r}.")
    return getattr(found, name)


def _import(module: str) -> ModuleType:
    folder = str(Path.cwd())
    try:
        return import_module(module)
    except ModuleNotFoundError:
        if folder in sys.path:
            raise
    sys.path.append(folder)  # a console script does not look there by itself
    invalidate_caches()
    return import_module(module)
