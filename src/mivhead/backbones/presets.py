"""The suggested preset of every named backbone; plain data, imports no PyTorch.

This is the place to change after a measurement.
"""

from __future__ import annotations

from dataclasses import replace

from mivhead.preset import BlockPreset, Preprocessing, Preset

# Measured: docs/results/presets.md. Pooled candidates beside the native maps did not help.
_EFFICIENTNET_LITE0 = Preset(
    # Outputs of the last three stages, 112x14x14, 192x7x7 and 320x7x7, and the activated map after
    # the last convolution, 1280x7x7, whose average is also the plain heads' feature.
    taps=("blocks.4", "blocks.5", "blocks.6", "bn2"),
    blocks=(BlockPreset(), BlockPreset(), BlockPreset(), BlockPreset(plain=True)),
    preprocessing=Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)


def _at_size(preset: Preset, size: int) -> Preset:
    return replace(preset, preprocessing=replace(preset.preprocessing, size=size))


PRESETS = {
    "efficientnet_lite0": _EFFICIENTNET_LITE0,
    "efficientnet_lite1": _at_size(_EFFICIENTNET_LITE0, 240),
    "efficientnet_lite2": _at_size(_EFFICIENTNET_LITE0, 260),
}
