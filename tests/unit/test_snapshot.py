"""Copies of many tensors."""

from __future__ import annotations

import torch

from pluribus.internal.snapshot import Snapshot, copy_all


def some() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "filter": torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last),
        "weight": torch.randn(3, 5, generator=generator).t(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
        "double": torch.randn(2, generator=generator, dtype=torch.float64),
    }


def test_what_is_put_back_is_what_was_there():
    live = some()
    layouts = {name: value.stride() for name, value in live.items()}
    addresses = {name: value.data_ptr() for name, value in live.items()}
    saved = Snapshot(live)
    for value in live.values():
        value.zero_()
    saved.put_back(live)
    assert all(torch.equal(live[name], value) for name, value in some().items())
    assert {name: value.stride() for name, value in live.items()} == layouts
    assert {name: value.data_ptr() for name, value in live.items()} == addresses


def test_tensors_are_contiguous_copies_with_memory_of_their_own():
    live = some()
    saved = Snapshot(live)
    copies = saved.tensors()
    assert list(copies) == list(live)
    assert all(torch.equal(copies[name], value) for name, value in live.items())
    assert all(value.is_contiguous() for value in copies.values())
    pointers = [value.untyped_storage().data_ptr() for value in copies.values() if value.numel()]
    assert len(set(pointers)) == len(pointers)
    copies["double"].zero_()
    saved.put_back(live)
    assert torch.equal(live["double"], some()["double"])


def test_size_and_nothing():
    assert Snapshot(some()).nbytes == sum(value.nbytes for value in some().values())
    assert Snapshot({}).tensors() == {}


def test_copy_all_takes_what_is_named():
    to, from_ = {"a": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    copy_all(to, from_)
    assert to["a"].tolist() == [1, 1]
