"""The suggested preset of every named backbone; plain data, imports no PyTorch.

This is the place to change after a measurement.
"""

from __future__ import annotations

from dataclasses import replace

from mivhead.preset import BlockPreset, Preprocessing, Preset

_EFFICIENTNET_LITE0 = Preset(
    taps=("blocks.4", "bn2"),  # 112x14x14, the last 14x14 stage; 1280x7x7, after conv_head
    blocks=(BlockPreset(pool_sizes=(13, 11, 9, 8)), BlockPreset(pool_sizes=(6, 5, 4))),
    preprocessing=Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)


def _at_size(preset: Preset, size: int) -> Preset:
    return replace(preset, preprocessing=replace(preset.preprocessing, size=size))


PRESETS = {
    "efficientnet_lite0": _EFFICIENTNET_LITE0,
    "efficientnet_lite1": _at_size(_EFFICIENTNET_LITE0, 240),
    "efficientnet_lite2": _at_size(_EFFICIENTNET_LITE0, 260),
}
