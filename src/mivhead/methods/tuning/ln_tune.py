"""LN-Tune: only the LayerNorms of a vision transformer are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Adam, Optimizer

from mivhead.methods.cost import BackboneWork
from mivhead.methods.tuning.base import Network, TuningClassifier, check_is_vit


@dataclass(kw_only=True, eq=False, repr=False)
class LNTune(TuningClassifier):
    """Scales and shifts of all LayerNorms of a vision transformer, with the NCC head.

    The paper gives no settings; steps and rate were chosen on validation tasks with a small ViT,
    where differences were hardly larger than chance (docs/research-log.md).

    Parameters
    ----------
    steps : int, default=20
        Passes over the support set.
    learning_rate : float, default=1e-3
        Learning rate of Adam.

    References
    ----------
    Basu et al., "Strong Baselines for Parameter-Efficient Few-shot Fine-tuning", 2024,
    arXiv 2304.01917.
    """

    STORED: ClassVar = r"network\.[\w.-]*(weight|bias)"

    steps: int = 20
    learning_rate: float = 1e-3
    use_views: bool = True

    def check(self, network: Network) -> None:
        """Raise an error unless this is a vision transformer."""
        check_is_vit(network, "ln-tune", "trains the LayerNorms")

    def _attach(self, network: Network) -> dict[str, nn.Parameter]:
        norms = {
            name: module
            for name, module in network.model.named_modules()
            if isinstance(module, nn.LayerNorm)
        }
        return {
            f"network.{name}.{kind}": parameter
            for name, module in norms.items()
            for kind, parameter in module.requires_grad_().named_parameters()
        }

    def _optimiser(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        return Adam(parameters.values(), lr=self.learning_rate)

    def _step_products(
        self, backbone: BackboneWork, images: int, _channels: int, _ways: int
    ) -> tuple[float, float, float]:
        frozen = images * (backbone.total - backbone.attention)
        return 2 * frozen + 3 * images * backbone.attention, 0.0, 0.0
