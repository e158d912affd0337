"""Methods that train weights of the network itself: all of them, or the LayerNorms of a ViT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mivhead_bench.methods.tuning.base import TuningClassifier
from mivhead_bench.methods.tuning.network import Network, Pixels, check_is_vit


@dataclass(kw_only=True, eq=False, repr=False)
class Finetune(TuningClassifier):
    """All weights are trained: the costly reference.

    Statistics of BatchNorms stay as they are. The rate is ours, not searched as in PMF.
    """

    paper: ClassVar = (
        "Hu et al. 2022, Pushing the Limits of Simple Pipelines (PMF), arXiv 2204.07305"
    )

    optimiser: ClassVar = "Adam"

    steps: int = 40
    learning_rate: float = 5e-5

    def check(self, network: Network) -> None:
        """Accept every network."""

    def _attach(
        self, network: Network, _pixels: Pixels, _labels: Tensor
    ) -> Mapping[str, nn.Parameter]:
        return dict(network.model.requires_grad_().named_parameters())

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        return Adam(parameters.values(), lr=self.learning_rate)


@dataclass(kw_only=True, eq=False, repr=False)
class LNTune(Finetune):
    """Only the LayerNorms of a ViT are trained.

    The paper gives no settings; steps and rate were chosen on validation tasks with a small ViT,
    where differences were hardly larger than chance (docs/research-log.md).
    """

    paper: ClassVar = (
        "Basu et al. 2024, Strong Baselines for Parameter-Efficient Few-shot Fine-tuning, "
        "arXiv 2304.01917"
    )

    steps: int = 20
    learning_rate: float = 1e-3
    use_views: bool = True

    def check(self, network: Network) -> None:
        """Raise an error unless this is a vision transformer."""
        check_is_vit(network, "ln-tune")

    def _attach(
        self, network: Network, _pixels: Pixels, _labels: Tensor
    ) -> Mapping[str, nn.Parameter]:
        return {
            f"{name}.{kind}": parameter
            for name, module in network.model.named_modules()
            if isinstance(module, nn.LayerNorm)
            for kind, parameter in module.requires_grad_().named_parameters()
        }
