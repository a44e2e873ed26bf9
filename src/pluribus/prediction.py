"""Use a trained model: of one client of a simulation, or of a real site.

A prediction is made in the same way as the run's accuracy was measured: by the method's own rule, with the model of the
headline, from the round that validation selects or from the last round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.assembly import Assembly
from pluribus.client import Client
from pluribus.data.dataset import FORMS, Dataset
from pluribus.data.datasets import are_read_by_settings
from pluribus.data.federated import Data, Store
from pluribus.data.files import is_sheet
from pluribus.data.given import take_rows
from pluribus.data.images import SUFFIXES, Found, Picture, decode_all, find_images, picture_notes, skipped_note
from pluribus.data.new_rows import read_rows
from pluribus.data.reading import Reading
from pluribus.errors import (
    ConflictError,
    DataError,
    FileAccessError,
    MismatchError,
    MissingDataError,
    MissingSettingError,
)
from pluribus.evaluate import Answers, Metrics, rule_of
from pluribus.inputs import MANY, PADDING, Kind
from pluribus.internal.metrics import LOSS
from pluribus.internal.paths import to_path
from pluribus.internal.steps import SWEEP_BATCH
from pluribus.internal.tables import csv_of, write_to
from pluribus.method import Method
from pluribus.storage.code import Allow
from pluribus.storage.reopen import Round, check_client, check_round, open_run, server_model, trained_client


@dataclass(frozen=True)
class Prediction:
    """The class of one row."""

    file: str | None
    """The file of an image. None if the row was given in an array."""
    label: str
    number: int
    """The number of the class `label`."""
    score: float
    """The class's share in the softmax of the method's scores. It is the model's probability if the scores are logits.
    If they are distances, as in FedProto, it is only a number that grows as the distance shrinks."""


@dataclass(frozen=True)
class LabelsPrediction:
    """The labels of one row, of which it may have several."""

    file: str | None
    labels: tuple[str, ...]
    """The labels whose share is above one half."""
    shares: dict[str, float]
    """The model's probability of every label."""


@dataclass(frozen=True)
class NumbersPrediction:
    """The numbers that are predicted for one row, by name."""

    file: str | None
    numbers: dict[str, float]


AnyPrediction = Prediction | LabelsPrediction | NumbersPrediction


def _print_note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


def predict(
    path: str | Path,
    rows: str | Path | Sequence[str | Path] | Tensor | np.ndarray,
    client: int | None = None,
    round: Round = "selected",
    *,
    server: bool = False,
    data: Any = None,
    models: Any = None,
    partition: Any = None,
    public_data: Any = None,
    allow_code: Allow = False,
    tell: Callable[[str], None] = _print_note,
) -> list[Prediction] | list[LabelsPrediction] | list[NumbersPrediction]:
    """Predict with a model that a run has trained: the class of each row, its labels, or numbers.

    `path` is the folder of a run, where `client` chooses the model, or the state folder of a real site. By default the
    model is that of the reported accuracy, from the round that validation selects; `round="last"` takes the last round.
    `server` takes the server's model of the last round, for methods that have one; `client` is then needed only if each
    client normalizes by its own rows, or if the server has one model per architecture.
    `rows` are an array or a tensor in the form of the run's data: bytes of images (N, channels, height, width), raw
    signals, ids of tokens, or tables. They are normalized as those of the client were. Images may also be files and
    folders, and are resized to the shape that the model takes. Tables, texts and signals may also be files, if the run
    read its data from a file with the same columns; labels are not needed. `tell` is called with notes about the files:
    which ones were skipped, scaled or rotated. A run that was started with objects needs the same `data`, `models`,
    `partition` and `public_data` again. `allow_code` lets the folder name your own code: all of it, or a list of dotted
    paths.

    >>> predict("runs/a", ["scans/", "one.png"], client=0)             # doctest: +SKIP
    [Prediction(file='scans/1.png', label='7', number=7, score=0.93), ...]
    >>> [one.label for one in predict("state", torch.zeros(2, 1, 8, 8, dtype=torch.uint8))]      # doctest: +SKIP
    ['3', '3']
    """
    check_round(round)
    notes: list[str] = []
    found = torch.as_tensor(rows) if isinstance(rows, Tensor | np.ndarray) else _paths(rows)
    objects = {"data": data, "models": models, "partition": partition, "public_data": public_data}
    with _open_model(to_path(path), client, round, server, allow_code, objects) as (method, trained, source):
        if isinstance(found, Tensor):
            batches = _array_batches([None] * len(found), take_form(found, trained))
        elif trained.task.input.kind == "image":
            batches = _image_batches(_find_images(found, trained, notes), trained.task.shape, notes)
        else:
            batches = _array_batches(*_read_files(found, trained, source, notes))
        predictions = [one for files, x in batches for one in _predictions(method, trained, files, x)]
    for sentence in notes:
        tell(sentence)
    return predictions  # type: ignore[return-value]  # all are of one class


