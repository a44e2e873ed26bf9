"""Your own data set in one file: a function that returns images and labels.

    pluribus.run("fedgh", data=blobs, clients=4, rounds=2)
    pluribus.run("fedgh", data=blobs, partition=by_side, clients=4, rounds=2)

On the command line, both are named by their dotted paths:

    pluribus run fedgh --data examples.my_data.blobs --rounds 5
    pluribus run fedgh --data examples.my_data.blobs --partition pathological --classes-per-client 2 --rounds 5
    pluribus run fedgh --data examples.my_data.blobs --partition examples.my_data.by_side --rounds 5

Images are bytes, (N, channels, height, width); labels index the class names.
"""

import numpy as np
import torch

from pluribus import Dataset

CORNERS = {"top left": (2, 2), "top right": (2, 5), "bottom left": (5, 2), "bottom right": (5, 5)}


def blobs() -> Dataset:
    """480 noisy images of 8 x 8 with a bright blob near one of four corners."""
    rng = np.random.default_rng(0)
    labels = np.arange(480) % len(CORNERS)
    centres = np.array(list(CORNERS.values()))[labels] + rng.normal(0, 0.7, (480, 2))
    grid = np.arange(8)
    rows = np.exp(-((grid - centres[:, :1]) ** 2) / 2)
    columns = np.exp(-((grid - centres[:, 1:]) ** 2) / 2)
    light = 160 * rows[:, :, None] * columns[:, None, :] + rng.normal(60, 40, (480, 8, 8))
    images = light.clip(0, 255).astype(np.uint8)
    return Dataset("blobs", torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels), tuple(CORNERS))


def by_side(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Give blobs on the left to clients with even numbers, and blobs on the right to the others."""
    return (labels % 2 + 2 * rng.integers(0, clients, len(labels))) % clients
