"""How a model draws its initial weights: a list of tensor operations that can be repeated with another key.

Constructors draw from torch's global generator, so that only one model can be built at a time. A recipe draws from a
generator of its own and leaves the same bits, so that several threads draw the weights of many clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Place(NamedTuple):
    """A tensor, by the memory that it is in."""

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[int, ...]  # memory that is new; one at most
    done: tuple[int, ...] = ()  # memory that nothing needs afterwards

    @property
    def used(self) -> set[int]:
        return {value.storage for value in self.args if isinstance(value, _Place)}


class Recipe:
    """The operations of one constructor, and where the tensors of its model are."""

    def __init__(self, operations: Iterable[_Operation], places: Mapping[str, _Place]) -> None:
        self._operations = list(operations)
        self._places = places

    def draw(self, seed: int) -> dict[str, Tensor]:
        """The tensors of the model, by name, as its constructor makes them under this seed."""
        generator = torch.Generator().manual_seed(seed)
        memory: dict[int, Tensor] = {}

        def find(place: _Place) -> Tensor:
            return memory[place.storage].as_strided(place.shape, place.stride, place.offset)

        with torch.no_grad():
            for one in self._operations:
                args = [find(value) if isinstance(value, _Place) else value for value in one.args]
                kwargs = {**one.kwargs, "generator": generator} if _is_random(one.function) else one.kwargs
                result = one.function(*args, **kwargs)
                memory |= dict.fromkeys(one.made, result)
                for storage in one.done:
                    del memory[storage]
        return {name: find(place) for name, place in self._places.items()}


def record_build(build: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe | None]:
    """Build a model, and note how. No recipe: what the constructor does depends on more than its random numbers."""
    notes = _Notes()
    with notes:
        model = build()
    places = {name: _place(value) for name, value in model.state_dict(keep_vars=True).items()}
    kept = {place.storage for place in places.values()}
    if notes.stopped or not kept <= {storage for one in notes.operations for storage in one.made}:
        return model, None
    return model, Recipe(_with_ends(notes.operations, kept), places)


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation of this thread. `stopped`: one of them cannot be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.stopped = False
        self._alive: dict[int, Any] = {}  # storages: a freed one could get the number of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = tuple(_place(value) if isinstance(value, Tensor) else value for value in args)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): a constant
            func, noted = torch.ops.aten.clone.default, (result.clone(),)
        outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        new = {_place(value).storage: value.untyped_storage() for value in outputs}
        made = tuple(new.keys() - self._alive.keys())
        operation = _Operation(func, noted, kwargs or {}, made)
        self.stopped = self.stopped or not self._is_repeatable(operation, result, outputs)
        self._alive |= new
        self.operations.append(operation)
        return result

    def _is_repeatable(self, one: _Operation, result: Any, outputs: list[Tensor]) -> bool:
        """Whether it reads known memory, yields tensors, at most one in new memory, and draws only from a generator."""
        nested = [value for value in tree_leaves((one.args, one.kwargs)) if isinstance(value, Tensor)]
        constant = one.function is torch.ops.aten.clone.default and len(nested) == 1
        simple = isinstance(result, Tensor) or (bool(outputs) and not one.made)
        by_generator = torch.Tag.nondeterministic_seeded not in one.function.tags or _is_random(one.function)
        known = one.used <= self._alive.keys() and (constant or not nested)
        return known and simple and by_generator and all(value.device.type == "cpu" for value in outputs)


def _place(tensor: Tensor) -> _Place:
    return _Place(tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@cache
def _is_random(function: Any) -> bool:
    return any(argument.name == "generator" for argument in function._schema.arguments)


def _with_ends(operations: Iterable[_Operation], kept: set[int]) -> list[_Operation]:
    """The same operations, each with the memory that it is the last to use."""
    found: list[_Operation] = []
    seen = set(kept)
    for one in reversed(list(operations)):
        last = one.used.union(one.made) - seen
        seen |= last
        found.append(replace(one, done=tuple(last)))
    return found[::-1]
