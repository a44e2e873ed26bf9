"""FEMNIST: handwritten characters. Each writer is a client."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np

from pluribus.data.dataset import Dataset
from pluribus.data.datasets import fetch_from_hub, load_original, reading_original, register_data
from pluribus.data.npz import Arrays
from pluribus.errors import DamagedDataError, MissingDataError

SIDE = 28
CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


@register_data(
    "femnist",
    "814,277 characters of 28 x 28, 62 classes, 3,597 writers as natural clients; needs pluribus[hf] to download",
)
def _femnist() -> Dataset:
    return load_original("femnist", "femnist", read_leaf, _fetch)


def read_leaf(folder: Path) -> Arrays:
    """Read the JSON files of LEAF below a folder: pixels from 0 to 1, by writer."""
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise MissingDataError(f"{folder} has no *.json files: put those of LEAF there, such as all_data_0.json.")
    x, y, writers = [], [], []
    for file in files:
        with reading_original(file):
            for writer, held in json.loads(file.read_text(encoding="utf-8"))["user_data"].items():
                pixels = np.asarray(held["x"], np.float64).reshape(-1, SIDE, SIDE)
                if not np.all((pixels >= 0) & (pixels <= 1)):  # NaN is neither
                    raise DamagedDataError(f"{file} cannot be used: writer {writer} has pixels outside 0 to 1.")
                x.append(np.rint(pixels * 255).astype(np.uint8))
                y.append(np.asarray(held["y"], np.int64).reshape(len(pixels)))
                writers += [writer] * len(pixels)
    if not writers:
        raise DamagedDataError(f"the *.json files in {folder} have no characters: get them again or delete them.")
    return _pack(np.concatenate(x), np.concatenate(y), np.array(writers))


def _fetch(folder: Path) -> Arrays:
    instead = " Or put the JSON files of LEAF into the folder 'femnist' beside that file."
    (rows,) = fetch_from_hub("femnist", "flwrlabs/femnist", ["train"], folder, instead)
    x = np.empty((len(rows), SIDE, SIDE), np.uint8)
    for at, row in enumerate(rows):
        x[at] = np.asarray(row["image"].convert("L"))
    return _pack(x, np.array(rows["character"]), np.array(rows["writer_id"]))


def _pack(x: np.ndarray, y: np.ndarray, writers: np.ndarray) -> Arrays:
    return {"x": x, "y": y, "classes": np.array(CLASSES), "kind": np.array("image"), "client": writers}
