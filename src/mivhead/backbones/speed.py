"""How many images per second a backbone extracts on this computer, measured once on request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from mivhead._util.files import replacing
from mivhead._util.schema import parse_json
from mivhead.backbones import hub, load_backbone
from mivhead.backbones.presets import PRESETS

IMAGES = 16
SIZE = (300, 400)  # height and width of the images
FILE = "speed.json"


def known() -> dict[str, float]:
    """Return what was measured before, by name."""
    try:
        document = parse_json((hub.own_folder() / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    pairs = document.items() if isinstance(document, dict) else ()
    return {str(k): float(v) for k, v in pairs if isinstance(v, int | float)}


def measure(names: Sequence[str]) -> dict[str, float]:
    """Measure backbones by name, remember the results, and return all that are known.

    Weights do not change the speed, so untrained ones are used.
    """
    import numpy as np

    found = known()
    images = list(np.random.default_rng(0).integers(0, 256, (IMAGES, *SIZE, 3), dtype=np.uint8))
    for name in names:
        weights = None if name in PRESETS else "random"
        # Untrained weights may give values that are too large for float16.
        backbone = load_backbone(name, weights=weights, dtype="float32")
        backbone.extract(images[:1])
        start = time.perf_counter()
        backbone.extract(images)
        found[name] = round(IMAGES / (time.perf_counter() - start), 2)
    with replacing(hub.own_folder() / FILE, make_folders=True) as part:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
