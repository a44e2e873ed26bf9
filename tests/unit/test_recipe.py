"""Recipes draw the bits of constructors, and what they cannot repeat they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pluribus.inputs import as_input
from pluribus.models import entries
from pluribus.models.recipe import record_build
from pluribus.models.sizes import typical_input
from pluribus.task import Task

WITH_RECIPE = ("mlp-64", "cnn4", "fedgh-cnn3", "resnet4", "resnet18", "resnet50", "mobilenet-v2")


def task_for() -> Task:
    shape = as_input((3, 32, 32))
    return Task(classes=10, input=shape, width=None, projector="pool", clients=4, rounds=1, seed=3)


@pytest.mark.parametrize("model", WITH_RECIPE)
def test_a_recipe_draws_the_bits_of_the_constructor(model):
    task = task_for()
    task.shape_of(model)  # measures the width of its features, once per process
    built, recipe = record_build(lambda: task.construct(model), task.seed_of(*task.start_key(model, 0)))
    assert same(built.state_dict(), task.start(model, 0).state_dict())
    for k in (1, 2):
        drawn = recipe.draw(task.seed_of(*task.start_key(model, k)))
        assert same(drawn, task.start(model, k).state_dict())


LARGE = ("alexnet", "vgg11", "resnet101", "resnet152", "vit-")  # their builders are those of smaller ones


@pytest.mark.parametrize("model", [name for name in entries() if not name.startswith(LARGE)])
def test_what_has_a_recipe_is_drawn_as_it_is_built(model):
    """All networks of the library, of every kind."""
    form = typical_input(model)
    task = Task(classes=10, input=form, width=None, projector="pool", clients=4, rounds=1, seed=3)
    task.shape_of(model)
    found = record_build(lambda: task.construct(model), task.seed_of("client", 0))
    if found is not None:
        assert same(found[1].draw(task.seed_of("client", 1)), task.start(model, 1).state_dict())
    assert (found is not None) or model not in WITH_RECIPE


def test_threads_draw_without_the_global_generator():
    task = task_for()
    task.shape_of("cnn4")
    _, recipe = record_build(lambda: task.construct("cnn4"), 0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        drawn = list(threads.map(recipe.draw, range(8)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(same(one, recipe.draw(seed)) for seed, one in enumerate(drawn))
    assert not same(drawn[0], drawn[1])


def peeking() -> nn.Module:
    net = nn.Linear(4, 4)
    if float(net.weight.sum().detach()) > 0:
        nn.init.zeros_(net.bias)
    return net


def foreign() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight.data.copy_(WEIGHTS)
    return net


WEIGHTS = torch.ones(2, 2)


def without_generator() -> nn.Module:
    net = nn.Linear(8, 8)
    net.weight.data = torch.randn(8, 8)  # torch.randn takes one, but nobody passed it
    return net


@pytest.mark.parametrize("build", [peeking, foreign, without_generator])
def test_what_depends_on_more_than_a_generator_has_no_recipe(build):
    assert record_build(build, 0) is None


def test_constants_and_draws_from_draws_are_repeated():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.scale = nn.Parameter(nn.functional.dropout(torch.empty(3).normal_(), 0.5))
            self.register_buffer("twice", self.scale.detach() * 2)

    built, recipe = record_build(Net, 7)
    drawn = recipe.draw(7)
    assert same(drawn, built.state_dict())
    again = recipe.draw(8)
    assert torch.equal(again["twice"], again["scale"] * 2)
    assert torch.equal(again["norm.weight"], torch.ones(3))
    assert not torch.equal(again["scale"], drawn["scale"])


def same(some, others) -> bool:
    return some.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in some.items())
