"""The merge of uploads, done again without the client whose message would spoil the server.

A message that is well formed may still hold numbers that no server can compute with. Whose they are is found by leaving
uploads out. Without such messages this costs one copy of the server's state and one look at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from pluribus.errors import NotFiniteError
from pluribus.internal.blame import at, first_line
from pluribus.internal.devices import double
from pluribus.internal.snapshot import copy_all
from pluribus.message import LARGEST, Message, Rows
from pluribus.server import Server

SUSPECT = 2.0**30  # of a number: only if some are larger are downloads tried, and clients blamed for errors

Merge = Callable[[Server, Mapping[int, Message]], None]
Uploads = Mapping[int, Message]


class Trouble(NamedTuple):
    """Why the server cannot go on after a merge."""

    reason: str
    is_error: bool  # the method raised an error, which may be a mistake in it


class SafeMerge:
    """Merges uploads of one exchange. `try_downloads` builds the next messages to clients, and raises if it cannot."""

    def __init__(self, server: Server, merge: Merge, try_downloads: Callable[[Iterable[int]], None]) -> None:
        self._server, self._merge, self._try_downloads = server, merge, try_downloads
        self._before = {name: value.clone() for name, value in self._state().items()}
        self._notes, self._fits = dict(server.notes), server.fits

    def __call__(self, uploads: Uploads) -> dict[int, str]:
        """Merge the uploads. Returns the clients that were left out, with the reason.

        What no client explains is the method's own doing: its error is raised, and what it keeps is kept.
        """
        return leave_out(uploads, self._attempt, self._put_back, self._merge_anyway)

    def _merge_anyway(self, uploads: Uploads) -> None:
        self._call(uploads)
        self._try_downloads(uploads)

    def _attempt(self, uploads: Uploads) -> Trouble | None:
        """Merge these uploads. None: the server can go on."""
        try:
            self._call(uploads)
        except (ArithmeticError, RuntimeError, ValueError) as error:  # what Python and torch raise for such numbers
            return Trouble(f"makes the server fail ({first_line(error)})", is_error=True)
        sizes = sizes_of(self._state())
        for name, size in sizes.items():
            if not size <= LARGEST and is_usable(self._before.get(name)):
                return Trouble(f"makes '{name}' of the server {describe_size(size)}", is_error=False)
        return self._download_trouble(uploads) if any(size > SUSPECT for size in sizes.values()) else None

    def _call(self, uploads: Uploads) -> None:
        if uploads:
            with at("server"):
                self._merge(self._server, uploads)

    def _download_trouble(self, uploads: Uploads) -> Trouble | None:
        try:
            self._try_downloads(uploads)
        except (ArithmeticError, RuntimeError, ValueError, NotFiniteError) as error:
            return Trouble(f"makes the server's next message impossible ({first_line(error)})", is_error=False)
        return None

    def _put_back(self) -> None:
        copy_all(self._state(), self._before)
        self._server.notes, self._server.fits = dict(self._notes), self._fits

    def _state(self) -> dict[str, Tensor]:
        return self._server.state.state_dict()


def leave_out(
    messages: Uploads,
    attempt: Callable[[Uploads], Trouble | None],
    put_back: Callable[[], None],
    anyway: Callable[[Uploads], None],
) -> dict[int, str]:
    """Try all messages, then without those that may be lies, until nothing is spoiled.

    Returns the clients that were left out, with the reason. If no client explains the trouble, all messages are used
    anyway.
    """
    trouble = attempt(messages)
    if trouble is None:
        return {}
    for rest in _candidates(messages, trouble.is_error):
        put_back()
        if attempt(rest) is None:
            return {k: f"its message {trouble.reason}." for k in messages if k not in rest}
    put_back()
    anyway(messages)
    return {}


def is_usable(before: Tensor | None) -> bool:
    """Whether a tensor was usable before a merge: a method may keep infinity in one."""
    return before is None or all(size <= LARGEST for size in sizes_of({"": before}).values())


def describe_size(size: float) -> str:
    """A size that nobody can compute with, in words."""
    return f"as large as {size:.2g}" if math.isfinite(size) else "infinite or NaN"


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest magnitude in each tensor of floating-point numbers; NaN if it holds one."""
    chosen = {name: value for name, value in tensors.items() if value.is_floating_point() and value.numel()}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in chosen.items():
        least, most = value.detach().aminmax()  # many times as fast as a norm
        by_device.setdefault(value.device, {})[name] = double(torch.maximum(-least, most))
    found: dict[str, float] = {}
    for sizes in by_device.values():  # one transfer from each device
        found |= dict(zip(sizes, torch.stack(list(sizes.values())).tolist(), strict=True))
    return {name: found[name] for name in chosen}


def _candidates(uploads: Uploads, is_error: bool) -> Iterator[Uploads]:
    """Uploads to try instead of all: without one, then without several, those that differ most in size first.

    An error is blamed only on uploads with numbers that no honest client has.
    """
    sizes = {k: max(sizes_in(upload).values(), default=0.0) for k, upload in uploads.items()}
    usual = median(map(_log, sizes.values()))
    order = sorted(uploads, key=lambda k: -abs(_log(sizes[k]) - usual))
    if is_error:
        order = [k for k in order if sizes[k] > SUSPECT]
    left_out = [{k} for k in order] + [set(order[:number]) for number in range(2, len(order) + 1)]
    for some in left_out:
        if len(some) < len(uploads) or all(size > SUSPECT for size in sizes.values()):
            yield {k: upload for k, upload in uploads.items() if k not in some}


def sizes_in(message: Message) -> dict[str, float]:
    """The largest magnitude in each field of floating-point numbers."""
    return sizes_of({name: value.value if isinstance(value, Rows) else value for name, value in message.items()})


def _log(size: float) -> float:
    return math.log(max(size, 1e-300))
