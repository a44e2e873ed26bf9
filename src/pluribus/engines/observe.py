"""What a recording could not hold, found out while a step runs as written for the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pluribus.client import Client

OWN = ("id", "samples")  # of a card: what differs between clients of one architecture


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations of one thread; `reason` is the first that could not be recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation happen, with a look at it."""
        result = func(*args, **(kwargs or {}))
        self.reason = self.reason or _obstacle(func, args, result)
        return result


def _obstacle(func: Any, args: tuple[Any, ...], result: Any) -> str | None:
    name = func.overloadpacket.__name__
    if torch.Tag.data_dependent_output in func.tags:
        return f"it looks at a number ({name})"
    if torch.Tag.dynamic_output_shape in func.tags and not _by_number(func, args):
        return f"the size of a result depends on numbers ({name})"
    if name in ("_to_copy", "copy_"):
        devices = {value.device.type for value in (*args, result) if isinstance(value, Tensor)}
        if len(devices) > 1:
            return "it copies between the CPU and the GPU"
    return None


def _by_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is indexing by row numbers; by a mask the result's size would be unknown."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and all(i is None or i.dtype not in masks for i in args[1])


class CardOfAnyone:
    """A card that notes when someone reads what a recording would keep for all clients of an architecture."""

    def __init__(self, card: Any, watch: Observed) -> None:
        self._card = card
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        if name in OWN:
            self._watch.reason = self._watch.reason or f"it reads client.card.{name}, which belongs into client.state"
        return getattr(self._card, name)


@contextmanager
def observed(client: Client) -> Iterator[Observed]:
    """Watch what a client's step or map does."""
    card = client.card
    with Observed() as watch:
        client.card = CardOfAnyone(card, watch)  # type: ignore[assignment]
        try:
            yield watch
        finally:
            client.card = card
