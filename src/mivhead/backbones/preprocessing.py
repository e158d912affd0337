"""From decoded images to a backbone's input tensor.

PyTorch is imported only where a tensor is made: onnxruntime does without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mivhead.backbones.preset import Preprocessing
from mivhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# What a backbone takes: `mivhead.images.decoding.load_image` turns files and bytes into it.
DecodedImage: TypeAlias = "Image.Image | np.ndarray[Any, Any]"


def preprocess(images: Sequence[DecodedImage], preprocessing: Preprocessing) -> Tensor:
    """Resize, scale and normalise images.

    An image is resized directly to R x R, bicubic, without cropping; an image that already has
    this size is used unchanged.

    Parameters
    ----------
    images : sequence of PIL images or uint8 arrays
        Arrays have the shape `(height, width, 3)` or `(height, width)`.
    preprocessing : Preprocessing
        Size, mean and standard deviation.

    Returns
    -------
    Tensor
        `(n, 3, R, R)`, float32, in channels-last memory.

    Examples
    --------
    >>> import numpy as np
    >>> white = np.full((30, 40, 3), 255, np.uint8)
    >>> x = preprocess([white], Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3))
    >>> x.shape, x.max().item()
    (torch.Size([1, 3, 8, 8]), 1.0)
    """
    import torch

    return torch.from_numpy(normalise(images, preprocessing)).permute(0, 3, 1, 2)


def normalise(
    images: Sequence[DecodedImage], preprocessing: Preprocessing, *, channels_first: bool = False
) -> NDArray[np.float32]:
    """Resize, scale and normalise images to an array `(n, R, R, 3)`; see `preprocess`.

    With `channels_first`, the array is `(n, 3, R, R)`.
    """
    if not len(images):
        raise InputError("There are no images: give at least one.")
    pixels = np.stack([to_pixels(image, i, preprocessing.size) for i, image in enumerate(images)])
    mean = np.asarray(preprocessing.mean, np.float32)
    std = np.asarray(preprocessing.std, np.float32)
    if channels_first:
        pixels = pixels.transpose(0, 3, 1, 2)
        mean, std = mean[:, None, None], std[:, None, None]
    x = pixels.astype(np.float32, order="C")
    x /= np.float32(255)
    x -= mean
    x /= std
    return x


def to_pixels(image: DecodedImage, position: int, size: int) -> np.ndarray[Any, Any]:
    """Return an image as `(size, size, 3)` uint8; errors name it by its position."""
    return np.asarray(to_picture(image, position, size))


def to_picture(image: DecodedImage, position: int, size: int) -> Image.Image:
    """Return an image as an RGB picture of `size` x `size`; errors name it by its position."""
    if not isinstance(image, Image.Image):
        image = _from_array(image, position)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return image


def _from_array(array: Any, position: int) -> Image.Image:
    if not isinstance(array, np.ndarray):
        raise InputError(
            f"Image {position} is a {type(array).__name__}, expected a PIL image or a uint8 array."
        )
    grey_or_rgb = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not grey_or_rgb or not array.size:
        raise InputError(
            f"Image {position} is a {array.dtype} array of shape {array.shape}, expected uint8 of "
            "shape (height, width, 3) or (height, width)."
        )
    return Image.fromarray(array)
