"""Stages of networks, networks with the first of them, and exits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pluribus
from pluribus.errors import MismatchError, RangeError
from pluribus.experiment import experiment
from pluribus.inputs import Input
from pluribus.models import build
from pluribus.models.depth import depth_of, exit_of, part_names, run_stages, stages_of
from refusals import refused

SMALL, COLOR = Input("image", (1, 8, 8)), Input("image", (3, 32, 32))
SIGNAL, TABLE, TOKENS = Input("signal", (3, 64)), Input("table", (6,)), Input("tokens", (12,), vocabulary=50)
WITH_EXITS = [
    ("mlp-64", SMALL, 1),
    ("mlp-128-64", SMALL, 2),
    ("cnn-16-32", SMALL, 2),
    ("cnn-16-32-gn", SMALL, 2),
    ("lenet", COLOR, 2),
    ("resnet6", COLOR, 2),
    ("resnet6", SMALL, 2),  # after a layer that makes color of gray
    ("resnet18-gn", COLOR, 4),
    ("timm:resnet10t", COLOR, 4),
    ("vit-s16", Input("image", (1, 16, 16)), 12),  # after such a layer, too
    ("cnn1d-3", SIGNAL, 3),
    ("resnet1d", SIGNAL, 3),
    ("transformer1d", SIGNAL, 2),
    ("table-mlp-3", TABLE, 3),
    ("table-resnet", TABLE, 2),
    ("ft-transformer", TABLE, 2),
]


@pytest.mark.parametrize(("name", "shape", "stages"), WITH_EXITS)
def test_a_short_model_has_the_first_stages_of_the_whole(name: str, shape: Input, stages: int) -> None:
    """With the weights of the whole model it computes the same, up to its last stage."""
    whole, depth = build(name, shape=shape, classes=10).eval(), (stages + 1) // 2
    assert depth_of(whole, name) == stages
    short = build(f"{name}@depth{depth}", shape=shape, classes=10).eval()
    assert depth_of(short, name) == depth
    shared = {own: value for own, value in whole.state_dict().items() if own in part_names(short)}
    kept = {own: value for own, value in shared.items() if part_names(whole)[own].startswith("stage")}
    assert kept.keys() == {own for own, part in part_names(short).items() if part.startswith("stage")}
    short.load_state_dict(kept, strict=False)
    x = shape.zeros(2) + torch.arange(2.0).view(2, *[1] * len(shape.shape))
    of_whole, of_short = run_stages(whole, x)[0], run_stages(short, x)[0]
    assert len(of_whole) == stages - 1
    assert len(of_short) == depth - 1
    assert all(torch.equal(*pair) for pair in zip(of_whole, of_short, strict=False))


@pytest.mark.parametrize(("name", "shape", "stages"), WITH_EXITS)
def test_an_exit_is_what_follows_the_last_stage(name: str, shape: Input, stages: int) -> None:
    for depth in {1, stages}:
        model = build(f"{name}@depth{depth}", shape=shape, classes=10, width=8, projector="linear").eval()
        names = {own for own, part in part_names(model).items() if part == f"exit{depth}"}
        outputs: list[torch.Tensor] = []
        end = stages_of(model.get_submodule("features.backbone")).ends[-1]
        with end.register_forward_hook(lambda _, __, output: outputs.append(output)):  # noqa: B023
            scores = model(x := shape.zeros(2) + 1)
        after = exit_of(copy.deepcopy(model), name)
        assert set(after.state_dict()) == names
        assert torch.equal(after(outputs[0]), scores)
        assert torch.equal(model(x), scores), "the model itself stays"


def test_the_full_depth_is_the_whole_model() -> None:
    models = []
    for name in ("cnn4", "cnn4@depth2"):
        torch.manual_seed(0)
        models.append(build(name, shape=COLOR, classes=10))
    one, other = (dict(model.state_dict()) for model in models)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_short_stack_has_no_hidden_layer_that_does_not_fit() -> None:
    """One stage of cnn-16-32 leaves 16 channels of 4 x 4 pixels. Its hidden layer is for 32 of 2 x 2."""
    model = build("cnn-16-32@depth1", shape=SMALL, classes=10)
    assert model.width == 16 * 4 * 4
    assert not any("fc1" in name for name in model.state_dict())


def test_stages_of_a_users_own_network() -> None:
    """Its blocks are its stages, with what is between them."""
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3)]
    net = nn.Sequential(nn.Flatten(), blocks[0], blocks[1], nn.ReLU(), blocks[2], nn.LayerNorm(6))
    found = stages_of(net)
    assert found.parts == (("0", "1"), ("2", "3"), ("4",))
    assert found.tail == ("5",)


def test_blocks_of_a_text_model_can_be_cut() -> None:
    model = build("texttransformer-4@depth3", shape=TOKENS, classes=4)
    assert depth_of(model, "short") == 3
    assert model(TOKENS.zeros(2)).shape == (2, 4)
    with refused(MismatchError, "short", "exits"):
        exit_of(model, "short")


@pytest.mark.parametrize(
    ("name", "shape", "facts"),
    [
        ("cnn-16-32@depth3", SMALL, ("cnn-16-32", 3, "2 stages")),
        ("mlp-64@depth2", SMALL, ("mlp-64", 2, "1 stage")),
        ("googlenet@depth1", COLOR, ("googlenet", "no stages")),
        ("lstm1d@depth1", SIGNAL, ("lstm1d", "no stages")),
        ("fasttext@depth1", TOKENS, ("fasttext", "no stages")),
        ("tiny-cnn-64@depth1", Input("image", (1, 16, 16)), ("tiny-cnn-64", "pretrained")),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(name: str, shape: Input, facts: tuple[object, ...]) -> None:
    with refused(MismatchError, *facts):
        build(name, shape=shape, classes=10)


def test_depth_0_is_refused() -> None:
    with refused(RangeError, 0):
        build("cnn-16-32@depth0", shape=SMALL, classes=10)


def test_clients_of_any_method_have_depths() -> None:
    models = "cnn-16-32@depth2,cnn-16-32@depth1"
    result = pluribus.run("fedproto", models=models, clients=2, rounds=1, width=16, progress=False)
    assert {k: facts.model for k, facts in result.clients.items()} == {0: "cnn-16-32@depth2", 1: "cnn-16-32@depth1"}
    assert result.model(1).width == 16


def test_a_default_depth_is_for_the_default_model() -> None:
    assert experiment("depthfl").capacity == "2,1"
    assert experiment("depthfl", models="mlp-64").capacity == ""
    assert experiment("depthfl", models="mlp-64", capacity="1").capacity == "1"
