"""timm's architectures with weights: pretrained, from a checkpoint, or random where asked for."""

from __future__ import annotations

import difflib
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from mivhead.backbones.checkpoints import load_exactly, read_tensors
from mivhead.backbones.formats import to_timm
from mivhead.backbones.paper import PAPER
from mivhead.errors import InputError, NotAvailableError

RANDOM = "random"


def build(spec: str, weights: str | Path | None, size: int | None = None) -> nn.Module:
    """Build a network without its classifier.

    Parameters
    ----------
    spec
        `timm:NAME`, or a name of the paper.
    weights
        None for the pretrained ones, a checkpoint, or `"random"`.
    size
        Side of its input; None for the usual one.
    """
    known = PAPER.get(spec)
    name = known.model if known else spec.removeprefix("timm:")
    settings = _settings(name, size)
    if weights is None:
        return _pretrained(spec, name, settings)
    model = _untrained(name, settings)
    if spec == "sdl_resnet18":
        _change_stem(model)
    if weights != RANDOM:
        load_exactly(model, to_timm(read_tensors(weights), model), spec, str(weights))
    return model


def _settings(name: str, size: int | None) -> dict[str, Any]:
    """Check the name; say how to build the model for another input size than its own."""
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `timm.list_models()`."
        raise InputError(f"timm has no model {architecture!r}: {hint}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:
        tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
        raise InputError(
            f"timm has no weights {name!r}: known for {architecture} are {', '.join(tags)}."
        ) from None
    usual = config.input_size[1] if config else None
    fixed = config is not None and config.fixed_input_size
    return {"img_size": size} if fixed and size not in (None, usual) else {}


def _pretrained(spec: str, name: str, settings: dict[str, Any]) -> nn.Module:
    """Build the model with the weights that are in timm's cache or can be had from its hub."""
    import timm

    known = PAPER.get(spec)
    if known is not None and not known.on_hub:
        raise _missing(spec, "they are in no hub that is looked in")
    cached = _cached(name)
    if cached is None and not _hub_resolves():
        raise _missing(spec, f"not in {_cache_folder()}, and the hub cannot be reached")
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"file": cached}, **settings
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise _missing(spec, f"not in {_cache_folder()}, nor from the hub: {reason}") from error
    model.reset_classifier(0)  # type: ignore[operator]  # timm's models have it
    return model


def _missing(spec: str, reason: str) -> NotAvailableError:
    known = PAPER.get(spec)
    origin = f", such as {known.origin}" if known else ""
    return NotAvailableError(
        f"The weights of {spec} are missing ({reason}). Give a checkpoint{origin}, with "
        'weights="FILE" in Python or --weights FILE on the command line; FILE is a .safetensors '
        "or .pth file."
    )


def _cached(name: str) -> str | None:
    """Find the weights in the hub's cache, so that nothing is asked over the network."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id or config.custom_load:
        return None
    found = try_to_load_from_cache(config.hf_hub_id, config.hf_hub_filename or "model.safetensors")
    return found if isinstance(found, str) else None


def _cache_folder() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)


def _hub_resolves() -> bool:
    """Tell at once what the hub's client finds out in half a minute of retries."""
    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return True  # names are resolved elsewhere
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _untrained(name: str, settings: dict[str, Any]) -> nn.Module:
    """Build the model with the same random weights every time."""
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **settings)
    return model


def _change_stem(model: nn.Module) -> None:
    """Give a ResNet the stem of SDL-ResNet-18: 5x5, no pooling (84 px become 41, 21, 11, 6)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.conv1 = nn.Conv2d(3, 64, kernel_size=5, stride=2, padding=1, bias=False)
    model.maxpool = nn.Identity()
