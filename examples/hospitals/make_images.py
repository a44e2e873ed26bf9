"""Writes images for three hospitals that have none to show: scans of handwritten digits stand in for scans of patients.

    python make_images.py

Each hospital gets HOSPITAL/images/CLASS/*.png, to train on, and HOSPITAL/new/CLASS-*.png, which its model never sees in
training: the name says what is right. No hospital has all classes, and no image is in two places. The digits come with
scikit-learn, so nothing is downloaded, and every machine gets the same files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HELD = {"northfield": "0123456", "lakeside": "3456789", "harbour": "012789"}  # the classes that each hospital has
IMAGES, NEW = 40, 4  # of each class
SIDE = 32  # pixels; the digits have 8


def main() -> None:
    """Deal the digits of each class to the hospitals that hold it."""
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
    grey = (digit * 255 / 16).round().astype(np.uint8)  # its ink is 0 to 16
    Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file)


if __name__ == "__main__":
    main()
