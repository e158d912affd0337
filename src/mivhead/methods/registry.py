"""Every method by name: what it is, what it needs and where its file is.

A method is an estimator with `fit` and `predict_proba` that counts its own cost in `work`. To add
one, write a file and add a row to `_RIVALS`, which holds the facts, so that listing methods imports
none of them, nor PyTorch. A method of another package is either an entry point of the group
`mivhead.methods`, or given as `module:Class` wherever the name of a method is expected; its class
may state its facts as attributes (see `Method`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mivhead.ensemble.unlabelled import UnlabelledUse
    from mivhead.features import Features
    from mivhead.methods.cost import BackboneWork, TaskSize, Work
    from mivhead.model.decision import DecisionRule
    from mivhead.support import SupportSet

GROUP = "mivhead.methods"  # of entry points
MADE_AS = "_made_as"  # attribute of an estimator: the name of its method
FACTS = ("summary", "paper", "needs", "uses_views", "has_recipe")  # attributes of a class
MIV_HOME = "mivhead.classifier:MIVClassifier"
MIV_PAPER = "Few-shot Classification as Multi-instance Verification (the MIV-head)"


class Classifier(Protocol):
    """The protocol of every method: an estimator on features, or on pixels."""

    needs: ClassVar[str]  # "features", or "images" if it tunes a copy of the backbone
    classes_: NDArray[Any]
    seed_: int
    random_state: Any
    device: str | None
    scale_: tuple[int, ...]
    decision_: DecisionRule | None  # None if no shot is left out while it is fitted
    unlabelled_: UnlabelledUse | None  # None if it learned from its shots alone

    @property
    def has_ensemble(self) -> bool:
        """Whether `fit` takes unlabelled images and class vectors."""
        ...

    def fit(self, X: Any, y: Any, *, views: Any = None, view_of: Any = None) -> Self:
        """Train on a support set, and perhaps on augmented views."""
        ...

    def fit_support(self, support: SupportSet) -> Self:
        """Train on a support set that is checked."""
        ...

    def predict_proba(self, X: Any) -> NDArray[np.floating[Any]]:
        """Probabilities (image, class), in the order of `classes_`."""
        ...

    def score_unknown(
        self, X: Any
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]:
        """Probabilities, and how unlike the shots each image is; None if that is not known."""
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
        if self.has_recipe:
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
        for name in params:
            if not (self.has_recipe and name in ("recipe", "preset")):
                check_one_of(f"parameter of {self.name}", name, known)
        given = {**self.settings, **params, "random_state": random_state, "device": device}
        kind: Any = self.load()
        made: Any
        if self.has_recipe:
            from mivhead.methods.miv import make_head

            made = make_head(given)
        elif hasattr(kind, "_restore"):
            made = kind(**given)
        else:  # a class that is not made for mivhead
            from mivhead.methods.user import UserMethod

            made = UserMethod(self.home, params, random_state=random_state, device=device)
        # Whether there are unlabelled images is not a property of the estimator.
        setattr(made, MADE_AS, "miv" if self.uses_unlabelled else self.name)
        return made

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


def _rival(name: str, home: str, summary: str, paper: str, **facts: Any) -> Method:
    return Method(name, f"mivhead.methods.{home}", summary, paper, **facts)


_CHEN = "Chen et al. 2019, A Closer Look at Few-shot Classification, arXiv 1904.04232"
_FIT = "Shysheya et al. 2023, FiT: Parameter Efficient Few-shot Transfer, arXiv 2206.08671"
_RIDGE = "Bertinetto et al. 2019, Differentiable Closed-form Solvers, arXiv 1805.08136"
_PMF = "Hu et al. 2022, Pushing the Limits of Simple Pipelines (PMF), arXiv 2204.07305"

_RIVALS = (
    _rival("ncc", "ncc:NearestCentroid", "cosine to the class mean; nothing is trained", MIV_PAPER),
    _rival("baseline", "baseline:Baseline", "a linear layer, trained by Adam", _CHEN),
    _rival("baseline++", "baseline:BaselinePlusPlus", "a cosine layer, trained by Adam", _CHEN),
    _rival("fit-lda", "gaussian:FitLDA", "Gaussian classes with one covariance", _FIT),
    _rival("fit-qda", "gaussian:FitQDA", "Gaussian classes, each with its own covariance", _FIT),
    _rival(
        "fit-protonets",
        "gaussian:ProtoNets",
        "Euclidean distance to the class mean; nothing is trained",
        _FIT,
    ),
    _rival(
        "logistic",
        "logistic:LogisticProbe",
        "logistic regression on features of length 1",
        "Tian et al. 2020, A Good Embedding Is All You Need?, arXiv 2003.11539",
    ),
    _rival(
        "svm",
        "svm:SupportVectors",
        "standardised features and an RBF support vector machine",
        "AutoGluon's few-shot learner, arXiv 2404.16233",
    ),
    _rival(
        "knn",
        "knn:NearestNeighbours",
        "weighted votes of the nearest support images",
        "Wu et al. 2018, Non-Parametric Instance Discrimination, arXiv 1805.01978",
    ),
    _rival(
        "ridge", "ridge:RidgeRegression", "ridge regression onto the labels, in closed form", _RIDGE
    ),
    _rival(
        "ridge-sqrt",
        "ridge:RidgeRegression",
        "ridge regression on the square roots of the features",
        _RIDGE,
        settings={"power": 0.5},
    ),
    _rival(
        "simpleshot",
        "simpleshot:SimpleShot",
        "Euclidean distance to the class mean of centred features of length 1",
        "Wang et al. 2019, SimpleShot, arXiv 1911.04623",
    ),
    _rival(
        "tip-adapter",
        "tip_adapter:TipAdapter",
        "a cache of features and labels; without CLIP's text term; nothing is trained",
        "Zhang et al. 2021, Tip-Adapter, arXiv 2111.03930",
    ),
    _rival(
        "tsa",
        "tuning.tsa:TSA",
        "adapters parallel to the 3x3 convolutions of a ResNet",
        "Li et al. 2022, Cross-domain Few-shot Learning with Task-specific Adapters, "
        "arXiv 2107.00358",
        needs="images",
    ),
    _rival(
        "ett",
        "tuning.ett:ETT",
        "prefixes of class prototypes, and offsets, in every block of a ViT",
        "Xu et al. 2022, Exploring Efficient Few-shot Adaptation for Vision Transformers, "
        "arXiv 2301.02419",
        needs="images",
    ),
    _rival(
        "ln-tune",
        "tuning.ln_tune:LNTune",
        "only the LayerNorms of a ViT are trained",
        "Basu et al. 2024, Strong Baselines for Parameter-Efficient Few-shot Fine-tuning, "
        "arXiv 2304.01917",
        needs="images",
        uses_views=True,
    ),
    _rival(
        "finetune",
        "tuning.finetune:Finetune",
        "all weights are trained: the costly reference",
        _PMF,
        needs="images",
    ),
    _rival(
        "finetune-vote",
        "tuning.finetune:FinetuneVote",
        "all weights are trained, at nine pairs of learning rates that vote",
        _PMF,
        needs="images",
    ),
)

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

_ROWS = {each.name: each for each in (_MIV, *_RIVALS, _UNLABELLED, *_ABLATIONS)}


_REGISTERED: dict[str, str] = {}  # by `register_method`

T = TypeVar("T", bound=type[Any])


def register_method(name: str) -> Callable[[T], T]:
    """Register a class of your own under a name, for this process: a decorator.

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
        _homes.cache_clear()
        return kind

    return register


