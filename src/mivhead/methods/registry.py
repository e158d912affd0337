"""Every method by name: what it is, what it needs, where it comes from.

Listing methods imports none of them, nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from mivhead.errors import InputError, check_one_of

if TYPE_CHECKING:
    from mivhead.classifier import FeatureClassifier
    from mivhead.methods.tuning.base import TuningClassifier

MIV_PAPER = "Few-shot Classification as Multi-instance Verification (the MIV-head)"
CLOSER_LOOK = "Chen et al. 2019, A Closer Look at Few-shot Classification, arXiv 1904.04232"
FIT = "Shysheya et al. 2023, FiT: Parameter Efficient Few-shot Transfer, arXiv 2206.08671"


@dataclass(frozen=True)
class Method:
    """One entry of the registry.

    Parameters
    ----------
    name, summary
        What users call it, and one line about it.
    needs
        `"features"`: a frozen backbone's output is enough, from wherever it comes. `"images"`: the
        method tunes the backbone, so it needs the images and a torch module.
    paper
        Where it comes from.
    home
        `module:class` of its estimator, imported on first use.
    settings
        Parameters of the estimator that make the variant.
    uses_views
        Whether it trains on augmented views by default, so that they are worth making.
    configurable
        Whether it has a recipe and a preset, like the MIV-head.
    """

    name: str
    summary: str
    needs: Literal["features", "images"]
    paper: str
    home: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    uses_views: bool = False
    configurable: bool = False

    def load(self) -> type[Any]:
        """Import the estimator's class."""
        module, name = self.home.split(":")
        kind: type[Any] = getattr(import_module(module), name)
        return kind

    def make(self, **params: Any) -> Any:
        """Make an estimator, with the settings of the variant unless they are given.

        >>> METHODS["miv-eta0"].make().recipe.eta
        0.0
        """
        known = self.hyperparameters()
        own = ("recipe", "preset") if self.configurable else ()
        for name in params:
            if name not in own:
                check_one_of(f"parameter of {self.name}", name, known)
        settings = {**self.settings, **params}
        if self.configurable:
            from mivhead.methods.ablation import make_head

            return make_head(settings)
        return self.load()(**settings)

    def hyperparameters(self) -> dict[str, Any]:
        """All parameters of the estimator and their values in this method.

        >>> METHODS["knn"].hyperparameters()["neighbours"]
        5
        """
        if self.configurable:
            from mivhead.methods.ablation import head_parameters

            return head_parameters(self.settings)
        params: dict[str, Any] = self.load()(**self.settings).get_params(deep=False)
        return params


def _head(name: str, home: str, paper: str, summary: str) -> Method:
    return Method(name, summary, "features", paper, f"mivhead.methods.{home}")


def _tuner(name: str, home: str, paper: str, summary: str, *, use_views: bool = False) -> Method:
    home = f"mivhead.methods.tuning.{home}"
    return Method(name, summary, "images", paper, home, uses_views=use_views)


def _ablation(name: str, summary: str, **replaced: Any) -> Method:
    """Make an entry for the paper's recipe, or its preset, with fields replaced."""
    return Method(
        name,
        summary,
        "features",
        MIV_PAPER,
        "mivhead.classifier:MIVClassifier",
        {"recipe": "paper", **replaced},
        uses_views=replaced.get("use_views", True),
        configurable=True,
    )


