r"""TSA, which tunes the backbone, beside the heads, which do not: a real ResNet-50, 5-way 5-shot.

    python benchmarks/resnet50.py --data DIR --weights FILE -o RUN
    miv bench report RUN

Two sets, ten tasks each, all methods on the same tasks; goes on where it was when it is started
again. TSA takes several minutes of one core a task, so all of it takes about two hours; the heads
alone (`--methods miv,ncc`) take a few minutes. The tables are in docs/results/rivals.md.

The paper's ablations are ready-made tables of methods, which can be named instead (half an hour
of a core; docs/results/ablations.md):

    python benchmarks/resnet50.py --data DIR --weights FILE --tables \
        blocks,candidates,gap,cap,interactions,cap-parts,augmentation --views 1 --tasks 8 \
        --sets gtsrb_traffic_signs,cub200_birds,fgvc_aircraft,eurosat -o RUN

With a third block, for the table of N: `--preset resnet50_3blocks --tables blocks`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from _backbones import build_resnet50, keras_resnet50
from mivhead.backbones import from_module
from mivhead.backbones.paper import PAPER
from mivhead.benchmark.config import load_config, read_config
from mivhead.benchmark.live import LiveView
from mivhead.benchmark.runner import Place, run

NAME = "resnet50"
HEADS = (
    "miv",
    "miv-paper",
    "ncc",
    "baseline++",
    "fit-lda",
    "fit-qda",
    "fit-protonets",
    "logistic",
    "svm",
    "knn",
    "ridge",
    "tip-adapter",
)
SETS = ("gtsrb_traffic_signs", "cub200_birds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = os.environ.get("MIV_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None)
    parser.add_argument("--weights", type=Path, required=True, help="of the Keras ResNet-50")
    parser.add_argument("-o", "--output", type=Path, required=True, help="run folder")
    names = ",".join((*HEADS, "tsa"))
    parser.add_argument("--methods", default=names, help=f"with commas between (default: {names})")
    parser.add_argument("--tables", help="ready-made tables whose methods to run instead")
    parser.add_argument("--preset", default=NAME, help=f"of the paper's (default: {NAME})")
    # ceil(15 / 5) is as many as the paper's rule asks for
    parser.add_argument("--views", type=int, default=3, help="of each shot (default: 3)")
    parser.add_argument("--sets", default=",".join(SETS), help="with commas between")
    parser.add_argument("--tasks", type=int, default=10, help="tasks a set (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="cores to use (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    preset = PAPER[args.preset].preset
    backbone = from_module(
        build_resnet50(args.weights),  # not folded: TSA's adapters stand before the BatchNorms
        preset.taps,
        name=NAME,
        preprocessing=keras_resnet50(args.weights).preprocessing,
        blocks=preset.blocks,
        threshold=preset.threshold,
    )
    config = read_config(
        {
            "backbones": [NAME],
            "methods": args.methods.split(","),
            "sets": args.sets.split(","),
            "protocols": ["5-way 5-shot"],
            "tasks": args.tasks,
            "views": args.views,
        }
    )
    if args.tables:
        tables = [load_config(name) for name in args.tables.split(",")]
        methods = {method.name: method for table in tables for method in table.methods}
        blocks = len(preset.taps)
        fitting = [m for m in methods.values() if m.params.get("last_blocks", 0) <= blocks]
        config = replace(config, methods=tuple(fitting))
    place = Place(args.output, args.data, cache=args.output / "features")
    run(config, place, backbones={NAME: backbone}, view=LiveView())
    print(f"Done; `miv bench report {args.output}` writes the tables.")


if __name__ == "__main__":
    main()
