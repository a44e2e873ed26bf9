"""Image files and folders of them: read, or refused with a sentence that names the file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import fuzzed, mutated
from PIL import Image

from pluribus.data import Dataset
from pluribus.data.check import check_data
from pluribus.data.folders import read_image_folder
from pluribus.data.images import decode

PIXELS = np.arange(16 * 16 * 3, dtype=np.uint32).astype(np.uint8).reshape(16, 16, 3)


def saved(form: str, pixels: np.ndarray, mode: str | None = None, **how: Any) -> bytes:
    file, image = io.BytesIO(), Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(file, form, **how)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6  # lies on its side
DEEP = PIXELS[..., 0].astype(np.uint16) * 200
VALID = [
    saved("PNG", PIXELS), saved("PNG", PIXELS, "P", transparency=0), saved("PNG", PIXELS, "RGBA"), saved("PNG", DEEP),
    saved("JPEG", PIXELS, exif=EXIF), saved("JPEG", PIXELS, "CMYK"), saved("GIF", PIXELS), saved("BMP", PIXELS),
    saved("TIFF", PIXELS, compression="tiff_lzw"), saved("TIFF", DEEP), saved("TIFF", PIXELS[..., 0], "F"),
    saved("WEBP", PIXELS), saved("PPM", PIXELS), saved("PPM", PIXELS, "1"), saved("PPM", DEEP),
]  # fmt: skip
shapes = st.sampled_from([(1, 8, 8), (3, 8, 8), (3, 1, 1)])


@fuzzed(2)
@given(mutated(VALID), shapes)
def test_files_with_changed_bytes(content: bytes, shape: tuple[int, int, int]) -> None:
    with scratch() as folder:
        file = folder / "one.png"
        file.write_bytes(content)
        found = survives(lambda: decode(file, shape), folder)
    if isinstance(found, tuple):
        assert found[0].shape == shape


# Folders --------------------------------------------------------------------------------------------------------------

NAMES = ["a", "b", "A", "train", "test", "val", "Training", "é", "e\u0301", ".hidden", "\udcff", "x" * 200, " ", "..."]
FILES = ["1.png", "2.JPG", "3.tif", "x", "notes.txt", ".png", "a_kfold.txt", "a_train_kfold.txt", "\udcfe.png", "4.gif"]


def fill(folder: Path, entries: list[tuple[list[str], str, bytes]]) -> None:
    for names, file, content in entries:
        place = Path(os.fsdecode(os.fsencode(folder.joinpath(*names))))
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / file).write_bytes(content)
        except OSError:
            continue  # a file has the name of this folder


contents = st.sampled_from([VALID[0], VALID[4], b"", b"a/1.png 0\n", b"\xff\n"]) | mutated(VALID)


@fuzzed(0.5)
@given(st.lists(st.tuples(st.lists(st.sampled_from(NAMES), max_size=3), st.sampled_from(FILES), contents), max_size=6))
def test_folders(entries: list[tuple[list[str], str, bytes]]) -> None:
    with scratch() as folder:
        fill(folder, entries)
        found = survives(lambda: read_image_folder(folder, 8), folder)
        survives(lambda: check_data(str(folder)).to_json(), folder)
    if isinstance(found, Dataset):
        assert len(found.x) == len(found.y) > 0
