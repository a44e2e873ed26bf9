"""Tools of many tests: the conformance kit of the library, and a few that only tests need."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pluribus.client import Client, Step
from pluribus.conformance.bits import bits, differing, kept, numbers, run_difference, same_bits, selected, timeless
from pluribus.conformance.by_hand import ByHand
from pluribus.conformance.cases import StopAfter, StoppedError
from pluribus.conformance.steps import StepError, check_step, everything, step_name
from pluribus.data.federated import Data
from pluribus.internal.steps import Descent
from pluribus.method import Method
from pluribus.result import Result

__all__ = [
    "ByHand", "Memory", "StepError", "StopAfter", "StoppedError", "assert_same", "bits", "check_step", "checked_steps",
    "differing", "everything", "kept", "numbers", "same_bits", "selected", "timeless",
]  # fmt: skip


def assert_same(one: Result, other: Result) -> None:
    """Equal metrics, traffic and weights, to the bit."""
    assert run_difference(one, other) is None
    assert selected(one)


@contextmanager
def checked_steps(method: Method) -> Iterator[list[str]]:
    """Check every step where it is used: on client 0 up to round 0, on client 1 in round 1, when messages came down.

    Gives the names of the checked steps.
    """
    checked: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    fit = Client.fit

    def watched(client: Client, step: Step, on: str | Data = "train", **how: Any) -> int:
        key = getattr(step, "__func__", step), how.get("opts"), client.card.id
        if client.card.id == max(0, client.t) and key not in seen:
            seen.add(key)
            data = client.data[on] if isinstance(on, str) else on
            taken = Descent(step, how["opts"]) if how.get("opts") else step
            check_step(method, client, taken, data, how.get("batch") or client.local.batch)
            checked.append(step_name(step))
        return fit(client, step, on, **how)

    Client.fit = watched  # type: ignore[method-assign, assignment]
    try:
        yield checked
    finally:
        Client.fit = fit  # type: ignore[method-assign]


# ---- memory ----------------------------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as they live; `peak` is the most at one time."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes = {value.untyped_storage()._cdata: 0 for value in known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, which: int) -> None:
        self._now -= self._sizes.pop(which)
