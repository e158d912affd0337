"""LN-Tune's rate and steps, chosen on validation tasks with a small ViT that is trained here.

    python benchmarks/ln_tune.py --data DIR -o RUN

No pretrained ViT comes with pip, so one with 0.8 million parameters first learns the classes of
three tuning sets (48 px, about a minute on one core). 5-way 5-shot tasks of three other tuning sets
then decide: RUN/report has the accuracies, and `miv bench compare "RUN:rate 0.001" RUN:untouched`
the paired difference from the network without any steps. The results are discussed in
docs/research-log.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from _bench import arguments, measure
from mivhead import Preprocessing
from mivhead.backbones import from_module
from mivhead.datasets.sets import open_set

BASE = ("plantvillage_cropdisease", "cifar10", "dtd_textures10")
VALIDATION = ("eurosat", "gtsrb_traffic_signs", "omniglot")
SIZE = 48
UPDATES, BATCH, PER_CLASS = 200, 64, 60
PREPROCESSING = Preprocessing(size=SIZE)
SETTINGS = {
    "untouched": {"steps": 0},
    **{f"rate {rate}": {"learning_rate": rate, "steps": 40} for rate in (1e-3, 3e-3, 1e-2)},
    "rate 0.001, 20 steps": {"learning_rate": 1e-3, "steps": 20},
    "rate 0.001, views": {"learning_rate": 1e-3, "steps": 40, "use_views": True},
}

Arrays = np.ndarray[Any, Any]


def read(name: str, data: Path, rng: np.random.Generator) -> tuple[Arrays, list[str]]:
    """Pixels and labels of some images of every class of a set."""
    images = open_set(name, data)
    labels = np.asarray(images.labels)
    rows = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == each))[:PER_CLASS] for each in images.classes]
    )
    resized = [images.load(row).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for row in rows]
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in resized])
    return pixels, [f"{name}/{label}" for label in labels[rows]]


def train_vit(data: Path, seed: int) -> nn.Module:
    """Teach a small ViT all classes of the base sets at once."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    parts = [read(name, data, rng) for name in BASE]
    pixels = np.concatenate([x for x, _ in parts])
    classes, y = np.unique([label for _, own in parts for label in own], return_inverse=True)
    model = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=128, depth=4, num_heads=4, num_classes=0
    )
    head = nn.Linear(128, len(classes))
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (PREPROCESSING.mean, PREPROCESSING.std))
    losses = []
    for step in range(UPDATES):
        optimiser.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        rows = rng.choice(len(pixels), BATCH, replace=False)
        x = (torch.from_numpy(pixels[rows]).permute(0, 3, 1, 2) / 255 - mean) / std
        x = x.flip(3) if rng.random() < 0.5 else x
        loss = nn.functional.cross_entropy(head(model(x)), torch.as_tensor(y[rows]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(
        f"ViT trained on {len(pixels)} images of {len(classes)} classes: loss "
        f"{np.mean(losses[:10]):.2f} -> {np.mean(losses[-10:]):.2f}",
        flush=True,
    )
    return model


def main() -> None:
    defaults = {"sets": VALIDATION, "protocol": "5-way 5-shot", "tasks": 3}
    args = arguments(__doc__.splitlines()[0], **defaults).parse_args()
    model = train_vit(args.data, args.seed)
    vit = from_module(model, ["norm"], name="small ViT", preprocessing=PREPROCESSING)
    methods = [
        {"name": name, "method": "ln-tune", "params": {"use_views": False, "verbose": False, **s}}
        for name, s in SETTINGS.items()
    ]
    measure({"backbones": ["small ViT"], "methods": methods}, args, {"small ViT": vit})


if __name__ == "__main__":
    main()
