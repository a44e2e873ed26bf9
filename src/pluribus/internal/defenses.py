"""Defenses against clients that lie: what a server, or a student of peers, makes of messages before it merges them.

Plain tensors are compared between messages with the same fields and shapes. Class-keyed vectors are compared class by
class, over the clients that hold the class. Integers (counts, labels) stay as they are. All results depend on the
values alone, not on the order of clients; of equal scores, the smaller client number wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pluribus.internal.vectors import Tensors, floats, length, shortened, starts
from pluribus.message import Message, Rows

Name = Literal["none", "median", "trimmed-mean", "clip", "krum"]
DEFENSES: tuple[str, ...] = get_args(Name)[1:]
SHARED = ("trimmed-mean", "krum")  # defenses that expect a share of liars
SHARE = 0.2
FEWEST = 3  # messages: of two that differ, nobody knows which one lies

Parts = Mapping[int, Tensors]  # of clients
NOTHING: Parts = MappingProxyType({})
Layout = tuple[tuple[str, tuple[int, ...]], ...]


class Defense(NamedTuple):
    """A defense, and the share of clients that it expects to lie."""

    name: Name
    share: float = SHARE

    def of_messages(self, messages: Mapping[int, Message], about: Parts = NOTHING) -> dict[int, Message]:
        """Messages as they are merged. A message that is not trusted at all is left out.

        `about` has the tensors that each client started from: clipping bounds the distance to them.
        """
        if self.name == "none":
            return dict(messages)
        plain = {k: {n: v for n, v in one.items() if isinstance(v, Tensor)} for k, one in messages.items()}
        rows: dict[int, dict[str, Rows]] = {k: {} for k in messages}
        for name in dict.fromkeys(name for one in messages.values() for name in one):
            sent = {k: value for k, one in messages.items() if isinstance(value := one.get(name), Rows)}
            for k, defended in self._of_rows(sent).items():
                rows[k][name] = defended
        return {k: Message({**tensors, **rows[k]}) for k, tensors in self.of_tensors(plain, about).items()}

    def of_tensors(self, parts: Parts, about: Parts = NOTHING) -> dict[int, Tensors]:
        """Plain tensors as they are merged. Integers stay as they are."""
        found = dict(parts)
        if self.name == "none":
            return found
        for clients in _alike(parts):
            sent = {k: floats(parts[k]) for k in clients}
            kept = self._of_vectors(sent, {k: starts(sent[k], about.get(k, {})) for k in clients})
            for k in clients:
                if k in kept:
                    found[k] = {**parts[k], **kept[k]}
                else:
                    del found[k]
        return found

    def liars(self, messages: int) -> int:
        """Number of liars that are expected among so many messages: always less than half."""
        return min(math.ceil(self.share * messages - 1e-9), (messages - 1) // 2)

    def _of_vectors(self, parts: Parts, about: Parts) -> Parts:
        """The vectors of clients with one layout. A client that is not in the result is not trusted."""
        if self.name == "clip":
            return _clip(parts, about)
        if self.name == "krum":
            return {k: parts[k] for k in self._trusted(parts)}
        first = next(iter(parts.values()))
        center = {name: self._center([one[name] for one in parts.values()]) for name in first}
        return dict.fromkeys(parts, center)

    def _of_rows(self, sent: Mapping[int, Rows]) -> dict[int, Rows]:
        """The class-keyed vectors of all clients, each class by itself."""
        found = {k: Rows(rows.value.clone(), rows.held.clone()) for k, rows in sent.items()}
        for c in range(max((len(rows.held) for rows in sent.values()), default=0)):
            holders = {k: {"": rows.value[c]} for k, rows in sent.items() if rows.held[c]}
            if not holders:
                continue
            kept = self._of_vectors(holders, NOTHING)
            for k in holders:
                found[k].value[c] = kept[k][""] if k in kept else 0.0
                found[k].held[c] = k in kept
        return found

    def _center(self, values: Sequence[Tensor]) -> Tensor:
        """One value in place of all: the median or trimmed mean of each number."""
        ordered, n = torch.stack(list(values)).sort(0).values, len(values)
        if self.name == "median":
            return torch.lerp(ordered[(n - 1) // 2], ordered[n // 2], 0.5)
        cut = self.liars(n)
        return ordered[cut : n - cut].mean(0)

    def _trusted(self, parts: Parts) -> list[int]:
        """Multi-Krum (Blanchard et al., NeurIPS 2017): the n - f clients with the lowest scores."""
        clients = sorted(parts)
        liars = min(self.liars(len(clients)), (len(clients) - FEWEST) // 2)
        if liars < 1:
            return clients
        scores = dict(zip(clients, krum_scores([parts[k] for k in clients], liars), strict=True))
        return sorted(sorted(clients, key=lambda k: scores[k])[: len(clients) - liars])


UNDEFENDED = Defense("none")


def krum_scores(vectors: Sequence[Tensors], liars: int) -> list[float]:
    """The score of each vector: the sum of the squared distances to its n - f - 2 nearest neighbors."""
    n = len(vectors)
    squared = torch.zeros(n, n, dtype=torch.float64)
    for name in vectors[0]:
        stack = torch.stack([one[name].double().flatten() for one in vectors])
        squared += torch.cdist(stack, stack, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = squared.sort(1).values[:, 1 : n - liars - 1]  # the first one is the distance to itself
    return nearest.sum(1).tolist()


def _clip(parts: Parts, about: Parts) -> dict[int, Tensors]:
    """Shorten each vector to the median length of all."""
    begun = {k: about.get(k, {}) for k in parts}
    lengths = {k: length(one, begun[k]) for k, one in parts.items()}
    most = median(lengths.values())
    longer = {k: most / found for k, found in lengths.items() if found > most}
    return {k: _scaled(one, begun[k], longer[k]) if k in longer else one for k, one in parts.items()}


def _scaled(vector: Tensors, start: Tensors, factor: float) -> dict[str, Tensor]:
    return {name: value.to(vector[name].dtype) for name, value in shortened(vector, start, factor).items()}


def _alike(parts: Parts) -> list[list[int]]:
    """The clients by the layout of their plain tensors. Those that sent none are left out."""
    groups: dict[Layout, list[int]] = {}
    for k, fields in parts.items():
        layout = tuple(sorted((name, tuple(value.shape)) for name, value in floats(fields).items()))
        if layout:
            groups.setdefault(layout, []).append(k)
    return list(groups.values())
