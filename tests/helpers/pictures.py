"""What tests of drawings share."""

from pathlib import Path

import numpy as np
from PIL import Image


def ink(path: Path) -> float:
    """Measure how much is drawn, as the standard deviation of the grey values."""
    with Image.open(path) as image:
        return float(np.asarray(image.convert("L")).std())
