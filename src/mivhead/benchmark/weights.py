"""Which checkpoint belongs to which backbone of a run, from `--weights`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mivhead.backbones.presets import PAPER
from mivhead.benchmark.config import BackboneConfig
from mivhead.errors import InputError, check_one_of

RANDOM = "random"
SUFFIXES = (".safetensors", ".pth", ".pt", ".pth.tar", ".bin")


def assign_weights(
    backbones: Sequence[BackboneConfig], values: Sequence[str]
) -> tuple[BackboneConfig, ...]:
    """Assign checkpoints to backbones.

    Each value is `NAME=FILE`; a folder, in which a checkpoint has the name of its backbone or the
    one under which its authors publish it; `FILE`, if there is one backbone; or `random`.

    >>> assign_weights([BackboneConfig("dino_resnet50")], ["dino_resnet50=mine.pth"])[0].weights
    'mine.pth'
    """
    chosen: dict[str, str] = {}
    names = [backbone.name for backbone in backbones]
    for value in values:
        if value == RANDOM:
            chosen |= dict.fromkeys(names, RANDOM)
        elif Path(value).is_dir():
            chosen |= _find(backbones, Path(value))
        elif "=" in value and not Path(value).exists():
            name, _, file = value.partition("=")
            sources = {b.source: b.name for b in backbones}
            check_one_of("backbone of --weights", name, [*names, *sources])
            chosen[sources.get(name, name)] = file
        elif len(backbones) == 1:
            chosen[names[0]] = value
        else:
            raise InputError(
                f"--weights {value} may belong to any of {', '.join(names)}: write --weights "
                f"{names[0]}={value}, or choose one with --backbone."
            )
    return tuple(replace(b, weights=chosen.get(b.name, b.weights)) for b in backbones)


def file_names(backbone: BackboneConfig) -> list[str]:
    """Return the names by which a folder's checkpoint is recognised, the clearest first."""
    own = dict.fromkeys([backbone.name, backbone.source])
    known = PAPER.get(backbone.source)
    return [f"{n}{s}" for n in own for s in SUFFIXES] + list(known.files if known else ())


def _find(backbones: Sequence[BackboneConfig], folder: Path) -> dict[str, str]:
    found = {
        backbone.name: str(folder / file)
        for backbone in backbones
        for file in reversed(file_names(backbone))
        if (folder / file).is_file()
    }
    if not found:
        wanted = ", ".join(file_names(b)[0] for b in backbones)
        raise InputError(
            f"The folder {folder} holds no checkpoint of a backbone of this run. A checkpoint has "
            f"the name of its backbone, such as {wanted}, or the one under which its authors "
            "publish it."
        )
    return found
