"""Small image files, folders and zips for tests."""

import io
import zipfile

from PIL import Image


def png(value=0):
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def make_folder(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def make_zip(path, files, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


TWO = {"cat/1.png": png(1), "cat/2.png": png(2), "cat/10.png": png(10), "dog/a.png": png(20)}
