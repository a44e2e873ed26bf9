"""Small tables that are part of scikit-learn, read from its files."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pluribus.data.dataset import Dataset
from pluribus.data.datasets import register_data, sklearn_file

CELL = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave points", "symmetry",
    "fractal dimension",
)  # fmt: skip
BREAST_CANCER = tuple(f"{which} {what}" for which in ("mean", "error of", "worst") for what in CELL)
WINE = (
    "alcohol", "malic acid", "ash", "alkalinity of ash", "magnesium", "phenols", "flavanoids", "nonflavanoid phenols",
    "proanthocyanins", "color intensity", "hue", "OD280/OD315", "proline",
)  # fmt: skip
IRIS = ("sepal length", "sepal width", "petal length", "petal width")
DIABETES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
HUNDRED = 100  # the target of diabetes ranges from 25 to 346: its squared error would drown a learning rate of 0.01


def _classified(name: str, file: str, columns: Sequence[str]) -> Dataset:
    """A table whose first line has numbers of rows and columns and the classes, and whose last column is the class."""
    with sklearn_file(file).open() as lines:
        _, _, *classes = next(lines).strip().split(",")
        rows = np.loadtxt(lines, delimiter=",")
    x, y = torch.from_numpy(rows[:, :-1].astype(np.float32)), torch.from_numpy(rows[:, -1].astype(np.int64))
    return Dataset(name, x, y, tuple(classes), kind="table", columns=tuple(columns))


for _name, _file, _columns, _about in (
    ("breast-cancer", "breast_cancer.csv", BREAST_CANCER, "569 tumors, 30 columns, 2 classes"),
    ("wine", "wine_data.csv", WINE, "178 wines, 13 columns, 3 classes"),
    ("iris", "iris.csv", IRIS, "150 flowers, 4 columns, 3 classes"),
):
    register_data(_name, f"{_about}, part of scikit-learn: no download", "table")(
        partial(_classified, _name, _file, _columns)
    )


@register_data(
    "diabetes",
    "442 patients, 10 columns, a number to predict: disease progression, divided by 100; part of scikit-learn",
    "table",
)
def _diabetes() -> Dataset:
    rows, target = (_read(file) for file in ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz"))
    sex = DIABETES.index("sex")
    x = np.column_stack([np.delete(rows, sex, 1), rows[:, sex] - 1])  # categories come last, as numbers from 0
    return Dataset(
        name="diabetes",
        x=torch.from_numpy(x.astype(np.float32)),
        y=torch.from_numpy((target / HUNDRED).astype(np.float32)).view(-1, 1),
        classes=("progression",),
        kind="table",
        columns=(*(name for name in DIABETES if name != "sex"), "sex"),
        categories=(("1", "2"),),
    )


def _read(file: str) -> np.ndarray:
    with gzip.open(sklearn_file(file), "rt") as lines:
        return np.loadtxt(lines)
