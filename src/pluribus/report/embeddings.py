"""Features of test rows in the models of a run, reduced to two dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from pluribus.assembly import Assembly
from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.errors import CheckpointError, NoModelError, PluribusError
from pluribus.host import Host, make_host
from pluribus.report.groups import Group, group_runs, seeds_text
from pluribus.report.numbers import Run
from pluribus.storage.code import Allow
from pluribus.storage.reopen import open_run

How = Literal["tsne", "pca", "none"]

MOST_IMAGES = 300  # per client
MOST_CLIENTS = 4
MOST_GROUPS = 12  # methods, or rows of a comparison
FEWEST = 3  # points of a plot


@dataclass(frozen=True)
class Embedding:
    """Points in the plane, with their labels."""

    name: str
    says: str
    points: list[tuple[float, float]]
    labels: list[int]
    classes: tuple[str, ...]
    where: list[str]  # for each point, the test set and the client whose model computed it


def embed(runs: Sequence[Run], how: How, allow: Allow = False) -> tuple[list[Embedding], str]:
    """Compute the features of the first seed of each group, if it has a checkpoint. Return why others have none."""
    if how == "none":
        return [], "Features are switched off. --embeddings pca or tsne shows them."
    found, reasons = list[Embedding](), list[str]()
    groups = group_runs(runs)
    for run in [group.first for group in groups[:MOST_GROUPS]]:
        try:
            found += _embed_run(run, how, allow)
        except PluribusError as error:
            reasons.append(f"No features of {run.name}: {error.sentence}")
    left_out = _about_left_out(groups)
    return [replace(one, says=f"{one.says}{left_out}") for one in found], " ".join(reasons)


def _about_left_out(groups: Sequence[Group]) -> str:
    """Say which runs have no features, after another sentence."""
    seeds = " Of several seeds, the first is shown." if seeds_text(groups) else ""
    return f"{seeds} Shown are {MOST_GROUPS} of {len(groups)} rows." if len(groups) > MOST_GROUPS else seeds


def _embed_run(run: Run, how: How, allow: Allow) -> Iterator[Embedding]:
    with open_run(run.path, allow) as (parts, folder):
        latest = folder.checkpoint.latest
        if latest is None:
            raise NoModelError(f"{run.path} holds no trained model: no round was saved, or its state was deleted.")
        host = make_host(parts, folder.checkpoint.client)
        seen = [_features(host, latest, k) for k in range(min(parts.task.clients, MOST_CLIENTS))]
    says = _caption(parts, how)
    if parts.task.width is not None and len(seen) > 1:
        yield from _embed(f"{run.name}, together", says, seen, parts, how)
    for k, one in enumerate(seen):
        yield from _embed(f"{run.name}, client {run.client(k)}", says, [one], parts, how)


def _caption(parts: Assembly, how: How) -> str:
    whose = "the test rows of all domains" if parts.task.exams else "the client's own test rows"
    axes = "PCA to two principal components" if how == "pca" else "t-SNE, in which only neighborhoods have a meaning"
    return (
        f"Features of {whose} (at most {MOST_IMAGES}) before the head of a client's model in the last checkpoint, "
        f"reduced by {axes}. Colors are classes. The first {MOST_CLIENTS} clients are shown; the plot 'together' has "
        "the features of all of them, each from the client's own model."
    )


Seen = tuple[torch.Tensor, torch.Tensor, list[str]]  # features, labels, sources


def _features(host: Host, t: int, k: int) -> Seen:
    with host.open_view(t, k, "after", None) as client:
        sets = {f"{name}, " if client.exams else "": some for name, some in _sets(client).items()}
        features = torch.cat([client.sweep(Client.features, data).flatten(1) for data in sets.values()])
        labels = torch.cat([data.labels() for data in sets.values()])
        where = [f"{name}client {k}" for name, data in sets.items() for _ in range(len(data))]
    return features, labels, where


def _sets(client: Client) -> dict[str, Data]:
    """The test sets of all domains, or the client's own. Large sets are reduced to evenly spaced rows."""
    tests = {name: exam["test"] for name, exam in client.exams.items()} or {"own": client.data["test"]}
    most = MOST_IMAGES // len(tests)
    return {name: Data(data.store, data.rows[:: -(-len(data) // most) or 1]) for name, data in tests.items()}


def _embed(name: str, says: str, seen: Sequence[Seen], parts: Assembly, how: How) -> Iterator[Embedding]:
    features = torch.cat([one[0] for one in seen]).numpy()
    labels = torch.cat([one[1] for one in seen]).tolist()
    if len(features) < FEWEST:
        return
    if not np.isfinite(features).all():
        raise CheckpointError("they are not finite because training diverged.")
    points = [(x, y) for x, y in (_pca(features) if how == "pca" else _tsne(features)).round(4).tolist()]
    yield Embedding(name, says, points, labels, parts.task.names, [source for one in seen for source in one[2]])


def _pca(features: np.ndarray) -> np.ndarray:
    centred = features.astype(np.float64) - features.mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    flat: np.ndarray = left[:, :2] * scale[:2]
    return flat if flat.shape[1] == 2 else np.pad(flat, ((0, 0), (0, 1)))


def _tsne(features: np.ndarray) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(features) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="random", random_state=0)  # type: ignore[no-untyped-call]
    return tsne.fit_transform(features)  # type: ignore[no-any-return]
