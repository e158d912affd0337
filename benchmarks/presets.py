r"""Which activations of a backbone to tap, and at which sizes: a measured choice.

    python benchmarks/presets.py --data DIR -o RUN --tasks 5
    python benchmarks/presets.py --data DIR -o RUN --variants head,exp4+head:paper
    python benchmarks/presets.py --data DIR -o RUN --backbone resnet50 \
        --weights resnet50.safetensors --variants layer3+layer4:paper,layer4:native

Every variant is the backbone with another preset; the MIV-head is trained with recipe "paper" on
10-way 5-shot tasks. Writes RUN/report and prints each variant's difference from the first one. The
choice is made on the eight tuning sets; `--sets confirmation` confirms it. With EfficientNet-Lite0
a fit takes 0.5 to 6 seconds on one core, with `--views 3` 2 to 12. The results are discussed in
docs/research-log.md#taps-and-presets.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _backbones import Subject, efficientnet_lite, keras_resnet50
from _bench import arguments, measure, names
from mivhead import BlockPreset, Preset
from mivhead.benchmark.compare import Side, pair
from mivhead.benchmark.report.formats import p_value
from mivhead.head.blocks import default_pool_sizes

RESNET50 = "resnet50"
LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")

# In an EfficientNet-Lite, "stage" is a stage's output (not activated), "exp" the activated
# expansion of that output by the next block, "dw" the activated depthwise output in the stage's
# last block (that of Lite0; timm's feature_location="expansion"), "head" the activated map after
# the last convolution.
LITE_VARIANTS = {
    "stage4+stage6": ("blocks.4", "blocks.6"),
    "stage6": ("blocks.6",),
    "stage5+stage6": ("blocks.5", "blocks.6"),
    "stage4+stage5+stage6": ("blocks.4", "blocks.5", "blocks.6"),
    "stage4+stage6+head": ("blocks.4", "blocks.6", "bn2"),
    "stage5+stage6+head": ("blocks.5", "blocks.6", "bn2"),
    "stage4+stage5+stage6+head": ("blocks.4", "blocks.5", "blocks.6", "bn2"),
    "stage4+head": ("blocks.4", "bn2"),
    "head": ("bn2",),
    "dw4+head": ("blocks.4.2.bn2", "bn2"),
    "exp4+head": ("blocks.5.0.bn1", "bn2"),
    "exp4+dw6": ("blocks.5.0.bn1", "blocks.6.0.bn2"),
    "exp3+head": ("blocks.4.0.bn1", "bn2"),
    "stage2+exp4+head": ("blocks.2", "blocks.5.0.bn1", "bn2"),
    "exp3+exp4+head": ("blocks.4.0.bn1", "blocks.5.0.bn1", "bn2"),
}
RESNET_VARIANTS = {
    "layer3+layer4": ("layer3", "layer4"),
    "layer4": ("layer4",),
    "layer2+layer3+layer4": ("layer2", "layer3", "layer4"),
}

Sizes = tuple[int, ...]
LARGE = 28  # maps of this side and above have no pooled candidates, except by the rule


def one(side: int, _: int | None) -> Sizes:
    """One size in the middle: 14 gives 9."""
    return (round(0.65 * side),) if side < LARGE else ()


def paper(side: int, _: int | None) -> Sizes:
    """As many as the paper has for ResNet-50, down to half the map: 14 gives 13, 11, 9, 8."""
    return rule(side, side // 2) if side < LARGE else ()


def rule(side: int, deeper: int | None) -> Sizes:
    """Derive them as the library does for a backbone without a preset."""
    return default_pool_sizes((side, side), None if deeper is None else (deeper, deeper))


# Max-pooled candidates in addition to the native map.
POOLED = {"native": lambda _, __: (), "one": one, "paper": paper, "rule": rule}


def make_preset(subject: Subject, name: str) -> Preset:
    """Make a preset from a name such as `head` or `head:paper`."""
    taps_name, _, pooled = name.partition(":")
    taps = (RESNET_VARIANTS if subject.name.startswith(RESNET50) else LITE_VARIANTS)[taps_name]
    sizes = POOLED[pooled or "one"]
    sides = [subject.shapes[tap][1] for tap in taps]
    blocks = (BlockPreset(sizes(*pair_)) for pair_ in zip(sides, [*sides[1:], None], strict=True))
    return Preset(taps, tuple(blocks), subject.preprocessing)


def describe(preset: Preset) -> str:
    """Taps and the sizes of their candidates, of which "n" is the native map: `bn2[n,6,5,4]`."""
    parts = []
    for tap, block in zip(preset.taps, preset.blocks, strict=True):
        sizes = ["n"] * block.native + [str(size) for size in block.pool_sizes]
        parts.append(f"{tap}[{','.join(sizes)}]")
    return "+".join(parts)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0], sets="tuning", views=0)
    parser.add_argument("--backbone", choices=(*LITE, RESNET50), default=LITE[0])
    parser.add_argument(
        "--weights",
        type=Path,
        help="the file of resnet50's weights (see _backbones.py), or random for untrained ones",
    )
    parser.add_argument(
        "--variants",
        type=names,
        help=f"separated by commas: {', '.join(LITE_VARIANTS)}, or for resnet50 "
        f"{', '.join(RESNET_VARIANTS)}; each may end in a colon and the kind of pooled candidates, "
        f"{', '.join(POOLED)}, which is `one` if not given. The others are compared with the first",
    )
    args = parser.parse_args()
    if (args.backbone == RESNET50) != (args.weights is not None):
        parser.error(f"--weights belongs to --backbone {RESNET50}, which needs it")
    return args


def main() -> None:
    args = parse()
    resnet = args.backbone == RESNET50
    subject = keras_resnet50(args.weights) if resnet else efficientnet_lite(args.backbone)
    variants = args.variants or tuple(RESNET_VARIANTS if resnet else LITE_VARIANTS)
    presets = {name: make_preset(subject, name) for name in variants}
    results = measure(
        {"backbones": list(variants), "methods": [{"name": "miv", "recipe": "paper"}]},
        args,
        {name: subject.load(preset) for name, preset in presets.items()},
    )
    sides = {n: Side(n, tuple(r for r in results if r.backbone == n)) for n in variants}
    for name, preset in presets.items():
        maps = ["{0}x{1}x{1}".format(*subject.shapes[tap]) for tap in preset.taps]
        print(f"\n{name}: {describe(preset)}, maps {' + '.join(maps)}")
        for row in pair(sides[name], sides[variants[0]]) if name != variants[0] else ():
            difference = f"{row.paired.difference.signed}, Holm p {p_value(row.holm)}"
            print(f"  {row.set}: {row.first}, minus {variants[0]}: {difference}")


if __name__ == "__main__":
    main()
