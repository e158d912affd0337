"""Which activations of EfficientNet-Lite0 to tap, and at which sizes: a measured choice.

    python benchmarks/presets.py --data DIR --results presets.jsonl --tasks 5
    python benchmarks/presets.py --data DIR --results presets.jsonl --variants head,exp4+head:paper

`--data` is a folder that holds the sets as folders of class folders, or zips of them. The MIV-head
is trained with recipe "paper" on 10-way 5-shot tasks; prints Markdown tables. The choice is made
on the eight tuning sets only; `--sets confirmation` checks it. A fit takes 0.5 to 6 seconds of one
core, with `--views yes` 2 to 12. The tables and the choice are in docs/results/presets.md.
"""

from __future__ import annotations

from _methods import Miv, describe
from _runs import Score, arguments, markdown, mean_over_sets, run
from _tasks import BACKBONE, TAPS
from mivhead import BlockPreset, Preset
from mivhead.backbones.presets import PRESETS

# "stage" is a stage's output (not activated), "exp" the activated expansion of that output by the
# next block, "dw" the activated depthwise output in the stage's last block (timm's
# feature_location="expansion"), "head" the activated map after the last convolution.
VARIANTS = {
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

# Max-pooled candidates beside the native map, by its side: none, one, or as many as the paper has
# for ResNet-50.
POOLED = {
    "native": {28: (), 14: (), 7: ()},
    "one": {28: (), 14: (9,), 7: (5,)},
    "paper": {28: (), 14: (13, 11, 9, 8), 7: (6, 5, 4)},
}


def make_preset(name: str) -> Preset:
    """Make a preset from a name such as `head` or `head:paper`."""
    taps_name, _, pooled = name.partition(":")
    taps = VARIANTS[taps_name]
    sizes = POOLED[pooled or "one"]
    blocks = [BlockPreset(pool_sizes=sizes[int(TAPS[tap].split("x")[-1])]) for tap in taps]
    return Preset(taps, tuple(blocks), PRESETS[BACKBONE].preprocessing)


def row(name: str, scores: dict[str, dict[str, Score]], key: str) -> list[str]:
    mean, width = mean_over_sets(scores, key)
    seconds = sum(by_method[key].seconds for by_method in scores.values()) / len(scores)
    figures = [str(by_method[key]) for by_method in scores.values()]
    return [name, *figures, f"**{mean:.1f}** ± {width:.1f}", f"{seconds:.1f}"]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "tuning")
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help=f"with commas between: {', '.join(VARIANTS)}; each may end in a colon and which "
        f"pooled candidates it has, {', '.join(POOLED)} (default: one)",
    )
    parser.add_argument("--views", choices=("no", "yes", "both"), default="no")
    args = parser.parse_args()
    presets = {name: make_preset(name) for name in args.variants}
    choices = {"no": (False,), "yes": (True,), "both": (False, True)}[args.views]
    scores = run([Miv(preset, views) for views in choices for preset in presets.values()], args)

    print(
        "\n"
        + markdown(
            ["variant", "taps [sizes], shallow to deep", "maps"],
            [
                [name, f"`{describe(preset)}`", " + ".join(TAPS[tap] for tap in preset.taps)]
                for name, preset in presets.items()
            ],
        )
    )
    for views in choices:
        print(f"\n{'With' if views else 'Without'} views, {args.tasks} tasks a set:\n")
        rows = [row(name, scores, Miv(preset, views).key) for name, preset in presets.items()]
        print(markdown(["variant", *args.sets, "mean", "s per fit"], rows))


if __name__ == "__main__":
    main()
