"""Copies of many tensors."""

from __future__ import annotations

import gc
from itertools import pairwise

import torch
from torch import nn

from pluribus.internal.snapshot import ALIGNMENT, Snapshot, copy_all, pack


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


def test_tensors_are_contiguous_copies():
    live = some()
    saved = Snapshot(live)
    copies = saved.tensors()
    assert list(copies) == list(live)
    assert all(torch.equal(copies[name], value) for name, value in live.items())
    assert all(value.is_contiguous() for value in copies.values())
    spans = sorted((value.data_ptr(), value.data_ptr() + value.nbytes) for value in copies.values() if value.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))  # none overlaps another
    live["double"].zero_()
    assert torch.equal(copies["double"], some()["double"])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 5)).to(memory_format=torch.channels_last)


class TestPacked:
    def test_parameters_stay_parameters_with_the_same_numbers_and_strides(self):
        net, other = layers(), layers()
        parameters = list(net.parameters())
        packed = pack(net.state_dict(keep_vars=True))
        assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
        assert all(torch.equal(packed[name], value) for name, value in other.state_dict().items())
        strides = {name: value.stride() for name, value in net.state_dict().items()}
        assert strides == {name: value.stride() for name, value in other.state_dict().items()}
        x = torch.ones(1, 2, 5, 5)
        assert torch.equal(net[0](x), other[0](x))

    def test_live_tensors_are_in_one_aligned_block_per_dtype(self):
        net = layers()
        packed = pack(net.state_dict(keep_vars=True))
        assert packed.blocks.keys() == {torch.float32, torch.int64}
        for value in net.state_dict(keep_vars=True).values():
            block = packed.blocks[value.dtype]
            assert block.data_ptr() <= value.data_ptr() < block.data_ptr() + block.nbytes
            assert value.untyped_storage().nbytes() == value.nbytes  # forward mode copies whole storages
            assert (value.data_ptr() - block.data_ptr()) % ALIGNMENT == 0

    def test_a_step_of_a_packed_network_is_seen_in_its_block_and_is_put_back(self):
        net = layers()
        packed = pack(net.state_dict(keep_vars=True))
        saved, before = Snapshot(packed), {name: value.clone() for name, value in packed.items()}
        with torch.no_grad():
            for value in net.parameters():
                value.add_(1)
        assert torch.equal(packed["2.weight"], before["2.weight"] + 1)
        saved.put_back(packed)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_a_copy_is_put_back_into_another_network_packed_or_not(self):
        one, packed, loose = layers(), layers(), layers()
        with torch.no_grad():
            one[2].weight.fill_(7)
        saved = Snapshot(pack(one.state_dict(keep_vars=True)))
        saved.put_back(pack(packed.state_dict(keep_vars=True)))
        saved.put_back(loose.state_dict())
        for net in (packed, loose):
            assert all(torch.equal(value, one.state_dict()[name]) for name, value in net.state_dict().items())

    def test_the_first_tensors_are_copied_alone(self):
        packed = pack(layers().state_dict(keep_vars=True))
        first = packed.first(2)
        assert list(first) == ["0.weight", "0.bias"]
        saved = Snapshot(first)
        assert saved.nbytes < Snapshot(packed).nbytes
        for value in packed.values():
            value.zero_()
        saved.put_back(first)
        assert packed["0.bias"].any()
        assert not packed["2.bias"].any()

    def test_tied_weights_are_left_where_they_are(self):
        weight = torch.ones(4)
        assert pack({"a": weight, "b": weight}) is None
        assert pack({"a": weight[:3], "b": weight[2:]}) is None

    def test_a_part_keeps_its_block(self):
        weight = nn.Parameter(torch.ones(4))
        pack({"a": weight, "b": torch.zeros(2)})
        gc.collect()
        others = [torch.full((128 + 2,), 7.0) for _ in range(100)]  # would reuse the memory of a freed block
        assert weight.tolist() == [1, 1, 1, 1]
        assert len(others) == 100


def test_size_and_nothing():
    assert Snapshot(some()).nbytes == sum(value.nbytes for value in some().values())
    assert Snapshot({}).tensors() == {}


def test_copy_all_takes_what_is_named():
    to, from_ = {"a": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    copy_all(to, from_)
    assert to["a"].tolist() == [1, 1]
