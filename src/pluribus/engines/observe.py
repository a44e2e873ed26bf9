"""Find operations that cannot be recorded, while a step runs as written for the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pluribus.client import Client
from pluribus.server import Server
from pluribus.task import Card

CHANGING = ("t", "now", "notes", "draw", "make")  # of a server: other numbers in every round
OWN = ("id", "samples")  # fields of a card that differ between clients of one architecture


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations of one thread. `reason` describes the first that cannot be recorded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no part of this is compiled, and torch's compiler takes a second to import

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.reason = self.reason or _find_obstacle(func, args, result)
        return result


def _find_obstacle(func: Any, args: tuple[Any, ...], result: Any) -> str | None:
    name = func.overloadpacket.__name__
    if torch.Tag.data_dependent_output in func.tags:
        return f"it reads a value of a tensor ({name})"
    if torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_number(func, args):
        return f"the shape of a result depends on values ({name})"
    if name in ("_to_copy", "copy_"):
        devices = {value.device.type for value in (*args, result) if isinstance(value, Tensor)}
        if len(devices) > 1:
            return "it copies between the CPU and the GPU"
    return None


def _indexes_by_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is indexing by row numbers. With a mask, the shape of the result would depend on values."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and all(i is None or i.dtype not in masks for i in args[1])


@dataclass(eq=False)
class WatchedCard:
    """A card that notes reads of fields that differ between clients. A recording would freeze their values."""

    _card: Card
    _watch: Observed

    def __getattr__(self, name: str) -> Any:
        if name in OWN:
            self._watch.reason = self._watch.reason or f"it reads client.card.{name}: copy it to client.state"
        return getattr(self._card, name)


@contextmanager
def observe_step(client: Client, operations: bool = True) -> Iterator[Observed]:
    """Watch a client's step or map: what it reads of its card, and, unless another client of its architecture has shown
    them, its operations."""
    card, watch = client.card, Observed()
    with watch if operations else nullcontext():
        client.card = WatchedCard(card, watch)  # type: ignore[assignment]
        try:
            yield watch
        finally:
            client.card = card


class ServerObserved(Observed):  # type: ignore[no-untyped-call]
    """Also finds numbers on the CPU among tensors on a GPU: a recording would freeze them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {value.device.type for value in args if isinstance(value, Tensor)}
        if len(devices) > 1 and func.overloadpacket.__name__ != "copy_":
            what = f"it reads a tensor on the CPU ({func.overloadpacket.__name__}): pass it through given"
            self.reason = self.reason or what
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(eq=False)
class WatchedServer:
    """A server that notes reads of what changes between rounds. A recording would freeze it."""

    _server: Server
    _watch: Observed

    def __getattr__(self, name: str) -> Any:
        if name in CHANGING:
            self._watch.reason = self._watch.reason or f"it reads server.{name}: pass what changes through given"
        return getattr(self._server, name)


@contextmanager
def observe_server(server: Server) -> Iterator[tuple[Server, Observed]]:
    """Watch a step of the server: pass it the server that comes from here."""
    with ServerObserved() as watch:
        yield WatchedServer(server, watch), watch  # type: ignore[misc]
