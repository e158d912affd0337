"""From the paper's recipe to `mivhead`, one change at a time, on the same tasks.

    python benchmarks/recipe.py --data DIR -o RUN [--protocol "10-way 5-shot"] [--tasks 3]
    miv bench report RUN

Every variant is a `Recipe`; those named `without-...` leave a kind of expert out. Runs in one
process and one thread, and resumes when it is started again: the eight tuning sets with three tasks
each take about half an hour. Figures: docs/explanation/the-recipe.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from _bench import TUNING
from mivhead.benchmark.config import read_config
from mivhead.benchmark.live import LiveView
from mivhead.benchmark.runner import Place, run
from mivhead.ensemble import ridge as experts
from mivhead.features import Block
from mivhead.head.recipe import RECIPES

PAPER, OURS = RECIPES["paper"], RECIPES["mivhead"]
MASKED = replace(PAPER, self_mask=True)
BLOCKS = replace(OURS, vote="logsumexp")
VARIANTS = {
    "paper": PAPER,
    "paper + self-mask": MASKED,
    "paper + identity": replace(PAPER, start="identity"),
    "paper + both": replace(MASKED, start="identity"),
    "blocks of mivhead, logsumexp": BLOCKS,
    "mivhead, weights as they start": replace(OURS, vote="prior"),
    "mivhead": OURS,
    "experts": RECIPES["experts"],
    "mivhead, joint loss": replace(OURS, objective="joint"),
    "mivhead, random start": replace(OURS, start="random"),
    "mivhead, no self-mask": replace(OURS, self_mask=False),
    "mivhead, eta 0.1": replace(OURS, eta=0.1),
    "mivhead, temperature 0.1": replace(OURS, temperature=0.1),
    "mivhead, 40 steps": replace(OURS, steps=40),
    "mivhead, 5 steps": replace(OURS, steps=5),
}
KINDS = ("second_order", "layout", "mean")


@contextmanager
def without(kind: str) -> Iterator[None]:
    """Leave a kind of expert out."""
    choose = experts.choose_experts

    def fewer(blocks: Sequence[Block], spans: Sequence[range] = ()) -> list[experts.Expert]:
        return [expert for expert in choose(blocks, spans) if expert.kind != kind]

    experts.choose_experts = fewer
    try:
        yield
    finally:
        experts.choose_experts = choose


def main() -> None:
    """Run the variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(TUNING))
    parser.add_argument("--protocol", default="10-way 5-shot")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--views", type=int, default=3)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--variants", help="some of them, separated by semicolons")
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = args.variants.split(";") if args.variants else list(VARIANTS)
    RECIPES.update(VARIANTS)

    def measure(methods: list[dict[str, str]]) -> None:
        config = read_config(
            {
                "sets": args.sets.split(","),
                "protocols": [args.protocol],
                "tasks": args.tasks,
                "views": args.views,
                "seed": args.seed,
                "methods": methods,
            }
        )
        run(config, Place(args.output, args.data, args.cache), view=LiveView())

    measure([{"name": name, "method": "miv", "recipe": name} for name in wanted])
    if not args.variants:
        for kind in KINDS:
            with without(kind):
                measure([{"name": f"without-{kind}", "method": "miv", "recipe": "mivhead"}])


if __name__ == "__main__":
    main()