def measure_on(method: Method, client: Client, x: Any, y: Any) -> Metrics:
    """The metrics and the loss of a trained client on new rows, in the form of its training data."""
    rows, labels = take_rows(x, y, client.task.names, client.task.input, client.task.target.kind)
    if not len(rows):
        raise MissingDataError("no rows were given.")
    data = _as_data(client, take_form(rows, client), labels)
    answers = Answers.of(rule_of(method, method.views[0]), client, data)
    return answers.measure(client.task) | {LOSS: answers.mean_loss(client.task.target)}


def to_csv(predictions: Sequence[AnyPrediction], path: Path) -> None:
    """Write predictions to a CSV file, one line each."""
    write_to(path, csv_of([flat_row(one) for one in predictions]))


def flat_row(prediction: AnyPrediction) -> dict[str, Any]:
    """A prediction as a row of a table. Shares and numbers have a column each."""
    if isinstance(prediction, LabelsPrediction):
        shares = {f"share {name}": share for name, share in prediction.shares.items()}
        return {"file": prediction.file, "labels": ", ".join(prediction.labels), **shares}
    if isinstance(prediction, NumbersPrediction):
        return {"file": prediction.file, **prediction.numbers}
    return asdict(prediction)


def _paths(given: str | Path | Sequence[str | Path]) -> list[Path]:
    paths = [to_path(one) for one in ([given] if isinstance(given, str | Path) else given)]
    if not paths:
        raise MissingDataError("no rows were given: give files, or folders of images.")
    for path in paths:
        if not path.exists():
            raise MissingDataError(f"there is no file or folder {path}.")
    return paths


Batches = Iterator[tuple[Sequence[str | None], Tensor]]  # of the size that evaluation uses, for the same bits


def _array_batches(files: Sequence[str | None], x: Tensor) -> Batches:
    for start in range(0, len(x), SWEEP_BATCH):
        yield files[start : start + SWEEP_BATCH], x[start : start + SWEEP_BATCH]


def _find_images(paths: list[Path], trained: Client, notes: list[str]) -> list[Path]:
    """The given files, with all images of a given folder. Other files in the folders are noted."""
    if trained.task.shape[0] not in (1, 3):
        wanted = " x ".join(map(str, trained.task.shape))
        raise DataError(f"the model takes images of {wanted}, which image files cannot hold: give a tensor.")
    found: list[Path] = []
    for path in paths:
        inside = find_images(path) if path.is_dir() else Found([path], {})
        if not inside.images:
            raise MissingDataError(f"{path} holds no images. Names of images end in {', '.join(sorted(SUFFIXES))}.")
        found += inside.images
        notes += [f"{path}: {sentence}" for sentence in skipped_note(inside.skipped, path)]
    return found


def _image_batches(files: list[Path], shape: tuple[int, ...], notes: list[str]) -> Batches:
    pictures: list[Picture] = []
    channels, height, width = shape
    for start in range(0, len(files), SWEEP_BATCH):
        some = files[start : start + SWEEP_BATCH]
        x, before = decode_all(some, (channels, height, width))
        pictures += before
        yield [str(file) for file in some], x
    notes += picture_notes(files, pictures)


class Source(NamedTuple):
    """The data of a run, and how they were read from a file."""

    dataset: Dataset
    reading: Reading


def _read_files(
    paths: list[Path], trained: Client, source: Source | None, notes: list[str]
) -> tuple[list[str | None], Tensor]:
    """Rows of files with columns, and where each begins: the file, and its row from 1."""
    row = trained.task.input
    for path in paths:
        if not is_sheet(path) or path.is_dir():
            raise MismatchError(f"the model takes {row}: give files with columns, or an array in Python, not {path}.")
        if source is None:
            raise MismatchError(f"how {row} are read from {path} is not known here: give an array, in Python.")
    assert source is not None
    found = [read_rows(path, source.reading, source.dataset) for path in paths]
    notes += [f"{path}: {note}" for path, one in zip(paths, found, strict=True) for note in one.notes]
    names: list[str | None] = [f"{path}:{at}" for path, one in zip(paths, found, strict=True) for at in one.first]
    return names, take_form(torch.cat([one.x for one in found]), trained)


