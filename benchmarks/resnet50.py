r"""TSA, which tunes the backbone, against heads, which do not: a real ResNet-50, 5-way 5-shot.

    python benchmarks/resnet50.py --data DIR --weights FILE -o RUN

Two sets with ten tasks each, all methods on the same tasks; writes RUN/report and resumes when it
is started again. TSA takes several minutes per task on one core, so that everything takes about two
hours; the heads alone (`--methods miv,ncc`) take a few minutes. The tables are in
docs/research-log.md.

The methods of the paper's ablations can be run instead (half an hour on one core;
docs/research-log.md):

    python benchmarks/resnet50.py --data DIR --weights FILE --tables \
        blocks,candidates,gap,cap,interactions,cap-parts,augmentation --views 1 --tasks 8 \
        --sets gtsrb_traffic_signs,cub200_birds,fgvc_aircraft,eurosat -o RUN

With a third block, for the table of N: `--preset resnet50_3blocks --tables blocks`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from _backbones import build_resnet50, keras_resnet50
from _bench import arguments, measure, names
from mivhead.backbones import from_module
from mivhead.backbones.presets import PAPER
from mivhead.benchmark.config import load_config

NAME = "resnet50"
METHODS = (
    *("miv", "miv-paper", "ncc", "baseline++", "fit-lda", "fit-qda", "fit-protonets"),
    *("logistic", "svm", "knn", "ridge", "tip-adapter", "tsa"),
)
DEFAULTS = {
    "sets": ("gtsrb_traffic_signs", "cub200_birds"),
    "protocol": "5-way 5-shot",
}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], **DEFAULTS)
    parser.add_argument("--weights", type=Path, required=True, help="of the Keras ResNet-50")
    parser.add_argument("--methods", type=names, default=METHODS, help="separated by commas")
    parser.add_argument("--tables", type=names, help="ready-made tables whose methods to run")
    parser.add_argument("--preset", default=NAME, help="one of the paper's")
    parser.add_argument("--threads", type=int, default=1, help="cores to use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    preset = PAPER[args.preset].preset
    backbone = from_module(
        build_resnet50(args.weights),  # not folded: TSA's adapters precede the BatchNorms
        preset.taps,
        name=NAME,
        preprocessing=keras_resnet50(args.weights).preprocessing,
        blocks=preset.blocks,
        threshold=preset.threshold,
    )
    methods = list(args.methods)
    if args.tables:
        entries = [
            {**method, "backbones": []}  # on ours, whatever backbones the table has
            for table in args.tables
            for method in load_config(table).as_json()["methods"]
        ]
        blocks = len(preset.taps)
        fitting = [m for m in entries if m["params"].get("last_blocks", 0) <= blocks]
        methods = list({m["name"]: m for m in fitting}.values())
    measure({"backbones": [NAME], "methods": methods}, args, {NAME: backbone})


if __name__ == "__main__":
    main()
