"""The work of methods that tune the backbone: every step passes it, forward and backward."""

from __future__ import annotations

from mivhead.benchmark.work import BACKWARD, BackboneWork, Work

TUNING = ("tsa", "ett", "ln-tune", "finetune")


def tuning_work(
    method: str, backbone: BackboneWork, images: int, channels: int, ways: int, steps: int
) -> Work:
    """Work of all steps on these images.

    A backward pass through a frozen layer computes the gradient of its input only, through a
    trained one that of its weights too; through attention, of both factors.
    """
    total, attention = images * backbone.total, images * backbone.attention
    frozen = total - attention
    adapters = 0.0
    if method == "finetune":
        step = 3 * total
    elif method == "tsa":
        adapters = images * backbone.conv3x3 / 9  # 1x1 beside 3x3
        step = 2 * total + 3 * adapters
    else:
        step = 2 * frozen + 3 * attention
    if method == "ett":
        # A prefix per class beside the keys and values, made by C -> C/2 -> 24 C for 12 blocks.
        adapters = ways * (channels * channels / 2 + channels / 2 * 24 * channels)
        step += 3 * adapters
    mapped = images * channels**2 if method in ("tsa", "ett") else 0.0  # the feature map beta
    classify = mapped + 2 * images * ways * channels  # class means and cosines
    return Work(
        steps * (step + 3 * classify), paper=BACKWARD * steps * (total + adapters + classify)
    )
