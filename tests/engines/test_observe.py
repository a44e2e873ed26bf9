"""What stands in the way of a recording, seen while a step runs as written."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from conftest import assemble_tiny, make_host
from pluribus.client import Client
from pluribus.engines.observe import observe_step


def client() -> Client:
    made = make_host(assemble_tiny("local")).client(0)
    made.begin(0, 0, {})
    return made


OBSTACLES = {
    "reads a value": lambda c, x: x.sum().item(),
    "reads a value of a tensor (equal)": lambda c, x: torch.equal(x, x),
    "reads a value of a tensor (_local_scalar_dense)": lambda c, x: 1 if x.sum() > 0 else 2,
    "shape of a result depends on values (nonzero)": lambda c, x: x.nonzero(),
    "shape of a result depends on values (index)": lambda c, x: x[x > 0],
    "shape of a result depends on values (_unique2)": lambda c, x: x.unique(),
    "reads client.card.samples": lambda c, x: x / c.card.samples,
    "reads client.card.id": lambda c, x: x + c.card.id,
}


@pytest.mark.parametrize(("reason", "step"), OBSTACLES.items(), ids=OBSTACLES)
def test_obstacles_are_named(reason, step):
    one = client()
    card = one.card
    with observe_step(one) as watch:
        step(one, torch.arange(4.0) - 1)
    assert reason in watch.reason
    assert one.card is card


def test_the_first_one_counts():
    one = client()
    with observe_step(one) as watch:
        torch.ones(2).nonzero()
        torch.ones(1).item()
    assert "nonzero" in watch.reason


def test_pure_tensor_programs_pass():
    one = client()
    x, y = one.data["train"].take(torch.arange(5))
    with observe_step(one) as watch:
        loss = F.cross_entropy(one.model(x), y) * one.now["lr"] / one.card.width
        one.descend(loss)
        x[torch.tensor([2, 1])].float()
    assert watch.reason is None


def test_the_card_is_watched_without_watching_operations():
    one = client()
    with observe_step(one, operations=False) as watch:
        torch.arange(4.0).sum().item()
    assert watch.reason is None
    with observe_step(one, operations=False) as watch:
        one.card.samples  # noqa: B018
    assert "client.card.samples" in watch.reason
