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
from typing import Any

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.data.federated import Data, Store
from pluribus.data.given import take_rows
from pluribus.data.images import SUFFIXES, Found, Picture, Shape, decode_all, find_images, picture_notes, skipped_note
from pluribus.errors import ConflictError, DataError, FileAccessError, MissingDataError, MissingSettingError
from pluribus.evaluate import Answers, Metrics, rule_of
from pluribus.internal.metrics import LOSS
from pluribus.internal.steps import SWEEP_BATCH
from pluribus.internal.tables import csv_of, write_to
from pluribus.method import Method
from pluribus.storage.reopen import Round, check_client, check_round, open_run, trained_client


@dataclass(frozen=True)
class Prediction:
    """The class of one image."""

    file: str | None
    """None if the image was given in a tensor."""
    label: str
    number: int
    """The number of the class `label`."""
    score: float
    """The class's share in the softmax of the method's scores. It is the model's probability if the scores are logits.
    If they are distances, as in FedProto, it is only a number that grows as the distance shrinks."""


def _print_note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


def predict(
    path: str | Path,
    images: str | Path | Sequence[str | Path] | Tensor,
    client: int | None = None,
    round: Round = "selected",
    *,
    data: Any = None,
    models: Any = None,
    partition: Any = None,
    tell: Callable[[str], None] = _print_note,
) -> list[Prediction]:
    """Classify images with a model that a run has trained.

    `path` is the folder of a run, where `client` chooses the model, or the state folder of a real site. By default the
    model is that of the reported accuracy, from the round that validation selects; `round="last"` takes the last round.
    `images` are files and folders of images, which are resized to the shape that the model takes, or a tensor of bytes
    (N, channels, height, width) in that shape. `tell` is called with notes about the files: which ones were skipped,
    scaled or rotated. A run that was started with objects needs the same `data`, `models` and `partition` again.

    >>> predict("runs/a", ["scans/", "one.png"], client=0)             # doctest: +SKIP
    [Prediction(file='scans/1.png', label='7', number=7, score=0.93), ...]
    >>> [one.label for one in predict("state", torch.zeros(2, 1, 8, 8, dtype=torch.uint8))]      # doctest: +SKIP
    ['3', '3']
    """
    check_round(round)
    found, notes = (images, []) if isinstance(images, Tensor) else _files(images)
    pictures: list[Picture] = []
    objects = {"data": data, "models": models, "partition": partition}
    with _open_model(Path(path), client, round, objects) as (method, trained):
        _check(found, trained)
        channels, height, width = trained.task.shape
        batches = _batches(found, (channels, height, width), pictures)
        predictions = [one for files, x in batches for one in _predictions(method, trained, files, x)]
    if not isinstance(found, Tensor):
        notes += picture_notes(found, pictures)
    for sentence in notes:
        tell(sentence)
    return predictions


def measure_on(method: Method, client: Client, x: Any, y: Any) -> Metrics:
    """The metrics and the loss of a trained client on new rows, in the form of its training data."""
    images, labels = take_rows(x, y, client.task.names)
    if not len(images):
        raise MissingDataError("no images were given.")
    _check(images, client)
    store = Store(images, labels, client.device, client.local.channels_last)
    data = Data(store, torch.arange(len(images), device=client.device))
    answers = Answers.of(rule_of(method, method.views[0]), client, data)
    return answers.measure(client.task) | {LOSS: answers.mean_loss(client.task.target)}


def to_csv(predictions: Sequence[Prediction], path: Path) -> None:
    """Write predictions to a CSV file, one line each."""
    write_to(path, csv_of([asdict(one) for one in predictions]))


def _files(images: str | Path | Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """The given files, with all images of a given folder; and notes about other files in the folders."""
    given = [images] if isinstance(images, str | Path) else images
    if not given:
        raise MissingDataError("no images were given: give files, or folders of images.")
    found, notes = [], []
    for path in map(Path, given):
        if not path.exists():
            raise MissingDataError(f"there is no file or folder {path}.")
        inside = find_images(path) if path.is_dir() else Found([path], {})
        if not inside.images:
            raise MissingDataError(f"{path} holds no images. Names of images end in {', '.join(sorted(SUFFIXES))}.")
        found += inside.images
        notes += [f"{path}: {sentence}" for sentence in skipped_note(inside.skipped, path)]
    return found, notes


def _batches(
    images: Tensor | list[Path], shape: Shape, pictures: list[Picture]
) -> Iterator[tuple[Sequence[str | None], Tensor]]:
    """Batches of the size that evaluation uses, for the same bits. The facts about the files go to `pictures`."""
    for start in range(0, len(images), SWEEP_BATCH):
        some = images[start : start + SWEEP_BATCH]
        if isinstance(some, Tensor):
            yield [None] * len(some), some
        else:
            x, before = decode_all(some, shape)
            pictures += before
            yield [str(file) for file in some], x


def _check(images: Tensor | list[Path], trained: Client) -> None:
    shape = trained.task.shape
    wanted = " x ".join(map(str, shape))
    # the data of a real site, which it need not keep, are bytes
    dtype = next((rows.store.x.dtype for rows in trained.data.values()), torch.uint8)
    if not isinstance(images, Tensor):
        if shape[0] not in (1, 3):
            raise DataError(f"the model takes images of {wanted}, which image files cannot hold: give a tensor.")
    elif images.dtype != dtype or tuple(images.shape[1:]) != shape:
        kinds = [str(kind).removeprefix("torch.") for kind in (dtype, images.dtype)]
        given = f"{kinds[1]} {' x '.join(map(str, images.shape))}"
        raise DataError(f"the model takes images {kinds[0]} N x {wanted}, as it was trained; these are {given}.")


def _predictions(method: Method, client: Client, files: Sequence[str | None], x: Tensor) -> Iterator[Prediction]:
    store = Store(x, torch.zeros(len(x), dtype=torch.int64), client.device, client.local.channels_last)
    scores = client.sweep(method.predict, Data(store, torch.arange(len(x), device=client.device)))
    numbers = scores.argmax(1)  # of the scores: the softmax may round two of them to the same number
    shares = scores.softmax(1).gather(1, numbers[:, None]).flatten()
    for file, number, share in zip(files, numbers.tolist(), shares.tolist(), strict=True):
        yield Prediction(file, client.task.names[number], number, share)


@contextmanager
def _open_model(
    path: Path, client: int | None, round: Round, objects: dict[str, Any]
) -> Iterator[tuple[Method, Client]]:
    if not path.is_dir():
        raise FileAccessError(f"there is no folder {path}: give the folder of a run, or the state folder of a site.")
    if not (path / "config.toml").exists():
        if client is not None:
            raise ConflictError(f"{path} is not the folder of a run, and a site has one client: leave out --client.")
        from pluribus.sites.recall import recall_client

        with recall_client(path, round) as opened:
            yield opened
        return
    with open_run(path, **objects) as (parts, folder):
        if client is None:
            raise MissingSettingError(
                f"{path} has a model for each client: choose one with --client, 0 to {len(parts.cards) - 1}."
            )
        check_client(path, parts, client)
        with trained_client(parts, folder, client, round) as trained:
            yield parts.method, trained
