"""`server.fit`: the loop that a method would write by hand, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parties import server_of, task_of
from pluribus.client import Batch
from pluribus.conformance.bits import differing
from pluribus.optim import Rule
from pluribus.server import Server
from pluribus.storage.checkpoint import put_back

RULES = {
    "sgd": Rule(lr=0.1),
    "momentum": Rule(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": Rule("adam", lr=0.01),
    "clipped": Rule("adamw", lr=0.01, clip_norm=0.1),
}
X = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(23) % 3
HOW = {"opts": ("net",), "batch": 5}  # the last of five batches has three rows


def make_server(rule: Rule = RULES["sgd"]) -> Server:
    """A server with a small net and an optimizer, in round 2."""
    server = server_of(task_of(3, 4), {0: 1})
    server.state.net = server.make("net", lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    server.optimize("net", server.state.net, rule)
    server.state.fix()
    server.begin(2, {})
    return server


def scaled(server: Server, batch: Batch) -> Tensor:
    """A loss that reads a tensor that is given."""
    assert batch.n == len(batch.x) == len(batch.y) == len(batch.i)
    return F.cross_entropy(server.given["scale"] * server.state.net(batch.x), batch.y)


def plain(server: Server, batch: Batch) -> Tensor:
    return F.cross_entropy(server.state.net(batch.x), batch.y)


def state_of(server: Server) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in server.state.state_dict().items()}


@pytest.mark.parametrize("shuffle", ["order", None])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_it_is_the_loop_written_by_hand(rule: Rule, shuffle: str | None) -> None:
    server, other = make_server(rule), make_server(rule)
    found = server.fit(scaled, X, Y, epochs=3, shuffle=shuffle, given={"scale": torch.tensor(0.3)}, **HOW)
    for epoch in range(3):
        order = torch.arange(23) if shuffle is None else torch.randperm(23, generator=other.draw("order", epoch))
        for rows in torch.split(order, 5):
            loss = F.cross_entropy(0.3 * other.state.net(X[rows]), Y[rows])
            other.descend(loss, "net")
    assert differing(state_of(server), state_of(other)) == []
    assert torch.equal(found, loss.detach())
    assert not found.requires_grad
    assert server.state.net[1].num_batches_tracked == 15


def test_every_epoch_and_every_key_has_an_order_of_its_own() -> None:
    visited: list[list[int]] = []

    def noted(server: Server, batch: Batch) -> Tensor:
        visited.append(batch.i.tolist())
        return plain(server, batch)

    server = make_server()
    for key in ("order", "order", "other"):
        server.fit(noted, X, Y, opts=("net",), batch=23, epochs=2, shuffle=key)
    assert all(sorted(rows) == list(range(23)) for rows in visited)
    assert visited[0:2] == visited[2:4], "in one round, a key has one order per epoch"
    assert len({tuple(rows) for rows in visited}) == 4


def test_no_row_is_dropped_and_no_batch_is_merged() -> None:
    sizes: list[int] = []

    def noted(server: Server, batch: Batch) -> Tensor:
        sizes.append(batch.n)
        return plain(server, batch)

    server = make_server()
    server.state.net.eval()  # one row has no variance
    server.fit(noted, X, Y, opts=("net",), batch=11)
    assert sizes == [11, 11, 1]


def test_one_backward_pass_moves_all_named_optimizers() -> None:
    server = server_of(task_of(3, 4), {0: 1})
    for name in ("one", "two"):
        setattr(server.state, name, server.make(name, lambda: nn.Linear(4, 3)))
        server.optimize(name, getattr(server.state, name), RULES["sgd"])
    before = state_of(server)

    def both(server: Server, batch: Batch) -> Tensor:
        return F.cross_entropy(server.state.one(batch.x) + server.state.two(batch.x), batch.y)

    server.fit(both, X, Y, opts=("one",), batch=23)
    assert sorted(differing(before, state_of(server))) == ["one.bias", "one.weight"]
    server.fit(both, X, Y, opts=("one", "two"), batch=23)
    assert len(differing(before, state_of(server))) == 4


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_server_that_is_restored_goes_on_to_the_same_bits(rule: Rule) -> None:
    straight, first, second = (make_server(rule) for _ in range(3))
    straight.fit(plain, X, Y, epochs=2, **HOW)
    first.fit(plain, X, Y, **HOW)
    put_back(second.state.state_dict(), state_of(first), "the server")
    second.fit(plain, X, Y, **HOW)
    assert differing(state_of(straight), state_of(second)) == []


@pytest.mark.parametrize(("rows", "epochs"), [(0, 3), (23, 0)])
def test_without_a_step_there_is_no_loss_and_no_change(rows: int, epochs: int) -> None:
    server = make_server()
    before = state_of(server)
    assert server.fit(plain, X[:rows], Y[:rows], epochs=epochs, shuffle="order", **HOW).isnan()
    assert differing(before, state_of(server)) == []


def test_what_is_given_is_there_for_the_loss_alone() -> None:
    server = make_server()
    server.fit(scaled, X, Y, given={"scale": torch.ones(())}, **HOW)
    assert server.given == {}
    with pytest.raises(KeyError, match="scale"):
        server.fit(scaled, X, Y, given={"other": torch.ones(())}, **HOW)
    assert server.given == {}


def test_layers_that_draw_are_keyed_by_round_and_fit() -> None:
    """Dropout draws from the global generator, which neither matters nor changes."""

    def dropped(server: Server, batch: Batch) -> Tensor:
        return F.cross_entropy(F.dropout(server.state.net(batch.x), 0.5), batch.y)

    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        server = make_server(Rule(lr=0.0))
        server.state.net.eval()
        losses.append([float(server.fit(dropped, X, Y, opts=("net",), batch=23)) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