@cache
def _homes() -> Mapping[str, str]:
    """Name every method, with its class: mivhead's own, and those of other packages."""
    from importlib.metadata import entry_points

    installed = {each.name: each.value for each in entry_points(group=GROUP)}
    return installed | _REGISTERED | {name: method.home for name, method in _ROWS.items()}


class _Methods(Mapping[str, Method]):
    """The registered methods; one is imported when it is looked up, not when it is listed."""

    def __getitem__(self, name: str) -> Method:
        return _ROWS[name] if name in _ROWS else Method.from_class(name, _homes()[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*_ROWS, *(name for name in _homes() if name not in _ROWS)])

    def __len__(self) -> int:
        return len(_homes())

    def __contains__(self, name: object) -> bool:
        return name in _ROWS or name in _homes()  # the other packages are looked at only if needed


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
        The estimator. One that was not made by `make_method` has the name of its class; a
        `MIVClassifier` without ridge experts is `miv-paper`.

    Returns
    -------
    str

    Examples
    --------
    >>> method_name(make_method("miv-eta0"))
    'miv-eta0'
    """
    if made_as := getattr(classifier, MADE_AS, None):
        return str(made_as)
    kind = type(classifier)
    home = getattr(classifier, "home", f"{kind.__module__}:{kind.__qualname__}")
    if home == MIV_HOME:
        from mivhead.head.recipe import resolve_recipe

        return "miv" if resolve_recipe(classifier.recipe).has_experts else "miv-paper"
    for name, known in _homes().items():
        if known == home:
            return name
    own = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    if own or hasattr(classifier, "home"):
        return home  # a class of the user's, as `module:Class`
    raise InputError(f"{kind.__name__} is not a registered method.")


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
