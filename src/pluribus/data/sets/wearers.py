"""Signals of sensors that people wear. Each wearer is a client."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import torch

from pluribus.data.dataset import Dataset
from pluribus.data.datasets import fetch_url, load_original, reading_original, register_data
from pluribus.data.embedded import read_embedded
from pluribus.data.npz import Arrays

HAR = "UCI HAR Dataset.zip"
HAR_URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
HAR_CHANNELS = tuple(f"{which}_{axis}" for which in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
HAR_RATE = 50  # samples per second
HAR_WINDOW = 128


@register_data(
    "watch", "1,833 signals of a watch, 6 x 32, 7 exercises, 10 wearers as natural clients: no download", "signal"
)
def _watch() -> Dataset:
    arrays = read_embedded("watch")
    seconds = arrays["x"].shape[2] / float(arrays["rate"])
    return Dataset(
        name="watch",
        x=torch.from_numpy(arrays["x"].astype(np.float32) * arrays["scale"].astype(np.float32)[:, None]),
        y=torch.from_numpy(arrays["y"].astype(np.int64)),
        classes=tuple(map(str, arrays["classes"])),
        kind="signal",
        client=torch.from_numpy(arrays["client"].astype(np.int64)),
        clients=tuple(map(str, arrays["clients"])),
        group=torch.from_numpy(arrays["group"].astype(np.int64)),
        # whole windows: a rounded start would look as if two windows overlapped
        time=torch.from_numpy(np.rint(arrays["time"].astype(np.float64) / seconds) * seconds),
        span=seconds,
    )


@register_data(
    "uci-har", "10,299 signals of a phone at the waist, 9 x 128, 6 activities, 30 wearers as natural clients", "signal"
)
def _uci_har() -> Dataset:
    return load_original("uci-har", HAR, read_har, lambda folder: read_har(fetch_url(HAR_URL, folder / "har.zip")))


def read_har(file: Path) -> Arrays:
    """Read the archive of UCI: windows of 2.56 s, of which two neighbors of a recording share a half.

    The official split is by wearer, so that no wearer has both training and test rows. It is left out.
    """
    with reading_original(file), zipfile.ZipFile(file) as outer:
        inside = next((name for name in outer.namelist() if Path(name).name == HAR), None)
        if inside is None:
            return _read_har(outer)
        with zipfile.ZipFile(io.BytesIO(outer.read(inside))) as archive:
            return _read_har(archive)


def _read_har(archive: zipfile.ZipFile) -> Arrays:
    members = {name.partition("/")[2]: name for name in archive.namelist()}

    def read(name: str) -> np.ndarray:
        with archive.open(members[name]) as member:
            return np.loadtxt(_text(member), ndmin=2)

    with archive.open(members["activity_labels.txt"]) as member:
        classes = [line.split()[1].lower().replace("_", " ") for line in _text(member) if line.strip()]
    parts = []
    for part in ("train", "test"):
        signals = [read(f"{part}/Inertial Signals/{channel}_{part}.txt") for channel in HAR_CHANNELS]
        labels = [_whole(read(f"{part}/{name}_{part}.txt")[:, 0]) for name in ("y", "subject")]
        parts.append((np.stack(signals, 1).astype(np.float32), *labels))
    x, y, subject = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    group, place = _runs(subject, y)
    return {
        "x": x,
        "y": y - 1,
        "classes": np.array(classes),
        "kind": np.array("signal"),
        "client": subject,
        "group": group,
        "time": place * (HAR_WINDOW / 2 / HAR_RATE),
        "span": np.array(HAR_WINDOW / HAR_RATE),
    }


def _whole(numbers: np.ndarray) -> np.ndarray:
    if not np.all(np.isfinite(numbers) & (numbers == np.rint(numbers)) & (np.abs(numbers) < 2**31)):
        raise ValueError("a label is not a whole number")
    return numbers.astype(np.int64)


def _text(member: IO[bytes]) -> io.TextIOWrapper:
    return io.TextIOWrapper(member, encoding="utf-8")


def _runs(subject: np.ndarray, activity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The run that each window is in, consecutive windows of one wearer and activity, and its place in the run."""
    starts = np.ones(len(subject), bool)
    starts[1:] = (subject[1:] != subject[:-1]) | (activity[1:] != activity[:-1])
    group = np.cumsum(starts) - 1
    return group, np.arange(len(subject)) - np.flatnonzero(starts)[group]
