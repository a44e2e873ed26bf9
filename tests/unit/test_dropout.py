"""Dropout by key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from pluribus.draws import uniform_bits
from pluribus.models.dropout import Dropout, replace_dropout, set_dropout_keys


def layer(p: float = 0.5, key: int = 7) -> Dropout:
    made = Dropout(p)
    made.key.fill_(key)
    return made


def python_bits(key: int, position: int) -> int:
    """SplitMix64's mixer by its definition, on Python's whole numbers."""

    def mixed(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ (x >> shift)) * factor) % 2**64
        return x ^ (x >> 31)

    stride = 0x9E3779B97F4A7C15
    return mixed((position + mixed(key * stride % 2**64)) * stride % 2**64) >> 39 & 0xFFFFFF


@given(st.integers(0, 2**62 - 1), st.integers(1, 40))
def test_the_hash_is_the_one_it_says(key, size):
    found = uniform_bits(torch.tensor(key), size, torch.device("cpu")).tolist()
    assert found == [python_bits(key, position) for position in range(size)]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_drops_so_many_and_keeps_the_mean(p):
    dropped = layer(p)(torch.ones(400, 500))
    share = (dropped == 0).float().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / 200_000) ** 0.5)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)])


def test_masks_differ_by_key_pass_and_row_and_repeat_with_the_key():
    x = torch.ones(64, 64)
    one = layer()
    first, second = one(x), one(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(layer()(x), first)
    assert not torch.equal(layer(key=8 * 2**40)(x), first)


def test_neighboring_keys_are_not_shifted_copies():
    one, other = (uniform_bits(torch.tensor(key), 1000, torch.device("cpu")) for key in (5, 6))
    assert not set(one.tolist()) & set(other.tolist()) > set(one.tolist()[:10])
    assert (one[1:] == other[:-1]).float().mean() < 0.01


def test_eval_mode_and_p_zero_do_nothing():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert layer().eval()(x) is x
    assert layer(0.0)(x) is x


def test_torchs_generator_is_left_alone():
    before = torch.get_rng_state()
    layer()(torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_models_get_it_and_every_layer_its_own_key():
    model = replace_dropout(
        nn.Sequential(nn.Dropout(0.2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3)), nn.Dropout2d())
    )
    kinds = [type(part) for part in model.modules()]
    assert kinds.count(Dropout) == 2
    assert nn.Dropout not in kinds
    assert nn.Dropout2d in kinds
    set_dropout_keys(model, 1 << 62)
    keys = [part.key.item() for part in model.modules() if isinstance(part, Dropout)]
    assert len(set(keys)) == 2
    assert [part.p for part in model.modules() if isinstance(part, Dropout)] == [0.2, 0.3]
    assert not any("key" in name for name in model.state_dict())


def test_stacked_layers_drop_what_single_ones_do():
    one = Dropout(0.5)

    def forward(key, x):
        one._buffers["key"] = key
        return one(x)

    keys, x = torch.tensor([3, 9]), torch.ones(2, 5, 6)
    stacked = vmap(forward)(keys.clone(), x)
    assert torch.equal(stacked, torch.stack([layer(key=key)(row) for key, row in zip((3, 9), x, strict=True)]))
