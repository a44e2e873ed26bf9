"""Real data that ships with the package, so that a first run on text or signals needs no network. See SOURCES.md."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise

import numpy as np

from pluribus.errors import UnknownNameError

EMBEDDED = ("speeches", "watch")


def read_embedded(name: str) -> dict[str, np.ndarray]:
    """The arrays of one embedded set as they are stored; SOURCES.md says what each array holds."""
    if name not in EMBEDDED:
        raise UnknownNameError(f"There is no embedded data set {name!r}; choose one of {', '.join(EMBEDDED)}.")
    with files(__name__).joinpath(f"{name}.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def decode_texts(arrays: dict[str, np.ndarray]) -> list[str]:
    """The texts of an embedded set, whose utf-8 bytes lie end to end in one buffer."""
    buffer, ends = arrays["text"].tobytes(), arrays["offsets"].tolist()
    return [buffer[start:end].decode() for start, end in pairwise(ends)]
