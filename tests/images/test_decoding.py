"""Decoding: every kind of file a person may hand over, good or bad."""

import contextlib
import io
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from mivhead.errors import ImageError, InputError
from mivhead.images import decoding as images
from mivhead.images.decoding import load_image
from mivhead.images.sources import as_image_set, open_labelled, open_unlabelled

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


def picture(width=48, height=32):
    """Smooth, asymmetric and coloured, so that flips, turns and channel swaps show."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, 255 - x / 2], axis=2).astype(np.uint8)


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def png(width, height, idat, depth=8, color=2):
    def chunk(tag, data):
        crc = struct.pack(">I", zlib.crc32(tag + data))
        return struct.pack(">I", len(data)) + tag + data + crc

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    end = chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", idat) + end


def close(image, expected, by):
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image).astype(int) - expected.astype(int)).mean() <= by


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind, tmp_path):
    path = tmp_path / f"a.{kind.lower()}"
    path.write_bytes(encode(Image.fromarray(picture()), kind))
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        close(load_image(source), picture(), by=0 if kind in ("PNG", "BMP", "TIFF", "PPM") else 8)


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_file_is_named(kind, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(Image.fromarray(noise), kind)
    path = tmp_path / "broken.jpg"
    for part in (0.02, 0.5, 0.9):
        path.write_bytes(data[: int(len(data) * part)])
        with pytest.raises(ImageError, match=r"broken\.jpg is (corrupted: .+|not a JPEG.+)"):
            load_image(path)


@given(position=st.floats(0, 1), byte=st.integers(0, 255), kind=st.sampled_from(FORMATS))
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_give_an_image_or_an_image_error(position, byte, kind):
    data = bytearray(encode(Image.fromarray(picture(16, 16)), kind))
    data[int(position * (len(data) - 1))] = byte
    try:
        image = load_image(bytes(data))
    except ImageError:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just some text\n" * 50,
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    ],
)
def test_not_an_image(content, tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    for source in (path, tmp_path / "nowhere.jpg", tmp_path, "a\0b.jpg"):
        with pytest.raises(ImageError):
            load_image(source)


def with_chunk(tag, data):
    """A small PNG with one more chunk, whose content is compressed."""
    plain = encode(Image.fromarray(picture()), "PNG")
    body = tag + {b"zTXt": b"a\0\0", b"iCCP": b"a\0\0"}[tag] + zlib.compress(data, 9)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return plain[:33] + chunk + plain[33:]


@pytest.mark.parametrize("tag", [b"zTXt", b"iCCP"])
def test_bombs_of_text_and_profiles_are_not_unpacked(tag):
    data = with_chunk(tag, bytes(256 * 2**20))
    tracemalloc.start()
    with contextlib.suppress(ImageError):  # or the picture without it
        close(load_image(data), picture(), by=0)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("size", [(1, 1), (60_000, 1), (1, 60_000)])
def test_odd_sizes(size):
    assert load_image(encode(Image.new("RGB", size), "PNG")).size == size


@pytest.mark.parametrize("side", [30_000, 10_000])  # above and below where Pillow itself stops
def test_bomb_is_refused_from_its_header(side, tmp_path, monkeypatch):
    monkeypatch.setattr(PngImageFile, "load", lambda self: pytest.fail("decoding was started"))
    row = b"\0" * (side * 3 + 1)
    squeeze = zlib.compressobj(9)
    idat = b"".join(squeeze.compress(row) for _ in range(200)) + squeeze.flush()
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, idat))
    limit = Image.MAX_IMAGE_PIXELS
    tracemalloc.start()
    with pytest.raises(ImageError, match="megapixels"):
        load_image(path)
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()
    assert limit == Image.MAX_IMAGE_PIXELS


def test_large_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 2**20)
    path = tmp_path / "big.bmp"
    path.write_bytes(b"BM" + bytes(2**20))
    with pytest.raises(ImageError, match="1 MiB"):
        load_image(path)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(kind):
    first, second = Image.new("RGB", (8, 8), (250, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 250))
    data = encode(first, kind, save_all=True, append_images=[second])
    close(load_image(data), np.asarray(first), by=4)


def test_cmyk():
    image = Image.fromarray(picture()).convert("CMYK")
    close(load_image(encode(image, "JPEG")), picture(), by=8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled(kind):
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    try:
        content = encode(Image.fromarray(values), kind)
    except OSError:
        pytest.skip(f"this Pillow cannot write 16-bit {kind}")
    image = load_image(content)
    expected = np.round(values / 257)[..., None].repeat(3, axis=2)
    np.testing.assert_array_equal(np.asarray(image), expected)


def test_16_bit_big_endian_tiff():
    image = Image.frombytes("I;16B", (2, 1), b"\xff\xff\x80\x80")
    assert np.asarray(load_image(encode(image, "TIFF")))[..., 0].tolist() == [[255, 128]]


def test_16_bit_rgb_png():
    line = b"\0" + struct.pack(">3H", 65535, 32896, 0)
    image = load_image(png(1, 1, zlib.compress(line), depth=16))
    assert image.getpixel((0, 0)) == (255, 128, 0)


def test_32_bit_values_are_refused():
    for values in (np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)):
        with pytest.raises(ImageError, match="32-bit"):
            load_image(encode(Image.fromarray(values), "TIFF"), name="m.tiff")


def test_transparency_becomes_white():
    rgba = Image.new("RGBA", (2, 1), (0, 200, 0, 255))
    rgba.putpixel((1, 0), (10, 10, 10, 0))
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 51))
    la = Image.new("LA", (1, 1), (0, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 200, 0, 10, 10, 10])
    palette.putpixel((1, 0), 1)
    for data in (
        encode(rgba, "PNG"),
        encode(palette, "PNG", transparency=b"\xff\x00"),
        encode(palette, "PNG", transparency=1),
        encode(palette, "GIF", transparency=1),
    ):
        image = load_image(data)
        assert [image.getpixel((x, 0)) for x in (0, 1)] == [(0, 200, 0), (255, 255, 255)]
    assert load_image(encode(half, "PNG")).getpixel((0, 0)) == (204, 204, 204)
    assert load_image(encode(la, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_one_bit_and_grey():
    bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    for kind in ("PNG", "PPM", "TIFF"):
        assert np.asarray(load_image(encode(bits, kind)))[0, :, 1].tolist() == [0, 255]
    grey = Image.fromarray(picture()[..., 0])
    close(load_image(encode(grey, "PNG")), picture()[..., [0, 0, 0]], by=0)


@pytest.mark.parametrize(
    ("orientation", "kind"),
    [*((each, "JPEG") for each in range(1, 9)), (6, "PNG"), (7, "WEBP"), (8, "TIFF")],
)
def test_exif_orientation_is_applied(orientation, kind):
    # Where pixel (row, column) of the stored picture belongs, by the EXIF standard's wording.
    stored = picture()
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: stored.transpose(1, 0, 2)[:, ::-1],
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: stored.transpose(1, 0, 2)[::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(stored)
    options = {"exif": exif} if kind != "TIFF" else {"tiffinfo": {0x0112: orientation}}
    loaded = load_image(encode(image, kind, **options))
    assert loaded.size == upright.shape[1::-1]
    close(loaded, upright, by=8)


def test_orientation_is_applied_once_to_pil_images():
    exif = Image.Exif()
    exif[0x0112] = 6
    opened = Image.open(io.BytesIO(encode(Image.fromarray(picture()), "JPEG", exif=exif)))
    turned = ImageOps.exif_transpose(opened)
    assert load_image(opened).size == load_image(turned).size == (32, 48)
    assert opened.size == (48, 32)


def test_damaged_metadata_does_not_spoil_a_picture():
    data = encode(Image.fromarray(picture()), "JPEG", exif=b"Exif\0\0" + b"\xff" * 20)
    close(load_image(data), picture(), by=8)


def test_no_warning_reaches_the_user(tmp_path):
    bad_exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x00\x01\x02\0\xff\xff\0\0\xff\0\0\0\0\0\0\0"
    jpeg = encode(Image.fromarray(picture()), "JPEG", exif=bad_exif)
    palette = encode(Image.new("P", (2, 1)), "PNG", transparency=b"\xff\x00")
    for number, data in enumerate((jpeg, palette, encode(Image.new("L", (9500, 9500)), "JPEG"))):
        (tmp_path / str(number)).write_bytes(data)
    code = "from mivhead.images.decoding import load_image; [load_image(name) for name in '012']"
    command = [sys.executable, "-W", "always::UserWarning", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 4)])
def test_arrays(shape):
    array = np.full(shape, 255, np.uint8)
    array[0, 0, ...] = 9
    if len(shape) == 3 and shape[2] == 4:
        array[0, 0, 3] = 255
    image = load_image(array[::-1])  # also with negative strides
    assert image.size == (7, 5)
    assert image.getpixel((0, 4)) == (9, 9, 9)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3)),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((0, 4), np.uint8),
        [[1, 2]],
        io.StringIO("text"),
    ],
)
def test_wrong_objects(array):
    with pytest.raises(ImageError, match="image 3"):
        load_image(array, name="image 3")


def test_the_input_image_is_not_changed():
    given_image = Image.fromarray(picture())
    loaded = load_image(given_image)
    loaded.putpixel((0, 0), (1, 2, 3))
    np.testing.assert_array_equal(np.asarray(given_image), picture())


def test_lazily_opened_damaged_pil_image():
    data = encode(Image.fromarray(picture(200, 200)), "JPEG")
    with pytest.raises(ImageError, match="image 0 is corrupted"):
        load_image(Image.open(io.BytesIO(data[: len(data) // 2])), name="image 0")


def test_photos_of_an_iphone():
    import pillow_heif

    pillow_heif.register_heif_opener()
    wide = Image.new("RGB", (64, 48), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # as an iPhone writes a photo in portrait format
    data = encode(wide, "HEIF", exif=exif.tobytes())
    decoded = load_image(data, name="photo.heic")
    assert decoded.mode == "RGB"
    assert decoded.size == (48, 64)
    red, green, blue = np.asarray(decoded).reshape(-1, 3).mean(axis=0)
    assert red > 200
    assert max(green, blue) < 60
    with pytest.raises(ImageError, match=r"photo\.heic is corrupted"):
        load_image(data[: len(data) // 2], name="photo.heic")


def test_avif():
    data = encode(Image.new("RGB", (64, 48), "red"), "AVIF")
    decoded = load_image(data, name="photo.avif")
    assert decoded.size == (64, 48)
    assert np.asarray(decoded).reshape(-1, 3).mean(axis=0)[0] > 200
    with pytest.raises(ImageError, match=r"photo\.avif"):
        load_image(data[: len(data) // 2], name="photo.avif")


def test_a_jpeg_of_108_megapixels_is_decoded_at_a_fraction():
    data = encode(Image.new("L", (12_000, 9_000), 90), "JPEG")
    assert load_image(data, name="large.jpg").size == (6_000, 4_500)
    assert load_image(data, name="large.jpg", at_least=224).size == (1_500, 1_125)
    assert images.count_pixels(data, name="large.jpg") == 6_000 * 4_500
    png = encode(Image.new("1", (12_000, 9_000)), "PNG")
    with pytest.raises(ImageError, match=r"large\.png has more than 67 megapixels"):
        load_image(png, name="large.png")


@pytest.mark.parametrize("url", ["https://example.org/cat.jpg", "s3://bucket/cat.jpg"])
def test_a_url_is_not_a_file(url):
    for read in (load_image, open_unlabelled, open_labelled, as_image_set):
        with pytest.raises(InputError, match="URL"):
            read(url)


@pytest.mark.parametrize("at_least", [None, 100, 300, 448, 2000])
def test_large_jpegs_can_be_decoded_at_a_fraction_of_their_size(at_least):
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated
    Image.new("RGB", (1600, 1200), (200, 30, 30)).save(buffer, "JPEG", exif=exif)
    fraction = {None: 1, 100: 8, 300: 4, 448: 2, 2000: 1}[at_least]
    found = load_image(buffer.getvalue(), at_least=at_least)
    assert found.size == (1200 // fraction, 1600 // fraction)
    assert found.getpixel((20, 20)) == pytest.approx((200, 30, 30), abs=3)
    with pytest.raises(ImageError, match="corrupted"):
        load_image(buffer.getvalue()[:2000], at_least=at_least)
    png = io.BytesIO()
    Image.new("L", (1600, 1200)).save(png, "PNG")
    assert load_image(png.getvalue(), at_least=at_least).size == (1600, 1200)


def with_scans(count: int, side: int = 64) -> bytes:
    """A progressive JPEG with more scans than it needs: its last one is repeated."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    scan, end = data.rfind(b"\xff\xda"), data.rfind(b"\xff\xd9")
    more = count - data.count(b"\xff\xda")
    return data[:end] + more * data[scan:end] + data[end:]


@pytest.mark.parametrize(("scans", "side", "most"), [(2_000, 64, 100), (100, 8000, 16)])
def test_scans_are_counted_before_they_are_decoded(scans, side, most, monkeypatch):
    assert load_image(with_scans(100)).size == (64, 64)
    monkeypatch.setattr(JpegImageFile, "load", lambda self: pytest.fail("decoding was started"))
    for read in (load_image, images.count_pixels):
        with pytest.raises(ImageError, match=f"more than {most} scans"):
            read(with_scans(scans, side), name="x.jpg")


def test_scans_in_metadata_do_not_count() -> None:
    note = b"\xff\xfe" + (2 + 60_000).to_bytes(2) + 30_000 * b"\xff\xda"  # a comment
    data = with_scans(10)
    assert load_image(data[:2] + note + data[2:]).size == (64, 64)