_ALL = (
    Method(
        "miv",
        "the MIV-head: pooling by attention, cross-attention pooling, several blocks",
        "features",
        MIV_PAPER,
        "mivhead.classifier:MIVClassifier",
        uses_views=True,
        configurable=True,
    ),
    _head("ncc", "ncc:NearestCentroid", MIV_PAPER, "cosine to the class mean; nothing is trained"),
    _head("baseline", "baseline:Baseline", CLOSER_LOOK, "a linear layer, trained by Adam"),
    _head(
        "baseline++", "baseline:BaselinePlusPlus", CLOSER_LOOK, "a cosine layer, trained by Adam"
    ),
    _head("fit-lda", "fit_head:FitLDA", FIT, "Gaussian classes with one covariance"),
    _head("fit-qda", "fit_head:FitQDA", FIT, "Gaussian classes, each with a covariance of its own"),
    _head(
        "fit-protonets", "fit_head:ProtoNets", FIT, "Euclidean distance to the class mean; closed"
    ),
    _head(
        "logistic",
        "logistic:LogisticProbe",
        "Tian et al. 2020, A Good Embedding Is All You Need?, arXiv 2003.11539",
        "logistic regression on features of length 1",
    ),
    _head(
        "svm",
        "svm:SupportVectors",
        "AutoGluon's few-shot learner, arXiv 2404.16233",
        "standardised features and an RBF support vector machine",
    ),
    _head(
        "knn",
        "knn:NearestNeighbours",
        "Wu et al. 2018, Non-Parametric Instance Discrimination, arXiv 1805.01978",
        "weighted votes of the nearest support images",
    ),
    _head(
        "ridge",
        "ridge:RidgeRegression",
        "Bertinetto et al. 2019, Differentiable Closed-form Solvers, arXiv 1805.08136",
        "ridge regression onto the labels, in closed form",
    ),
    _head(
        "tip-adapter",
        "tip_adapter:TipAdapter",
        "Zhang et al. 2021, Tip-Adapter, arXiv 2111.03930",
        "a cache of features and labels; without CLIP's text term; nothing is trained",
    ),
    _tuner(
        "tsa",
        "tsa:TSA",
        "Li et al. 2022, Cross-domain Few-shot Learning with Task-specific Adapters, "
        "arXiv 2107.00358",
        "adapters beside the 3x3 convolutions of a ResNet",
    ),
    _tuner(
        "ett",
        "ett:ETT",
        "Xu et al. 2022, Exploring Efficient Few-shot Adaptation for Vision Transformers, "
        "arXiv 2301.02419",
        "prefixes of class prototypes, and offsets, in every block of a ViT",
    ),
    _tuner(
        "ln-tune",
        "ln_tune:LNTune",
        "Basu et al. 2024, Strong Baselines for Parameter-Efficient Few-shot Fine-tuning, "
        "arXiv 2304.01917",
        "only the LayerNorms of a ViT are trained",
        use_views=True,
    ),
    _tuner(
        "finetune",
        "finetune:Finetune",
        "Hu et al. 2022, Pushing the Limits of Simple Pipelines (PMF), arXiv 2204.07305",
        "all weights are trained: the costly reference",
    ),
    _ablation("miv-paper", "the recipe of the paper, with nothing changed"),
    _ablation("miv-ablation", "the same, for any mixture of the changes below, by parameters"),
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
        "miv-gap-mean on the last block: NCC, by another path",
        candidates=1,
        tau=0.0,
        prototype="mean",
        last_blocks=1,
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}


def list_methods() -> list[Method]:
    """All methods, the MIV-head first, its ablations last.

    >>> [method.name for method in list_methods()][:4]
    ['miv', 'ncc', 'baseline', 'baseline++']
    """
    return list(METHODS.values())


def make_method(
    name: str,
    *,
    preset: Any = None,
    recipe: Any = None,
    random_state: Any = None,
    device: str | None = None,
    **params: Any,
) -> FeatureClassifier:
    """Make the classifier on features of a name.

    Parameters
    ----------
    name
        One of `METHODS`.
    preset
        Settings of the backbone; methods that have no use for them leave them aside.
    recipe
        How the MIV-head and its ablations are trained; an error for other methods.
    random_state, device
        As for every estimator.
    params
        Hyperparameters of the method; see `METHODS[name].hyperparameters()`.

    Examples
    --------
    >>> make_method("nnc")
    Traceback (most recent call last):
        ...
    mivhead.errors.InputError: ...Did you mean 'ncc'?
    """
    check_one_of("method", name, METHODS)
    method = METHODS[name]
    if method.needs != "features":
        raise InputError(
            f"{name} tunes the backbone: it needs images and a torch module, features of a frozen "
            "backbone are not enough."
        )
    if recipe is not None and not method.configurable:
        raise InputError(f"{name} has no recipe; only the MIV-head and its ablations have one.")
    if method.configurable:
        params |= {"preset": preset} | ({} if recipe is None else {"recipe": recipe})
    classifier: FeatureClassifier = method.make(random_state=random_state, device=device, **params)
    return classifier


def make_tuner(
    name: str, *, random_state: Any = None, device: str | None = None, **params: Any
) -> TuningClassifier:
    """Make the classifier on images that tunes a copy of the backbone.

    >>> make_tuner("tsa").steps
    40
    """
    check_one_of("method", name, [m.name for m in METHODS.values() if m.needs == "images"])
    tuner: TuningClassifier = METHODS[name].make(random_state=random_state, device=device, **params)
    return tuner


def method_name(classifier: FeatureClassifier | TuningClassifier) -> str:
    """Name of the method that a classifier is, for model files and tables.

    >>> method_name(make_method("miv-eta0"))
    'miv-eta0'
    """
    kind = type(classifier)
    home = f"{kind.__module__}:{kind.__qualname__}"
    fitting = [method for method in METHODS.values() if method.home == home]
    if not fitting:
        raise InputError(f"{kind.__name__} is not a registered method.")
    if fitting[0].configurable:
        from mivhead.methods.ablation import head_name

        replaced = {
            method.name: {k: v for k, v in method.settings.items() if k != "recipe"}
            for method in fitting
        }
        return head_name(classifier, replaced)
    params = classifier.get_params(deep=False)
    fitting = [method for method in fitting if method.settings.items() <= params.items()]
    return max(fitting, key=lambda method: len(method.settings)).name
