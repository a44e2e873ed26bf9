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
    whole: bool = False  # whether it is the tensor that was made with the memory


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    written: frozenset[int]  # memory of the results
    made: tuple[int, ...]  # the part of it that is new; one at most
    done: tuple[int, ...] = ()  # memory that nothing needs afterwards

    @property
    def used(self) -> set[int]:
        return {value.storage for value in self.args if isinstance(value, _Place)}


class Recipe:
    """The random operations of one constructor, and where the tensors of its model are."""

    def __init__(
        self, operations: Iterable[_Operation], places: Mapping[str, _Place], constants: Mapping[str, Tensor]
    ) -> None:
        self._operations = list(operations)
        self._places = places
        self._constants = constants

    def draw(self, seed: int) -> dict[str, Tensor]:
        """The tensors of the model, by name, as its constructor makes them under this seed. Those that are not random
        are the same at every call: copy them."""
        generator = torch.Generator().manual_seed(seed)
        memory: dict[int, Tensor] = {}

        def find(place: _Place) -> Tensor:
            found = memory[place.storage]
            if place.whole:
                return found
            return found.as_strided(place.shape, place.stride, place.offset)

        with torch.no_grad():
            for one in self._operations:
                args = [find(value) if isinstance(value, _Place) else value for value in one.args]
                kwargs = {**one.kwargs, "generator": generator} if _is_random(one.function) else one.kwargs
                result = one.function(*args, **kwargs)
                memory |= dict.fromkeys(one.made, result)
                for storage in one.done:
                    del memory[storage]
        return {
            name: find(self._places[name]) if name in self._places else self._constants[name]
            for name in (*self._places, *self._constants)
        }


def record_build(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recipe] | None:
    """Build a model with weights that are drawn under this seed, and note how. Other threads may do so, too.

    None: what the constructor does depends on more than random numbers, or it draws them in another way.
    """
    notes = _Notes(seed)
    with notes:
        model = build()
    tensors = model.state_dict(keep_vars=True)
    places = {name: _place(value) for name, value in tensors.items()}
    if notes.stopped or not all(place.storage in notes.made for place in places.values()):
        return None
    random = _find_random(notes.operations)
    constants = {name: tensors[name].detach().clone() for name, place in places.items() if place.storage not in random}
    drawn = {name: notes.shorten(place) for name, place in places.items() if place.storage in random}
    needed = [notes.shorten_all(one) for one in notes.operations if random & one.used.union(one.made)]
    return model, Recipe(_with_ends(needed, {place.storage for place in drawn.values()}), drawn, constants)


def _find_random(operations: Iterable[_Operation]) -> set[int]:
    """The memory whose content depends on random numbers."""
    found: set[int] = set()
    for one in operations:
        if _is_random(one.function) or found & one.used:
            found |= one.written.union(one.made)
    return found


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation of this thread. `stopped`: one of them cannot be repeated."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no part of this is compiled, and torch's compiler takes a second to import

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self.operations: list[_Operation] = []
        self.stopped = False
        self.made: dict[int, _Place] = {}  # the tensor that each piece of memory was made with
        self._alive: dict[int, Any] = {}  # storages: a freed one could get the number of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted, kwargs = tuple(_place(value) if isinstance(value, Tensor) else value for value in args), kwargs or {}
        result = func(*args, **kwargs | ({"generator": self._generator} if _is_random(func) else {}))
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): a constant
            func, noted = torch.ops.aten.clone.default, (result.clone(),)
        outputs = [result] if isinstance(result, Tensor) else [v for v in tree_leaves(result) if isinstance(v, Tensor)]
        new = {_place(value).storage: value.untyped_storage() for value in outputs}
        made = tuple(new.keys() - self._alive.keys())
        operation = _Operation(func, noted, kwargs, frozenset(new), made)
        self.made |= {storage: _place(outputs[0]) for storage in made}
        self.stopped = self.stopped or not self._is_repeatable(operation, result, outputs)
        self._alive |= new
        self.operations.append(operation)
        return result

    def shorten(self, place: _Place) -> _Place:
        """Note whether a place is all of its memory: such a tensor need not be made of another one."""
        return place._replace(whole=place == self.made[place.storage])

    def shorten_all(self, one: _Operation) -> _Operation:
        return replace(one, args=tuple(self.shorten(v) if isinstance(v, _Place) else v for v in one.args))

    def _is_repeatable(self, one: _Operation, result: Any, outputs: list[Tensor]) -> bool:
        """Whether it reads known memory, yields tensors, at most one in new memory, and draws only from a generator."""
        simple = isinstance(result, Tensor) or (bool(outputs) and not one.made)
        by_generator = torch.Tag.nondeterministic_seeded not in one.function.tags or _is_random(one.function)
        known = one.used <= self._alive.keys() and not any(map(_holds_tensors, (*one.args, *one.kwargs.values())))
        is_constant = one.function is torch.ops.aten.clone.default and isinstance(one.args[0], Tensor)
        return (known or is_constant) and simple and by_generator and all(v.device.type == "cpu" for v in outputs)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensors, value)))


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
