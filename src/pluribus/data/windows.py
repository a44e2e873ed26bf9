"""Windows of signals: samples in the order of a recording, cut where the recording, its label or its split changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Windows(NamedTuple):
    """Row numbers of the samples of each window (windows, length), and how many samples are in no window."""

    samples: np.ndarray
    start: np.ndarray
    """(windows,) the number of a window's first sample in its recording, from 0."""
    left: int


def cut(
    recording: np.ndarray, runs: Sequence[np.ndarray], time: np.ndarray | None, window: int, stride: int
) -> Windows:
    """Cut samples into windows of equal length.

    The samples of a recording are in the order of the file, or of `time`. All samples of a window are of one recording,
    and each array of `runs` has one value in it. Windows begin where such a run begins, and then every `stride`
    samples. Samples after a run's last full window are in no window.
    """
    number = _by_first_appearance(recording)
    order = np.argsort(number, kind="stable") if time is None else np.lexsort((time, number))
    changed = np.zeros(len(order), bool)
    changed[:1] = True
    for column in (number, *runs):
        sorted_ = column[order]
        changed[1:] |= sorted_[1:] != sorted_[:-1]
    first = np.flatnonzero(changed)
    sizes = np.diff(np.append(first, len(order)))
    counts = np.maximum((sizes - window) // stride + 1, 0)
    of_run = np.repeat(np.arange(len(first)), counts)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a window in its run
    begin = first[of_run] + index * stride
    begins = np.flatnonzero(np.diff(number[order], prepend=-1))  # of recordings, in this order
    samples = order[begin[:, None] + np.arange(window)]
    covered = np.where(counts > 0, (counts - 1) * min(stride, window) + window, 0).sum()
    return Windows(samples, begin - begins[np.searchsorted(begins, begin, side="right") - 1], int(len(order) - covered))


def _by_first_appearance(recording: np.ndarray) -> np.ndarray:
    """Number recordings in the order in which they begin, so that windows stay in the order of the file."""
    _, first, inverse = np.unique(recording, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
