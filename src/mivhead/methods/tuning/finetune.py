"""Full fine-tuning: every weight of the network is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import nn
from torch.optim import Adam, Optimizer

from mivhead.methods.tuning.base import Network, TuningClassifier


class Finetune(TuningClassifier):
    """All weights of the network, with the NCC head: the costly reference, as in PMF.

    Statistics of BatchNorms stay as they are. A model file holds all weights that were trained, so
    it is as large as the network. The rate is ours, not searched as in PMF.

    Parameters
    ----------
    steps
        Passes over the support set.
    learning_rate
        Of Adam.
    use_views
        Train on augmented views as well.
    images_at_once
        Images whose activations are kept; a larger support set costs a third more time. None: as
        many as 32 images of 224 px have pixels.
    random_state
        Not used: nothing is random.
    device
        Where to compute; None: where the backbone is.
    verbose
        Show a progress bar if it takes more than two seconds.
    """

    STORED: ClassVar = r"network\.[\w.-]+"

    def __init__(
        self,
        *,
        steps: int = 40,
        learning_rate: float = 5e-5,
        use_views: bool = False,
        images_at_once: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
        verbose: bool = True,
    ) -> None:
        self.steps = steps
        self.learning_rate = learning_rate
        self.use_views = use_views
        self.images_at_once = images_at_once
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def check(self, network: Network) -> None:
        """Accept every network."""

    def _attach(self, network: Network) -> dict[str, nn.Parameter]:
        parameters = network.model.requires_grad_().named_parameters()
        return {f"network.{name}": parameter for name, parameter in parameters}

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        return Adam(parameters.values(), lr=self.learning_rate)