def take_form(x: Tensor, trained: Client) -> Tensor:
    """Rows in the form in which the run stores its data. Rows of another form are refused."""
    row, dtype = trained.task.input, _stored_dtype(trained)
    if row.kind == "tokens" and x.dim() == 2 and x.shape[1] < row.shape[0]:
        x = F.pad(x, (0, row.shape[0] - x.shape[1]), value=PADDING)
    if tuple(x.shape[1:]) != row.shape or not _converts(x.dtype, dtype, row.kind):
        kinds = [str(kind).removeprefix("torch.") for kind in (dtype, x.dtype)]
        wanted, given = (" x ".join(map(str, shape)) for shape in (row.shape, x.shape))
        raise DataError(
            f"the model takes {MANY[row.kind]} {kinds[0]} N x {wanted}, as it was trained; these are {kinds[1]} "
            f"{given}."
        )
    if len(x) and row.kind == "tokens" and not 0 <= int(x.min()) <= int(x.max()) < row.vocabulary:  # before ids wrap
        raise DataError(f"ids of tokens must be in 0..{row.vocabulary - 1}, as the model was trained.")
    x = x.detach().cpu().to(dtype)
    if len(x):  # a data set checks its rows
        values = tuple(tuple(map(str, range(count))) for count in row.categories)
        about: dict[str, Any] = {"kind": row.kind, "vocabulary": row.vocabulary, "categories": values}
        Dataset("to predict", x, torch.zeros(len(x), dtype=torch.int64), ("any",), **about)
    return x


def _stored_dtype(trained: Client) -> torch.dtype:
    """The type of the run's rows. A real site need not keep its rows: its images are bytes."""
    row = trained.task.input
    usual = {"image": torch.uint8, "tokens": torch.int32}.get(row.kind, row.dtype)
    stored = next((rows.store.x.dtype for rows in trained.data.values()), usual)
    return stored if stored in FORMS[row.kind][0] else usual


def _converts(given: torch.dtype, stored: torch.dtype, kind: Kind) -> bool:
    """Whether rows of a type may become rows of another. Bytes and numbers mean different pixels."""
    if kind == "image" or given.is_complex or given == torch.bool:
        return given == stored
    return stored.is_floating_point or not given.is_floating_point


def _as_data(client: Client, x: Tensor, labels: Tensor) -> Data:
    """New rows as a set of the client, normalized like its own."""
    store = Store(x, labels, client.device, client.local.channels_last)
    scale = next((rows.scale for rows in client.data.values()), None)
    return Data(store, torch.arange(len(x), device=client.device), scale)


def _predictions(method: Method, client: Client, files: Sequence[str | None], x: Tensor) -> Iterator[AnyPrediction]:
    names, target = client.task.names, client.task.target
    scores = client.sweep(method.predict, _as_data(client, x, torch.zeros(len(x), dtype=torch.int64)))
    if target.kind == "classes":
        numbers = scores.argmax(1)  # of the scores: the softmax may round two of them to the same number
        shares = scores.softmax(1).gather(1, numbers[:, None]).flatten()
        for file, number, share in zip(files, numbers.tolist(), shares.tolist(), strict=True):
            yield Prediction(file, names[number], number, share)
        return
    chosen, values = target.predict(scores).tolist(), target.posterior(scores).tolist()
    for file, held, numbers_of in zip(files, chosen, values, strict=True):
        by_name = dict(zip(names, numbers_of, strict=True))
        if target.kind == "labels":
            yield LabelsPrediction(file, tuple(n for n, has in zip(names, held, strict=True) if has), by_name)
        else:
            yield NumbersPrediction(file, by_name)


@contextmanager
def _open_model(
    path: Path, client: int | None, round: Round, server: bool, allow: Allow, objects: dict[str, Any]
) -> Iterator[tuple[Method, Client, Source | None]]:
    if not path.is_dir():
        raise FileAccessError(f"there is no folder {path}: give the folder of a run, or the state folder of a site.")
    if not (path / "config.toml").exists():
        if server:
            raise ConflictError(f"{path} is not the folder of a run, and a site has no model of the server.")
        if client is not None:
            raise ConflictError(f"{path} is not the folder of a run, and a site has one client: leave out --client.")
        from pluribus.sites.recall import recall_client

        with recall_client(path, round, allow) as opened:
            yield *opened, None
        return
    with open_run(path, allow, **objects) as (parts, folder):
        if client is None and not server:
            raise MissingSettingError(
                f"{path} has a model for each client: choose one with --client, 0 to {len(parts.cards) - 1}."
            )
        if client is not None:
            check_client(path, parts, client)
        if client is None or server:
            with server_model(parts, folder, client) as guest:
                yield parts.method, guest, _find_source(parts)
            return
        with trained_client(parts, folder, client, round) as trained:
            yield parts.method, trained, _find_source(parts)


def _find_source(parts: Assembly) -> Source | None:
    """How the run's data were read. None if settings do not decide that: then tokens may have been made elsewhere."""
    if parts.dataset.kind == "tokens" and not are_read_by_settings(parts.experiment.data):
        return None
    return Source(parts.dataset, parts.experiment.reading())
