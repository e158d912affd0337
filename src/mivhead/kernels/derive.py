"""Candidates of an image: its map, max-pooled to several sizes (`derive.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from mivhead.kernels.library import address, call, empty, library


class _Task(ctypes.Structure):
    _fields_ = (
        *((n, c_int64) for n in ("images", "channels", "height", "width", "candidates", "half")),
        *((n, c_int64) for n in ("image_step", "channel_step", "pixel_step")),
        *((n, c_void_p) for n in ("maps", "sizes", "patches", "norms", "scratch")),
    )


def takes(maps: Tensor) -> bool:
    """Whether there is a compiled function for such maps."""
    fitting = maps.device.type == "cpu" and maps.dtype in (torch.float16, torch.float32)
    return library() is not None and fitting


def derive(maps: Tensor, sizes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
    """Pool maps (image, channel, height, width): patches of each size, norms of all patches.

    Patches are (image, patch, channel), of the maps' precision; norms are (image, patch).
    """
    images, channels, height, width = maps.shape
    if height > 1 and width > 1 and maps.stride(2) != width * maps.stride(3):
        maps = maps.contiguous()  # now rows follow each other
    patches = [maps.new_empty(images, h * w, channels) for h, w in sizes]
    norms = empty(images, sum(h * w for h, w in sizes))
    scratch = empty(torch.get_num_threads(), height, width, channels)
    flat = (c_int64 * (2 * len(sizes)))(*(side for size in sizes for side in size))
    places = (c_void_p * len(sizes))(*map(address, patches))
    call(
        "derive",
        _Task(
            images=images,
            channels=channels,
            height=height,
            width=width,
            candidates=len(sizes),
            half=maps.dtype == torch.float16,
            image_step=maps.stride(0),
            channel_step=maps.stride(1),
            pixel_step=maps.stride(3 if width > 1 else 2),  # a side of 1 may have any stride
            maps=maps.data_ptr(),
            sizes=ctypes.addressof(flat),
            patches=ctypes.addressof(places),
            norms=address(norms),
            scratch=address(scratch),
        ),
    )
    return patches, norms
