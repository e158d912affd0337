"""`miv bench plot`: drawings of how a MIV-head classifies one image."""

from __future__ import annotations

from typing import Any

import click

from mivhead.cli import options
from mivhead.cli.options import load_model
from mivhead.cli.output import Output
from mivhead.errors import InputError
from mivhead_bench.cli.data import DATA
from mivhead_bench.figures.episode import draw_episode
from mivhead_bench.figures.plots import Case

TSNE_EXAMPLES = """
miv bench plot tsne birds.miv new.jpg -o tsne.png
miv bench plot tsne birds.miv new.jpg --truth robin --seed 3 -o tsne.pdf
"""
ATTENTION_EXAMPLES = """
miv bench plot attention birds.miv new.jpg -o attention.png
"""
EPISODE_EXAMPLES = """
miv bench plot episode aircraft --data sets/ -o aircraft.pdf
miv bench plot episode omniglot --data sets/ --backbone dino_vits16 --compare ett -o omniglot.pdf
"""

MODEL = click.argument("model", help="Model file.")
IMAGE = click.argument("image", help="One image.")
OUTPUT = click.option(
    "-o",
    "--output",
    required=True,
    type=options.output_file(".png", ".svg", ".pdf"),
    help="Picture to write: .png, .svg or .pdf.",
)
SEED = click.option("--seed", type=options.NOT_NEGATIVE, default=0, help="Random seed.")


@click.group
def plot() -> None:
    """Draw how a MIV-head classifies one image."""


@options.command(TSNE_EXAMPLES)
@MODEL
@IMAGE
@OUTPUT
@click.option("--truth", metavar="CLASS", help="True class of the image; colours the star.")
@SEED
@options.backbone
def tsne(
    out: Output,
    model: str,
    image: str,
    output: str,
    truth: str | None,
    seed: int,
    backbone: dict[str, Any],
) -> None:
    """Draw shots, prototypes and the image on a plane, by t-SNE.

    One panel per block shows the vectors that the head compares: shots are circles, prototypes
    squares, the image a star. Another panel shows what a nearest-centroid classifier compares.
    """
    case = Case(load_model(model, out, **backbone), image)
    case.plot_tsne(output, truth=truth, seed=seed)
    _done(out, case, image, output)


@options.command(ATTENTION_EXAMPLES)
@MODEL
@IMAGE
@OUTPUT
@options.backbone
def attention(out: Output, model: str, image: str, output: str, backbone: dict[str, Any]) -> None:
    """Draw which patches and shots the head attends to, block by block."""
    case = Case(load_model(model, out, **backbone), image)
    case.plot_attention(output)
    _done(out, case, image, output)


def _done(out: Output, case: Case, image: str, output: str) -> None:
    document = {"file": output, "image": image, "label": str(case.prediction.label)}
    out.report(document | {"probability": case.prediction.probability}, f"Saved {output}.")


@options.command(EPISODE_EXAMPLES)
@click.argument("name", metavar="SET", help="Data set, such as aircraft or omniglot.")
@DATA
@OUTPUT
@click.option("--backbone", default="resnet50", metavar="NAME", help="As for `miv bench run`.")
@click.option("--weights", metavar="FILE", help="Checkpoint of the backbone.")
@click.option(
    "--compare",
    default="tsa",
    metavar="METHOD",
    help="Method that tunes the backbone, or none for nearest centroids.",
)
@click.option("--protocol", default="varying", metavar="NAME", help="As for `miv bench run`.")
@click.option("--task", type=options.NOT_NEGATIVE, default=0, help="Number of the task, from 0.")
@click.option("--query", type=options.NOT_NEGATIVE, default=0, help="Number of its query, from 0.")
@SEED
def episode(
    out: Output, name: str, data: str | None, output: str, compare: str, **how: Any
) -> None:
    """Draw the paper's t-SNE figure of one episode.

    Samples a task of a data set, fits the MIV-head with the paper's recipe and a method that tunes
    the backbone, and draws the vectors that both compare for one query.
    """
    if data is None:
        raise InputError("Name the folder of your data sets with --data.")
    draw_episode(name, data, output, compare=None if compare == "none" else compare, **how)
    out.report({"file": output, "set": name} | how, f"Saved {output}.")


for command in (tsne, attention, episode):
    plot.add_command(command)
