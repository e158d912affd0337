"""Makes the background vectors of the default backbone: procedural images through the backbone.

The images are computed here, from random numbers: clouds, coloured noise, dead leaves, gratings,
strokes, shapes, Voronoi cells and Julia sets. Nobody holds rights in them, and none of them shows
anything that a user would have a class of. Only their mean vectors are shipped.

    cd src/mivhead/backbones
    python ../../../benchmarks/background.py -o background_efficientnet_lite0.safetensors
    python ../../../benchmarks/background.py --sheet sheet.png    # look at them

It takes about ten seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from mivhead._util import files
from mivhead.backbones import load_backbone
from mivhead.ensemble.descriptors import mean_vectors
from mivhead.features import Features

SIZE = 224
COUNT = 240
BATCH = 16

Pixels = NDArray[np.float64]  # (row, column, channel), 0 to 255


def palette(rng: np.random.Generator, count: int) -> Pixels:
    """Related colours."""
    base = rng.uniform(0, 255, 3)
    return np.clip(base + rng.normal(0, rng.uniform(20, 110), (count, 3)), 0, 255)


def colour(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in np.clip(values, 0, 255))


def noise(rng: np.random.Generator, alpha: float) -> Pixels:
    """Noise with a power spectrum of 1 / f^(2 alpha)."""
    frequency = np.fft.fftfreq(SIZE)
    radius = np.hypot(*np.meshgrid(frequency, frequency))
    radius[0, 0] = 1 / SIZE
    z = np.fft.ifft2(np.fft.fft2(rng.normal(size=(SIZE, SIZE))) / radius**alpha).real
    return (z - z.mean()) / z.std()


def cloud(rng: np.random.Generator) -> Pixels:
    count = int(rng.integers(2, 5))
    colours = palette(rng, count)
    q = np.clip((noise(rng, rng.uniform(0.5, 2.2)) + 2) / 4, 0, 1) * (count - 1)
    i = np.minimum(q.astype(int), count - 2)
    t = (q - i)[..., None]
    return colours[i] * (1 - t) + colours[i + 1] * t


def coloured_noise(rng: np.random.Generator) -> Pixels:
    alpha = rng.uniform(0.3, 1.6)
    channels = np.stack([noise(rng, alpha) for _ in range(3)], -1)
    return rng.uniform(60, 200, 3) + channels * rng.uniform(15, 60)


def leaves(rng: np.random.Generator) -> Pixels:
    image = Image.new("RGB", (SIZE, SIZE))
    draw = ImageDraw.Draw(image)
    largest, colours, kind = rng.uniform(20, 90), palette(rng, 8), rng.integers(3)
    for _ in range(rng.integers(60, 500)):
        r = min(largest, 3 / max(rng.uniform(), 1e-3) + 2)
        x, y = rng.uniform(0, SIZE, 2)
        fill = colour(colours[rng.integers(8)] + rng.normal(0, 15, 3))
        if kind == 2:
            angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 7)))
            draw.polygon([(x + r * np.cos(a), y + r * np.sin(a)) for a in angles], fill=fill)
        else:
            flat = r * rng.uniform(0.3, 1)
            box = [x - r, y - flat, x + r, y + flat]
            (draw.ellipse if kind else draw.rectangle)(box, fill=fill)
    return np.asarray(image, float)


def grating(rng: np.random.Generator) -> Pixels:
    y, x = np.mgrid[:SIZE, :SIZE]
    angle, frequency = rng.uniform(0, np.pi), rng.uniform(2, 40) / SIZE
    along, across = np.cos(angle), np.sin(angle)
    bent = noise(rng, 2.0) * rng.uniform(0, 1.5)
    z = np.sin(2 * np.pi * frequency * (x * along + y * across) + bent)
    if rng.uniform() < 0.5:
        z = z * np.sin(2 * np.pi * frequency * (x * across - y * along))
    if rng.uniform() < 0.5:
        z = np.sign(z)
    first, second = palette(rng, 2)
    weight = (z[..., None] + 1) / 2
    return first * weight + second * (1 - weight)


def strokes(rng: np.random.Generator) -> Pixels:
    paper, ink = rng.uniform(220, 255, 3), rng.uniform(0, 80, 3)
    if rng.uniform() < 0.3:
        paper, ink = ink, paper
    image = Image.new("RGB", (SIZE, SIZE), colour(paper))
    draw = ImageDraw.Draw(image)
    width = int(rng.integers(2, 14))
    for _ in range(rng.integers(1, 7)):
        place, angle, curl = rng.uniform(30, SIZE - 30, 2), rng.uniform(0, 6), rng.normal(0, 0.15)
        points = [tuple(place)]
        for _ in range(rng.integers(4, 30)):
            angle += curl + rng.normal(0, 0.2)
            place = place + 8 * np.array([np.cos(angle), np.sin(angle)])
            points.append(tuple(place))
        draw.line(points, fill=colour(ink), width=width, joint="curve")
    return np.asarray(image, float)


def shapes(rng: np.random.Generator) -> Pixels:
    ground = leaves(rng) if rng.uniform() < 0.3 else cloud(rng)
    image = to_image(ground).filter(ImageFilter.GaussianBlur(rng.uniform(0, 8)))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(1, 4)):
        r, (x, y), sides = rng.uniform(25, 80), rng.uniform(50, SIZE - 50, 2), rng.integers(2, 9)
        fill, line = colour(rng.uniform(0, 255, 3)), colour(rng.uniform(0, 255, 3))
        if sides == 2:
            draw.ellipse([x - r, y - r, x + r, y + r], fill=fill, outline=line, width=5)
        else:
            angles = rng.uniform(0, 6) + 2 * np.pi * np.arange(sides) / sides
            corners = [(x + r * np.cos(a), y + r * np.sin(a)) for a in angles]
            draw.polygon(corners, fill=fill, outline=line)
    return np.asarray(image, float)


def cells(rng: np.random.Generator) -> Pixels:
    points = rng.uniform(0, SIZE, (rng.integers(8, 120), 2))
    y, x = np.mgrid[:SIZE, :SIZE]
    distances = np.hypot(x[..., None] - points[:, 0], y[..., None] - points[:, 1])
    pixels = palette(rng, len(points))[distances.argmin(-1)]
    two = np.partition(distances, 1, axis=-1)
    pixels[two[..., 1] - two[..., 0] < rng.uniform(0, 4)] = rng.uniform(0, 255, 3)
    return pixels


def julia(rng: np.random.Generator) -> Pixels:
    y, x = np.mgrid[-1.4 : 1.4 : SIZE * 1j, -1.4 : 1.4 : SIZE * 1j]
    z = (x + 1j * y) * rng.uniform(0.4, 1.1) * np.exp(1j * rng.uniform(0, 6))
    c, steps = 0.7885 * np.exp(1j * rng.uniform(0, 6.28)), np.zeros((SIZE, SIZE), int)
    for _ in range(40):
        inside = abs(z) < 4
        z = np.where(inside, z * z + c, z)
        steps += inside
    colours = palette(rng, 41)
    return colours[np.argsort(colours.sum(1))][steps]


KINDS: list[Callable[[np.random.Generator], Pixels]] = [
    cloud,
    coloured_noise,
    leaves,
    grating,
    strokes,
    shapes,
    cells,
    julia,
]


def to_image(pixels: Pixels) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def background_image(number: int) -> Image.Image:
    """Draw image `number`: kinds in turn, some grey, some lit from one side, some blurred."""
    rng = np.random.default_rng([0, number])
    pixels = KINDS[number % len(KINDS)](rng)
    if rng.uniform() < 0.2:
        pixels = np.repeat(pixels.mean(-1, keepdims=True), 3, -1)
    if rng.uniform() < 0.3:
        y, x = np.mgrid[:SIZE, :SIZE] / SIZE - 0.5
        angle = rng.uniform(0, 6)
        pixels = pixels * (0.85 + 0.9 * (x * np.cos(angle) + y * np.sin(angle)))[..., None]
    image = to_image(pixels)
    blurred = rng.uniform() < 0.5
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 2.5))) if blurred else image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", help="safetensors file to write")
    parser.add_argument("--sheet", help="picture of the first 80 images to write")
    parser.add_argument("--backbone", default="efficientnet_lite0")
    args = parser.parse_args()
    images = [background_image(number) for number in range(COUNT)]
    if args.sheet:
        sheet = Image.new("RGB", (10 * 112, 8 * 112))
        for i, image in enumerate(images[:80]):
            sheet.paste(image.resize((112, 112)), (112 * (i % 10), 112 * (i // 10)))
        sheet.save(args.sheet)
    if args.output:
        backbone = load_backbone(args.backbone)
        parts = [backbone.extract(images[i : i + BATCH]) for i in range(0, COUNT, BATCH)]
        vectors = mean_vectors(Features.concat(parts).blocks[-1])
        identity = backbone.identity.as_json()
        files.write(args.output, {"vectors": vectors.to(torch.float16)}, {"backbone": identity})


if __name__ == "__main__":
    main()
