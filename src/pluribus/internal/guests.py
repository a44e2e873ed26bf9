"""Models that belong to no client, evaluated on the rows of clients.

A guest is a client with a model of the server: the same rows, normalization and rule of prediction.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from pluribus.client import Client, Local, Sets
from pluribus.message import decode, schema_of
from pluribus.request import Published
from pluribus.task import Card, Task


class Guests:
    """One guest for each architecture of the server. It takes the place of one client after the other."""

    def __init__(self, task: Task, local: Local, device: torch.device) -> None:
        self._task, self._local, self._device = task, local, device
        self._known: dict[str, Client] = {}
        self._loaded: dict[str, bytes] = {}
        self._lock = threading.Lock()  # clients on a GPU are evaluated by several threads

    @contextmanager
    def seat(self, view: str, published: Published, card: Card, sets: Sets) -> Iterator[Client]:
        """A model of the server in the place of a client."""
        name = published.model
        with self._lock:
            if name not in self._known:
                self._known[name] = self._make(name, card, sets)
            guest = self._known[name]
            guest.take_over(replace(card, model=name), sets)
            if self._loaded.get(name) != published.tensors:
                schema = schema_of(self._task.shape_of(name), view)
                guest.model.load_state_dict(decode(published.tensors, schema, f"the server's model {name}").part(view))
                self._loaded[name] = published.tensors
            yield guest

    def _make(self, name: str, card: Card, sets: Sets) -> Client:
        model, (data, public, exams) = self._task.start(name), sets
        card = replace(card, model=name)
        guest = Client(card, self._task, model, data, self._local, self._device, public=public, exams=exams)
        guest.state.fix()
        guest.equip({}, {})
        return guest
