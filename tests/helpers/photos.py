"""Photos for the pages of the documentation: real images, so that what a page says can be seen.

Handwritten digits that scikit-learn carries, in folders that have the names of the pages.
"""

from pathlib import Path

from mivhead.images.example import enlarge_scan, load_scans

BIRDS = {"robin": 0, "wren": 3, "dunnock": 4}
OWL, STRANGER = 7, 6  # one is added later, the other is none of these


def write_photos(root: Path) -> None:
    """Write the folders that pages name: shots, labelled, new, more, with-other, foreign."""
    scans, labels = load_scans()
    rows = {digit: (labels == digit).nonzero()[0].tolist() for digit in range(10)}

    def write(digit: int, first: int, count: int, folder: str, name: str = "{}.jpg") -> None:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number, row in enumerate(rows[digit][first : first + count], first + 1):
            enlarge_scan(scans[row]).convert("RGB").save(root / folder / name.format(number))

    for index, (bird, digit) in enumerate(BIRDS.items()):
        write(digit, 0, 4, f"shots/{bird}")
        write(digit, 0, 4, f"with-other/{bird}")
        write(digit, 4, 2, f"more/{bird}")
        write(digit, 6, 6, f"labelled/{bird}")
        write(digit, 2 * index + 12, 2, "new", "IMG_{:04}.jpg")
    write(OWL, 0, 3, "more/owl")
    write(STRANGER, 0, 4, "with-other/other")
    write(STRANGER, 20, 2, "new", "IMG_{:04}.jpg")
    write(STRANGER, 30, 10, "foreign")
    (root / "new" / "IMG_0013.jpg").rename(root / "new" / "IMG_0001.jpg")
