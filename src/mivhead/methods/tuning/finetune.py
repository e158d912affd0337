"""Full fine-tuning: every weight of the network is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Adam, Optimizer

from mivhead.methods.cost import BackboneWork
from mivhead.methods.tuning.base import Network, TuningClassifier


@dataclass(kw_only=True, eq=False, repr=False)
class Finetune(TuningClassifier):
    """All weights of the network, with the NCC head: the costly reference, as in PMF.

    Statistics of BatchNorms stay as they are. A model file holds all weights that were trained, so
    it is as large as the network. The rate is ours, not searched as in PMF.

    Parameters
    ----------
    steps : int, default=40
        Passes over the support set.
    learning_rate : float, default=5e-5
        Learning rate of Adam.
    use_views : bool, default=False
        Train on augmented views as well.
    images_at_once : int or None, default=None
        Images whose activations are kept; a larger support set takes a third more time. None: as
        many as have the pixels of 32 images at 224 px, or as fit into the memory of a GPU.
    random_state : int, RandomState instance or None, default=None
        Ignored; the method is deterministic.
    device : str or None, default=None
        Where to compute; None: where the backbone is.
    verbose : bool, default=True
        Show a progress bar if training takes more than two seconds.

    References
    ----------
    Hu et al., "Pushing the Limits of Simple Pipelines for Few-Shot Learning" (PMF), 2022,
    arXiv 2204.07305.
    """

    summary: ClassVar = "all weights are trained: the costly reference"
    paper: ClassVar = (
        "Hu et al. 2022, Pushing the Limits of Simple Pipelines (PMF), arXiv 2204.07305"
    )
    needs: ClassVar = "images"
    STORED: ClassVar = r"network\.[\w.-]+"

    steps: int = 40
    learning_rate: float = 5e-5

    def check(self, network: Network) -> None:
        """Accept every network."""

    def _attach(self, network: Network) -> dict[str, nn.Parameter]:
        parameters = network.model.requires_grad_().named_parameters()
        return {f"network.{name}": parameter for name, parameter in parameters}

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        return Adam(parameters.values(), lr=self.learning_rate)

    def _step_products(
        self, backbone: BackboneWork, images: int, _channels: int, _ways: int
    ) -> tuple[float, float, float]:
        return 3 * images * backbone.total, 0.0, 0.0
