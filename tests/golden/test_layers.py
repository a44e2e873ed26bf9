"""The layers of a model: every kind, in the order of the forward pass, found without touching the model."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pluribus.models import build
from pluribus.models.layers import kind_of, layers_of

SHAPE = (1, 16, 16)


class Tangled(nn.Module):
    """Layers declared in another order than they are used, one of them twice and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.never = nn.Linear(4, 4)
        self.between = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4, bias=False)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.plain(self.grouped(self.depthwise(self.norm(self.first(x)))))
        return self.last(self.twice(self.between(self.twice(x.mean((2, 3))))))


def test_order_kinds_and_shapes():
    found = layers_of(Tangled(), SHAPE)
    assert [tuple(layer) for layer in found] == [
        ("first", "conv", (4, 1, 3, 3), (4,), False, 1),
        ("norm", "norm", (4,), (4,), False, 1),
        ("depthwise", "dwconv", (4, 1, 3, 3), None, False, 1),
        ("grouped", "conv", (4, 2, 1, 1), (4,), False, 2),
        ("twice", "linear", (4, 4), None, False, 1),
        ("between", "linear", (4, 4), (4,), False, 1),
        ("last", "linear", (3, 4), (3,), True, 1),
    ]


def test_the_model_stays_as_it_is():
    model = Tangled()
    model.plain.eval()  # a part in another mode than the rest
    before = copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    generator = torch.get_rng_state()
    layers_of(model, SHAPE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(generator, torch.get_rng_state())


def test_a_model_without_numbers_has_the_same_layers():
    with torch.device("meta"):
        hollow = Tangled()
    assert layers_of(hollow, SHAPE) == layers_of(Tangled(), SHAPE)


def test_a_large_model_goes_through_the_meta_device():
    with torch.device("meta"):
        large = nn.Sequential(nn.Flatten(), nn.Linear(256, 40_000), nn.ReLU(), nn.Linear(40_000, 10))
    assert [(layer.name, layer.output) for layer in layers_of(large, SHAPE)] == [("1", False), ("3", True)]


def test_models_of_the_zoo():
    found = layers_of(build("cnn-16-32", shape=SHAPE, classes=10), SHAPE)
    assert [(layer.name.removeprefix("features.backbone."), layer.kind, layer.output) for layer in found] == [
        ("conv1", "conv", False),
        ("conv1_norm", "norm", False),
        ("conv2", "conv", False),
        ("conv2_norm", "norm", False),
        ("fc1", "linear", False),
        ("head", "linear", True),
    ]
    with torch.device("meta"):
        mobile = build("mobilenet-v2", shape=(3, 32, 32), classes=10)
    kinds = [layer.kind for layer in layers_of(mobile, (3, 32, 32))]
    # 52 convolutions, 17 of them depthwise, each with its batch norm, and the classifier
    assert (kinds.count("conv"), kinds.count("dwconv"), kinds.count("norm"), kinds.count("linear")) == (35, 17, 52, 1)


def test_what_has_no_weights_is_no_layer():
    for module in (nn.ReLU(), nn.Flatten(), nn.MaxPool2d(2), nn.BatchNorm2d(3, affine=False), nn.Sequential()):
        assert kind_of(module) is None
    # one input channel is a plain convolution, whatever its groups
    assert kind_of(nn.Conv2d(1, 4, 3)) == "conv"
    assert kind_of(nn.Conv2d(4, 8, 3, groups=4)) == "dwconv"
    assert kind_of(nn.LayerNorm(4)) == "norm"
