"""Writes the images of the three hospitals: handwritten digits in place of scans of patients.

    python make_images.py

Each hospital gets HOSPITAL/images/CLASS/*.png for training, and HOSPITAL/new/CLASS-*.png, which are never used in
training: their names contain the right class. No hospital has all classes, and no image is at two hospitals. The digits
come with scikit-learn, so nothing is downloaded, and every machine gets the same files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD = {"northfield": "0123456", "lakeside": "3456789", "harbour": "012789"}  # classes of each hospital
IMAGES, NEW = 40, 4  # of each class
SIDE = 32  # pixels; the digits have 8


def main() -> None:
    """Divide the digits of each class among the hospitals that hold it."""
    digits = load_digits()
    left = {str(label): list(np.flatnonzero(digits.target == label)) for label in range(10)}
    for hospital, classes in HELD.items():
        for label in classes:
            rows = [left[label].pop(0) for _ in range(IMAGES + NEW)]
            for number, row in enumerate(rows):
                known = number < IMAGES
                name = f"images/{label}/{number:03d}.png" if known else f"new/{label}-{number - IMAGES + 1}.png"
                save(digits.images[row], Path(hospital) / name)
        print(
            f"{hospital}: {IMAGES * len(classes)} images of classes {', '.join(classes)}; {NEW * len(classes)} new ones"
        )


def save(digit: np.ndarray, file: Path) -> None:
    """Write a digit as a PNG file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    gray = (digit * 255 / 16).round().astype(np.uint8)  # digits have values from 0 to 16
    Image.fromarray(gray).resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file)


if __name__ == "__main__":
    main()
