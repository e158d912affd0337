"""Which activations of a backbone to tap, and at which sizes: a measured choice.

    python benchmarks/presets.py --data DIR --results presets.jsonl --tasks 5
    python benchmarks/presets.py --data DIR --results presets.jsonl --variants head,exp4+head:paper
    python benchmarks/presets.py --data DIR --results presets.jsonl --backbone resnet50 \
        --weights resnet50.safetensors --variants layer3+layer4:paper,layer4:native,logistic

`--data` is a folder that holds the sets as folders of class folders, or zips of them. The MIV-head
is trained with recipe "paper" on 10-way 5-shot tasks; prints Markdown tables. The choice is made
on the eight tuning sets only; `--sets confirmation` checks it. With EfficientNet-Lite0 a fit takes
0.5 to 6 seconds of one core, with `--views yes` 2 to 12. The tables and the choices are in
docs/results/presets.md and docs/results/preset-variants.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _backbones import Subject, efficientnet_lite, keras_resnet50
from _methods import Centroid, Logistic, Method, Miv, describe
from _runs import Scores, arguments, markdown, mean_over_sets, paired, run
from mivhead import BlockPreset, Preset
from mivhead.head.recipe import default_pool_sizes

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
LARGE = 28  # maps of this side and above have no pooled candidates, but by the rule


def one(side: int, _: int | None) -> Sizes:
    """One size in the middle: 14 gives 9."""
    return (round(0.65 * side),) if side < LARGE else ()


def paper(side: int, _: int | None) -> Sizes:
    """As many as the paper has for ResNet-50, down to half the map: 14 gives 13, 11, 9, 8."""
    return rule(side, side // 2) if side < LARGE else ()


def rule(side: int, deeper: int | None) -> Sizes:
    """Derive them as the library does for a backbone without a preset."""
    return default_pool_sizes((side, side), None if deeper is None else (deeper, deeper))


# Max-pooled candidates beside the native map.
POOLED = {"native": lambda _, __: (), "one": one, "paper": paper, "rule": rule}
PLAIN = ("centroid", "logistic")


def make_preset(subject: Subject, name: str) -> Preset:
    """Make a preset from a name such as `head` or `head:paper`."""
    taps_name, _, pooled = name.partition(":")
    taps = (RESNET_VARIANTS if subject.name.startswith(RESNET50) else LITE_VARIANTS)[taps_name]
    sizes = POOLED[pooled or "one"]
    sides = [subject.shapes[tap][1] for tap in taps]
    blocks = (BlockPreset(sizes(*pair)) for pair in zip(sides, [*sides[1:], None], strict=True))
    return Preset(taps, tuple(blocks), subject.preprocessing)


def make_method(subject: Subject, name: str, *, views: bool) -> Method:
    """Make what a variant's name means: the MIV-head with a preset, or a plain head."""
    kind, _, setting = name.partition(":")
    if kind == "centroid":
        return Centroid(views, (subject.plain,))
    if kind == "logistic":
        return Logistic(float(setting or 10), views, (subject.plain,))
    return Miv(make_preset(subject, name), views)


def row(name: str, scores: Scores, key: str, first: str) -> list[str]:
    mean, width = mean_over_sets(scores, key)
    seconds = sum(by_method[key].seconds for by_method in scores.values()) / len(scores)
    figures = [str(by_method[key]) for by_method in scores.values()]
    difference, p = paired(scores.values(), key, first)
    gain = "" if key == first else f"{difference:+.1f} (p = {p:.2g})"
    return [name, *figures, f"**{mean:.1f}** ± {width:.1f}", gain, f"{seconds:.1f}"]


def parse() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0], "tuning")
    parser.add_argument("--backbone", choices=(*LITE, RESNET50), default=LITE[0])
    parser.add_argument(
        "--weights",
        type=Path,
        help="the file of resnet50's weights (see _backbones.py), or random for untrained ones",
    )
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        help=f"with commas between: {', '.join(LITE_VARIANTS)}, or for resnet50 "
        f"{', '.join(RESNET_VARIANTS)}; each may end in a colon and which pooled candidates it "
        f"has, {', '.join(POOLED)} (default: one). {' and '.join(PLAIN)} are plain heads on the "
        "average of the deepest map; the latter may end in a colon and its C (default: 10). The "
        "others are compared with the first (default: all with pooled candidates)",
    )
    parser.add_argument("--views", choices=("no", "yes", "both"), default="no")
    args = parser.parse_args()
    if (args.backbone == RESNET50) != (args.weights is not None):
        parser.error(f"--weights belongs to --backbone {RESNET50}, which needs it")
    return args


def main() -> None:
    args = parse()
    resnet = args.backbone == RESNET50
    subject = keras_resnet50(args.weights) if resnet else efficientnet_lite(args.backbone)
    names = args.variants or list(RESNET_VARIANTS if resnet else LITE_VARIANTS)
    choices = {"no": (False,), "yes": (True,), "both": (False, True)}[args.views]
    methods = {(n, v): make_method(subject, n, views=v) for v in choices for n in names}
    scores = run(subject, list(methods.values()), args)

    def shape(tap: str) -> str:
        channels, side = subject.shapes[tap]
        return f"{channels}x{side}x{side}"

    heads = {name: methods[name, choices[0]] for name in names}
    rows = [
        [name, f"`{describe(m.preset)}`", " + ".join(map(shape, m.taps))]
        for name, m in heads.items()
        if isinstance(m, Miv)
    ]
    print("\n" + markdown(["variant", "taps [sizes], shallow to deep", "maps"], rows))
    for views in choices:
        print(f"\n{'With' if views else 'Without'} views, {args.tasks} tasks a set:\n")
        first = methods[names[0], views].key
        rows = [row(name, scores, methods[name, views].key, first) for name in names]
        print(markdown(["variant", *args.sets, "mean", "minus first", "s per fit"], rows))


if __name__ == "__main__":
    main()
