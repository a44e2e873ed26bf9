"""What the models of a run make of test images: their features, brought down to two dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from pluribus.assembly import Assembly
from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.errors import CheckpointError, NoModelError, PluribusError
from pluribus.host import Host, make_host
from pluribus.report.numbers import Run
from pluribus.storage.reopen import open_run

How = Literal["tsne", "pca", "none"]

MOST_IMAGES = 300  # for each client
MOST_CLIENTS = 4
FEWEST = 3  # points that make a picture


@dataclass(frozen=True)
class Embedding:
    """Points in the plane, and what they are."""

    name: str
    says: str
    points: list[tuple[float, float]]
    labels: list[int]
    classes: tuple[str, ...]
    where: list[str]
    """Of each point, whose image it is and whose model saw it."""


def embed(runs: Sequence[Run], how: How) -> tuple[list[Embedding], str]:
    """Features of every run that has a checkpoint, and why there are none of the others."""
    if how == "none":
        return [], "Features were not asked for: --embeddings pca or tsne shows them."
    found: list[Embedding] = []
    reasons: list[str] = []
    for run in runs:
        try:
            found += _of_run(run, how)
        except PluribusError as error:
            reasons.append(f"No features of {run.name}: {error}")
    return found, " ".join(reasons)


def _of_run(run: Run, how: How) -> Iterator[Embedding]:
    with open_run(run.path) as (parts, folder):
        latest = folder.checkpoint.latest
        if latest is None:
            raise NoModelError(f"{run.path} holds no trained model: no round was saved, or its state was deleted.")
        host = make_host(parts, folder.checkpoint.client)
        seen = [_features(host, latest, k) for k in range(min(parts.task.clients, MOST_CLIENTS))]
    says = _sentence(parts, how)
    if parts.task.width is not None and len(seen) > 1:
        yield from _picture(f"{run.name}, together", says, seen, parts, how)
    for k, one in enumerate(seen):
        yield from _picture(f"{run.name}, client {run.client(k)}", says, [one], parts, how)


def _sentence(parts: Assembly, how: How) -> str:
    whose = "all domains' test images" if parts.task.exams else "its own test images"
    axes = "the two principal components (PCA)" if how == "pca" else "t-SNE, where only neighbourhoods mean something"
    return (
        f"What a client's model, as the last checkpoint has it, makes of {whose} (at most {MOST_IMAGES}): the features "
        f"before its head, by {axes}. Colours are classes. The first {MOST_CLIENTS} clients are shown; together means "
        "that the features of all of these are in one picture, each client's from its own model."
    )


Seen = tuple[torch.Tensor, torch.Tensor, list[str]]  # features, labels, where


def _features(host: Host, t: int, k: int) -> Seen:
    with host.viewed(t, k, "after", None) as client:
        sets = {f"{name}, " if client.exams else "": some for name, some in _sets(client).items()}
        features = torch.cat([client.sweep(Client.features, data).flatten(1) for data in sets.values()])
        labels = torch.cat([data.labels() for data in sets.values()])
        where = [f"{name}client {k}" for name, data in sets.items() for _ in range(len(data))]
    return features, labels, where


def _sets(client: Client) -> dict[str, Data]:
    """The test sets of all domains, or the client's own; evenly spaced rows where that is too many."""
    tests = {name: exam["test"] for name, exam in client.exams.items()} or {"own": client.data["test"]}
    most = MOST_IMAGES // len(tests)
    return {name: Data(data.store, data.rows[:: -(-len(data) // most) or 1]) for name, data in tests.items()}


def _picture(name: str, says: str, seen: Sequence[Seen], parts: Assembly, how: How) -> Iterator[Embedding]:
    features = torch.cat([one[0] for one in seen]).numpy()
    labels = torch.cat([one[1] for one in seen]).tolist()
    if len(features) < FEWEST:
        return
    if not np.isfinite(features).all():
        raise CheckpointError("they are not finite, training has diverged.")
    points = [(x, y) for x, y in (_pca(features) if how == "pca" else _tsne(features)).round(4).tolist()]
    where = [place for one in seen for place in one[2]]
    yield Embedding(name, says, points, labels, parts.task.names, where)


def _pca(features: np.ndarray) -> np.ndarray:
    centred = features.astype(np.float64) - features.mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    flat: np.ndarray = left[:, :2] * scale[:2]
    return flat if flat.shape[1] == 2 else np.pad(flat, ((0, 0), (0, 1)))


def _tsne(features: np.ndarray) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(features) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="random", random_state=0)  # type: ignore[no-untyped-call]
    flat: np.ndarray = tsne.fit_transform(features)
    return flat
