"""LN-Tune's rate and steps, chosen on validation tasks with a small ViT that is trained here.

    python benchmarks/ln_tune.py --data DIR

DIR holds folders of image sets, each with class folders. No pretrained ViT comes with pip, so one
of 0.8 million parameters is taught the classes of three tuning sets first (48 px, about a
minute of one core). 5-way 5-shot tasks of three other tuning sets then decide: mean accuracy over
their tasks, and the difference to the untouched network with a 95 % interval over the same tasks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from mivhead import Preprocessing
from mivhead.backbones import from_module
from mivhead.extraction.cache import content_hash
from mivhead.fewshot import load_pixels, network_of
from mivhead.images.augmentation import augment, plan_views, view_seed
from mivhead.images.sources import open_labelled
from mivhead.methods import make_tuner

BASE = ("plantvillage_cropdisease", "cifar10", "dtd_textures10")
VALIDATION = ("eurosat", "gtsrb_traffic_signs", "omniglot")
SIZE, WAYS, SHOTS, QUERIES, THRESHOLD = 48, 5, 5, 10, 15
RATES, STEPS = (1e-3, 3e-3, 1e-2), (20,)
UPDATES, BATCH, PER_CLASS = 200, 64, 60
PREPROCESSING = Preprocessing(size=SIZE)

Arrays = np.ndarray[Any, Any]


def read(folder: Path, per_class: int, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Pixels and labels of some images of every class."""
    images = open_labelled(folder)
    labels = np.asarray(images.labels)
    rows = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == name))[:per_class] for name in images.classes]
    )
    pixels, _ = load_pixels(images.take(rows.tolist()), SIZE)
    return pixels, labels[rows]


def train_vit(data: Path, seed: int) -> nn.Module:
    """Teach a small ViT all classes of the base sets at once."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    parts = [read(data / name, PER_CLASS, rng) for name in BASE]
    names = [f"{name}/{label}" for name, (_, ys) in zip(BASE, parts, strict=True) for label in ys]
    pixels = np.concatenate([x for x, _ in parts])
    classes, y = np.unique(names, return_inverse=True)
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


def tasks(folder: Path, count: int, seed: int) -> list[tuple[Arrays, Arrays, Arrays, Arrays]]:
    """Support and queries of some tasks."""
    images = open_labelled(folder)
    labels = np.asarray(images.labels)
    found = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        large = [n for n in images.classes if (labels == n).sum() > SHOTS]
        chosen = rng.choice(large, WAYS, replace=False)
        rows = [rng.permutation(np.flatnonzero(labels == n))[: SHOTS + QUERIES] for n in chosen]
        support, queries = (
            np.concatenate([r[part] for r in rows]) for part in (slice(SHOTS), slice(SHOTS, None))
        )
        X, _ = load_pixels(images.take(support.tolist()), SIZE)
        Q, _ = load_pixels(images.take(queries.tolist()), SIZE)
        found.append((X, labels[support], Q, labels[queries]))
    return found


def accuracy(backbone: Any, task: tuple[Arrays, Arrays, Arrays, Arrays], **params: Any) -> float:
    """Share of queries that are right after tuning."""
    X, y, Q, truth = task
    views, rows = None, None
    if params.get("use_views"):
        rows, numbers, seed = plan_views(y.tolist(), THRESHOLD)
        pictures = [Image.fromarray(x) for x in X]
        contents = [content_hash(picture) for picture in pictures]
        made = [
            augment(pictures[row], SIZE, view_seed(seed, contents[row], int(number)))
            for row, number in zip(rows, numbers, strict=True)
        ]
        views = np.stack([np.asarray(view) for view in made])
    tuner = make_tuner("ln-tune", verbose=False, **params)
    tuner.fit(network_of(backbone, "ln-tune"), X, y, views=views, view_of=rows)
    return float((tuner.predict(Q) == truth).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("MIV_DATA"))
    parser.add_argument("--tasks", type=int, default=3, help="of each set")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data DIR, or the variable MIV_DATA")
    data = Path(args.data)
    model = train_vit(data, args.seed)
    backbone = from_module(model, ["norm"], name="small ViT", preprocessing=PREPROCESSING)
    every = [task for name in VALIDATION for task in tasks(data / name, args.tasks, args.seed)]
    plain: Arrays = np.array([])

    def row(title: str, **params: Any) -> float:
        nonlocal plain
        scores = np.array([accuracy(backbone, task, **params) for task in every])
        plain = scores if not len(plain) else plain
        gain = scores - plain
        half = 1.96 * gain.std() / np.sqrt(len(gain))
        sets = " | ".join(f"{100 * part.mean():.1f}" for part in np.split(scores, len(VALIDATION)))
        print(
            f"| {title} | {sets} | {100 * scores.mean():.1f} | {100 * gain.mean():+.1f} "
            f"± {100 * half:.1f} |",
            flush=True,
        )
        return float(scores.mean())

    print(f"| setting | {' | '.join(VALIDATION)} | mean | gain |\n|---|{'---|' * 5}")
    row("untouched", steps=0, use_views=False)
    means = {r: row(f"rate {r}", learning_rate=r, use_views=False) for r in RATES}
    best = max(means, key=lambda rate: means[rate])
    for steps in STEPS:
        title = f"rate {best}, {steps} steps"
        row(title, learning_rate=best, steps=steps, use_views=False)
    row(f"rate {best}, views", learning_rate=best, use_views=True)


if __name__ == "__main__":
    main()
