"""FjORD: ordered dropout is a narrower model, the statistics are those of the largest width, and what is drawn."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from conftest import assemble_tiny, make_host, run_tiny
from pluribus.client import Batch
from pluribus.errors import MismatchError
from pluribus.methods.fjord import FjORD
from pluribus.ops import kl
from refusals import refused


def fjord_client(**settings):
    host = make_host(assemble_tiny("fjord", models="cnn-16-32", clients=2, **settings))
    client = host.client(0)
    client.begin(0, 0, {})
    client.set_mode(True)
    return host.method, client


def batch_of(client, rows=6):
    positions = torch.arange(rows)
    return Batch(*client.data["train"].take(positions), positions, rows)


def test_a_cut_pass_is_that_of_a_narrow_model():
    _, client = fjord_client(capacity="1,0.3")
    task, x = client.task, batch_of(client).x
    narrow = task.start("cnn-16-32@0.3").train()
    narrow.load_state_dict(task.part_of("cnn-16-32@0.3").take(client.model.state_dict()))
    client.state.share.fill_(0.3)
    torch.testing.assert_close(client.model(x), narrow(x), rtol=1e-5, atol=1e-6)


def test_a_narrow_client_cuts_by_the_channels_of_the_whole_model():
    """Of 16 channels a client with 0.5 has 8; the share 0.3 keeps ceil(4.8) = 5 of them, not ceil(0.3 * 8)."""
    _, client = fjord_client(capacity="0.5")
    client.state.share.fill_(0.3)
    after = client.model.features.backbone.conv1(batch_of(client).x)
    assert after.abs().sum((0, 2, 3)).ne(0).tolist() == [True] * 5 + [False] * 3


def test_the_loss_by_hand():
    method, client = fjord_client(capacity="1", distill=0.7)
    batch = batch_of(client)
    client.state.drawn.fill_(0.4)
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    largest = client.model(batch.x)
    after_one = client.model.features.backbone.conv1_norm.running_mean.clone()
    client.state.share.fill_(0.4)
    small = client.model(batch.x)
    expected = F.cross_entropy(largest, batch.y) + F.cross_entropy(small, batch.y) + 0.7 * kl(largest, small).mean()
    client.model.load_state_dict(before)
    torch.testing.assert_close(method.loss(client, batch), expected)
    # the cut pass leaves no trace in the statistics
    torch.testing.assert_close(client.model.features.backbone.conv1_norm.running_mean, after_one)
    assert client.state.step.item() == 1


def test_shares_are_those_that_the_client_can_hold():
    for capacity, shares in (("1", [0.2, 0.4, 0.6, 0.8, 1.0]), ("0.5", [0.2, 0.4, 0.5]), ("0.1", [0.1])):
        method, client = fjord_client(capacity=capacity)
        assert method.shares(client) == shares
        method.local_update(client)
        drawn = client.state.drawn.unique().tolist()
        assert [round(one, 4) for one in drawn] == shares


def test_every_round_draws_other_widths():
    method, client = fjord_client(capacity="1")
    method.local_update(client)
    first = client.state.drawn.clone()
    client.begin(1, 0, {})
    method.local_update(client)
    assert not torch.equal(first, client.state.drawn)


def test_models_that_mix_channels_are_refused():
    with refused(MismatchError, "fjord", "GroupNorm"):
        run_tiny("fjord", models="cnn-16-32-gn", capacity="1,0.5")


def test_evaluation_uses_the_client_s_whole_width():
    _, client = fjord_client(capacity="1")
    client.state.share.fill_(0.2)
    client.set_mode(False)
    x = batch_of(client).x
    cut = client.model(x)
    client.state.share.fill_(1.0)
    assert torch.equal(cut, client.model(x))
    assert FjORD().widths == 5
