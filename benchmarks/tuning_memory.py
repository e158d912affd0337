"""Memory and time of methods that tune the backbone, on a large task of 84 px images.

    python benchmarks/tuning_memory.py --method tsa

500 images of 50 classes, a ResNet-18, two steps. The images are noise and the weights random:
neither changes what is computed. One method per process, because the peak is that of the process.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch
from torchvision.models import resnet18

from mivhead import Preprocessing
from mivhead.backbones import from_module
from mivhead.methods import make_method
from mivhead.model.readers import network_of

SIZE, CLASSES, SHOTS, STEPS = 84, 50, 10, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=("tsa", "finetune"), default="tsa")
    parser.add_argument("--images-at-once", type=int, help="default: the method's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backbone = from_module(
        resnet18(), ["layer4"], name="resnet18", preprocessing=Preprocessing(size=SIZE)
    )
    images = np.random.default_rng(0).integers(
        0, 256, (CLASSES * SHOTS, SIZE, SIZE, 3), dtype=np.uint8
    )
    labels = np.repeat(np.arange(CLASSES), SHOTS)
    times = [time.process_time()]
    for steps in (0, STEPS):
        tuner = make_method(args.method, steps=steps, images_at_once=args.images_at_once)
        tuner.attach(network_of(backbone, args.method)).fit(images, labels)
        times.append(time.process_time())
    fixed, whole = np.diff(times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kB on Linux
    print(f"{args.method}: peak memory of the process {peak:.2f} GiB")
    print(f"{(whole - fixed) / STEPS:.1f} s per step on one core, plus {fixed:.1f} s")


if __name__ == "__main__":
    main()
