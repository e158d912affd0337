"""Images of three patterns, in folders."""

import numpy as np
from PIL import Image

CLASSES = ("checks", "rings", "stripes")


def draw(kind, number):
    """Three patterns that differ in kind, each in several sizes and shades."""
    x, y = np.meshgrid(np.arange(48), np.arange(48))
    step = 5 + number
    value = {
        "stripes": (x // step) % 2,
        "checks": (x // step + y // step) % 2,
        "rings": (np.hypot(x - 24, y - 24) // (step / 1.5)).astype(int) % 2,
    }[kind]
    shade = np.array([200, 180 - 9 * number, 90 + 13 * number])
    return Image.fromarray((40 + value[:, :, None] * (shade - 40)).astype(np.uint8))


def write_images(root, classes=CLASSES, numbers=range(3)):
    for kind in classes:
        (root / kind).mkdir(parents=True)
        for number in numbers:
            draw(kind, number).save(root / kind / f"{number}.png")
    return root
