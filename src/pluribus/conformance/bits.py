"""Tensors and runs, compared to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pluribus.result import Result
from pluribus.storage.checkpoint import Checkpoint


def bits(value: Tensor) -> bytes:
    """The numbers of a tensor as bytes."""
    return value.detach().cpu().contiguous().numpy().tobytes()


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal in shape, dtype and every bit: -0 is not 0, and NaN is NaN."""
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bits(one) == bits(other)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors are not the same to the bit, or that only one has."""
    return [n for n in one.keys() | other.keys() if n not in one or n not in other or not same_bits(one[n], other[n])]


def numbers(result: Result) -> list[dict[str, Any]]:
    """The history without the clock."""
    return [timeless(record) for record in result.history]


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round's record without what depends on the machine's speed."""
    return {name: value for name, value in record.items() if name not in ("seconds", "spans")}


def kept(result: Result) -> dict[str, Tensor]:
    """All tensors of the server and the clients, as the last checkpoint has them."""
    saved = state_of(result)
    found = {f"server {name}": value for name, value in saved.server().items()}
    for k in range(len(result.clients)):
        found |= {f"client {k} {name}": value for name, value in (saved.client(k) or {}).items()}
    return found


def selected(result: Result) -> dict[str, Tensor]:
    """What clients were measured with in the rounds that validation selects."""
    saved = state_of(result)
    chosen = {k: saved.selected(k, one.selected_round) or {} for k, one in result.per_client().items()}
    return {f"client {k} {name}": value for k, state in chosen.items() for name, value in state.items()}


def tested(result: Result) -> dict[str, Tensor]:
    """What clients predicted for their test rows in those rounds."""
    saved, chosen = state_of(result), result.per_client().items()
    return {f"client {k} {n}": v for k, one in chosen for n, v in saved.tested(k, one.selected_round).items()}


def state_of(result: Result) -> Checkpoint:
    """The saved state of a run with a folder."""
    assert result.folder is not None, "the kit runs in folders"
    return Checkpoint(result.folder / "state")


# ---- the first difference, in words ----------------------------------------------------------------------------------


def run_difference(one: Result, other: Result) -> str | None:
    """The first difference of two runs in metrics, traffic or weights. None: they are equal to the bit."""
    entries = zip_longest(one.ledger.entries(), other.ledger.entries())
    sent = (f"of the bytes sent: {a} and {b}" for a, b in entries if a != b)
    found = (
        next(_value_differences(numbers(one), numbers(other), ""), None),
        next(sent, None),
        tensor_difference(kept(one), kept(other)),
        tensor_difference(selected(one), selected(other)),
        tensor_difference(tested(one), tested(other)),
    )
    return next((text for text in found if text), None)


def tensor_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """The first tensor that differs, and by how much. None: all are equal to the bit."""
    names = sorted(differing(one, other))
    if not names:
        return None
    name, more = names[0], f", and {len(names) - 1} more" if len(names) > 1 else ""
    if name not in one or name not in other:
        return f"'{name}' exists only once{more}"
    a, b = one[name], other[name]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"'{name}' is {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}{more}"
    most = (a.double() - b.double()).abs().max() if not a.is_complex() else torch.tensor(torch.nan)
    return f"'{name}' differs by up to {most:.3g}{more}"


def _value_differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Where two records of plain values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _value_differences(one.get(key), other.get(key), f"{where} {key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for t, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _value_differences(a, b, f"{where} round {t}:" if not where else f"{where} {t}")
    elif isinstance(one, list) and isinstance(other, list):
        yield f"{where or 'history'} has {len(one)} and {len(other)} entries"
    elif one != other and not (one != one and other != other):  # NaN is NaN
        yield f"{where.strip()} is {one} and {other}"
