"""Decode an image of unknown origin to an upright 8-bit RGB picture, or explain why not.

No file is trusted: only a few common formats are tried, size limits are checked in the header
before any pixel is decoded, and every exception of a decoder becomes an `ImageError` that names the
file.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from PIL import Image, UnidentifiedImageError

from mivhead.errors import ImageError, reading

ImageLike: TypeAlias = (
    "str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | np.ndarray[Any, np.dtype[np.uint8]]"
)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
# 8192 x 8192, as decoded: a larger JPEG is decoded at a fraction of its size, up to Pillow's own
# limit, which is not changed (179 megapixels).
MAX_PIXELS = 64 * 2**20
MAX_FILE_BYTES = 256 * 2**20
MAX_SCANS = 100  # of a progressive JPEG, which usually has about 10
MAX_PASSES = 16 * MAX_PIXELS  # its pixels times its scans, each of which is a pass over the image

_URL = re.compile("(https?|ftp|s3|gs)://", re.IGNORECASE)
# HEIC, as iPhones write it: "ftyp" and a brand, after four bytes.
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")

# The beginning of a JPEG file, of a scan, and of any segment that is not image data.
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
_WITHOUT_LENGTH = (_JPEG, b"\xff\xd9", b"\xff\x01")

# By EXIF orientation; `ImageOps.exif_transpose` would also rewrite the (untrusted) metadata.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112

warnings.filterwarnings("ignore", module=r"PIL\.")  # odd metadata, large images


def load_image(
    source: ImageLike, *, name: str | None = None, at_least: int | None = None
) -> Image.Image:
    """Decode one image to a new, upright RGB picture.

    The first frame of an animation is used, transparency becomes white, 16-bit grey is scaled to 8
    bits, CMYK is converted, and the EXIF orientation is applied. `name` is for errors. If the
    picture is going to be shrunk, `at_least` says how long both sides must be: a JPEG that is twice
    as large is decoded at 1/2, 1/4 or 1/8 of its size, several times as fast. One with more than
    `MAX_PIXELS` always is.

    >>> load_image(np.zeros((4, 6), np.uint8)).size
    (6, 4)
    """
    if isinstance(source, str | os.PathLike):
        check_local(source)
        name = name or os.fspath(source)
        source = read_file(Path(source), name)
    name = name or "The image"
    if not isinstance(source, bytes | Image.Image | np.ndarray):
        source = read_capped(source, name)
    with _errors(name):
        if isinstance(source, np.ndarray):
            source = _from_array(source, name)
        if isinstance(source, Image.Image):
            return _to_rgb(source, name)
        with _open(source, name) as image:
            return _to_rgb(image, name, at_least)


def check_local(path: str | os.PathLike[str]) -> None:
    """Raise an error for a URL, which is not fetched."""
    if _URL.match(os.fspath(path)):
        raise ImageError(f"{path} is a URL, and only files on this computer are read.")


def count_pixels(data: bytes, *, name: str) -> int:
    """Return the number of pixels that an image file will be decoded to, from its header."""
    with _errors(name), _open(data, name) as image:
        _shrink(image, name)
        return image.width * image.height


def read_file(path: Path, name: str) -> bytes:
    """Read the bytes of an image file of at most `MAX_FILE_BYTES`."""
    with reading(name, ValueError, kind=ImageError):  # ValueError: a null byte in the path
        if path.exists() and not path.is_file():
            raise ImageError(f"{name} is not a regular file.")  # reading a pipe could block
        with path.open("rb") as file:
            return read_capped(file, name)


def read_capped(file: IO[bytes], name: str) -> bytes:
    """Read all bytes of an open file, up to `MAX_FILE_BYTES`, whatever size it claims to have."""
    if not hasattr(file, "read"):
        raise ImageError(
            f"{name} has the type {type(file).__name__}; expected a path, bytes, a binary file, "
            "a PIL image or a uint8 array."
        )
    data = bytearray()
    while chunk := file.read(2**20):  # in pieces, as one large read would allocate its full size
        if not isinstance(chunk, bytes):
            raise ImageError(f"{name} is a text file object; open it in binary mode.")
        data += chunk
        if len(data) > MAX_FILE_BYTES:
            raise ImageError(f"{name} is larger than the limit of {MAX_FILE_BYTES // 2**20} MiB.")
    return bytes(data)


def _from_array(array: np.ndarray[Any, Any], name: str) -> Image.Image:
    shape = array.shape
    if array.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))):
        kind = f"{array.dtype} of shape {shape}"
        raise ImageError(f"{name} is {kind}, not uint8 of shape (H, W), (H, W, 3) or (H, W, 4).")
    return Image.fromarray(np.ascontiguousarray(array))


def encode_square(image: Image.Image, size: int) -> bytes:
    """Resize an image to the square that a backbone sees, and encode it without loss.

    Lossless WebP at its fastest setting: smaller than PNG (55 instead of 75 kB for photographs at
    224 pixels), and twice as fast.
    """
    square = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    buffer = BytesIO()
    square.save(buffer, "WEBP", lossless=True, quality=0, method=0)
    return buffer.getvalue()


def _open(data: bytes, name: str) -> Image.Image:
    """Read the header of an image file; HEIC, as iPhones write it, has a package of its own."""
    if not data:
        raise ImageError(f"{name} is empty (0 bytes).")
    heic = data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS and b"avif" not in data[12:64]
    if not heic:
        image = Image.open(BytesIO(data), formats=FORMATS)
        if data.startswith(_JPEG):
            _check_scans(data, image.width * image.height, name)
        return image
    import pillow_heif

    pillow_heif.register_heif_opener()
    try:
        return Image.open(BytesIO(data), formats=("HEIF",))
    except UnidentifiedImageError:
        raise ImageError(f"{name} is corrupted: it is not a complete HEIC image.") from None


def _check_scans(data: bytes, pixels: int, name: str) -> None:
    """Refuse a JPEG with too many scans, but do not count those of pictures in its metadata."""
    most = min(MAX_SCANS, MAX_PASSES // max(1, pixels))
    if data.count(_SCAN) <= most:  # as good as always
        return
    place, scans = len(_JPEG), 0
    while scans <= most and (match := _MARKER.search(data, place)):
        place = match.end()
        scans += match[0] == _SCAN
        if match[0] not in _WITHOUT_LENGTH:
            place += int.from_bytes(data[place : place + 2])  # the metadata is skipped
    if scans > most:
        raise ImageError(f"{name} has more than {most} scans; save it again as a plain JPEG.")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn every exception of a decoder into an `ImageError`."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise _too_large(name) from None
    except UnidentifiedImageError:
        raise ImageError(f"{name} is not a {', '.join(FORMATS)} or HEIC image.") from None
    # Decoders raise almost any exception for corrupted data (SyntaxError, IndexError, zlib.error,
    # struct.error ...), and only Pillow runs inside this block.
    except Exception as error:
        raise ImageError(f"{name} is corrupted: {error or type(error).__name__}.") from error


def _to_rgb(image: Image.Image, name: str, at_least: int | None = None) -> Image.Image:
    """Check the size, then decode the first frame to upright RGB."""
    if not image.width or not image.height:
        raise ImageError(f"{name} has no pixels: it is {image.width} x {image.height}.")
    if at_least is not None:
        image.draft(None, (at_least, at_least))  # does nothing but to a JPEG
    _shrink(image, name)
    image.load()
    method = _UPRIGHT.get(_orientation(image))  # after load, which rotates a TIFF
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        rgb = _from_16_bit(image).convert("RGB")
    elif image.mode in ("I", "F"):
        raise ImageError(f"{name} has 32-bit values: save it with 8 or 16 bits per channel.")
    elif image.has_transparency_data:
        rgba = image.convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    else:
        rgb = image.convert("RGB")  # a copy, also if the mode is RGB already
    return rgb if method is None else rgb.transpose(method)


def _shrink(image: Image.Image, name: str) -> None:
    """Make sure that an image will have at most `MAX_PIXELS`, or raise an error."""
    if image.width * image.height > MAX_PIXELS:
        image.draft(None, (image.width // 2, image.height // 2))  # does nothing but to a JPEG
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(name)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 0))
    # Corrupted metadata, on which Pillow raises many types, does not make an image unreadable.
    except Exception:
        return 0


def _from_16_bit(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips at 255 instead of scaling. 65535 = 255 * 257.
    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _too_large(name: str) -> ImageError:
    most = MAX_PIXELS // 10**6
    return ImageError(f"{name} has more than {most} megapixels, the limit: resize it first.")
