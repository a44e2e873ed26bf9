"""pFedPT: the border's shape and its step by hand, what each stage leaves alone, and what never travels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assemble_tiny, few_digits, make_host, run_tiny
from kit import ByHand
from parties import client_of, copies, data_of, flat_split, noise
from pluribus.client import Batch, Client
from pluribus.errors import RangeError
from pluribus.internal.steps import Descent
from pluribus.methods.fedavg import FedAvg
from pluribus.methods.pfedpt import Border, PFedPT
from pluribus.models import TwoPartModel
from pluribus.optim import Opt, Rule
from refusals import refused

SHAPE = (1, 4, 5)
METHOD = PFedPT(border=1, prompt_lr=0.5)


def tune(client: Client, batch: Batch) -> torch.Tensor:
    """A step of the first stage."""
    return Descent(METHOD.prompt_loss, ("prompt",))(client, batch)


def border_of(shape=SHAPE, width: int = 1) -> Border:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Border(shape, width)


def client_with(model: TwoPartModel, samples: int = 6, lr: float = 0.1):
    """A client with a border before its model, and random images."""
    border = border_of()
    opts = {"prompt": Opt(border, Rule(lr=METHOD.prompt_lr)), "model": Opt(model)}
    labels = [k % 2 for k in range(samples)]
    client = client_of(model, data_of(noise(samples, SHAPE), labels), rule=Rule(lr=lr), opts=opts)
    client.state.prompt = border
    return client


def whole(client) -> Batch:
    data = client.data["train"]
    positions = torch.arange(len(data))
    return Batch(*data.take(positions), positions, len(data))


def pixels(border: Border) -> torch.Tensor:
    return border.delta().detach().clone()


class TestBorder:
    @pytest.mark.parametrize(
        ("shape", "width", "count"),
        [((3, 32, 32), 4, 1344), ((3, 32, 32), 2, 720), ((1, 8, 8), 2, 48), ((1, 8, 8), 3, 60), ((2, 5, 9), 1, 48)],
    )
    def test_numbers(self, shape, width, count):
        """c (2 s W + 2 s (H - 2 s)); FedHPL's 1,344 is s = 4 on three channels of 32x32."""
        border = border_of(shape, width)
        assert sum(p.numel() for p in border.parameters()) == count
        assert int(border.delta().count_nonzero()) == count

    @pytest.mark.parametrize(("shape", "width"), [((3, 32, 32), 4), ((1, 8, 8), 3), ((2, 5, 9), 1)])
    def test_zero_inside_and_only_there(self, shape, width):
        delta = border_of(shape, width).delta()
        assert delta.shape == shape
        mask = torch.ones(shape, dtype=torch.bool)
        mask[:, width:-width, width:-width] = False
        assert delta[mask].all()
        assert not delta[~mask].any()

    def test_every_side_is_where_it_belongs(self):
        border = border_of((1, 3, 4))
        with torch.no_grad():
            border.rows.copy_(torch.arange(1.0, 9).view(1, 2, 4))
            border.sides.copy_(torch.tensor([[[9.0, 10.0]]]))
        assert border.delta().tolist() == [[[1, 2, 3, 4], [9, 0, 0, 10], [5, 6, 7, 8]]]

    def test_added_to_every_image(self):
        border, x = border_of(), torch.randn(3, *SHAPE)
        assert torch.equal(border(x), x + border.delta()[None])


class TestStages:
    def test_a_step_of_the_border_by_hand(self):
        """For logits W (x + delta) + b: d loss / d delta = mean over samples of W^T (p - e_y), kept in the border."""
        model = flat_split(math.prod(SHAPE), 2)
        client = client_with(model)
        batch, border = whole(client), client.state.prompt
        x = (batch.x + border.delta()).detach().flatten(1)
        p = (x @ model.head.weight.T + model.head.bias).softmax(1)
        gradient = ((p - F.one_hot(batch.y, 2)) @ model.head.weight).mean(0).view(SHAPE).detach()
        gradient[:, 1:-1, 1:-1] = 0
        expected = pixels(border) - METHOD.prompt_lr * gradient
        tune(client, batch)
        torch.testing.assert_close(pixels(border), expected)

    def normed(self) -> TwoPartModel:
        return flat_split(math.prod(SHAPE), 2, 0, nn.BatchNorm2d(1))

    def test_the_first_leaves_the_model_alone_and_the_second_the_border(self):
        client = client_with(self.normed())
        client.model.train()
        before = copies(client)
        tune(client, whole(client))
        tuned = copies(client)
        moved = {name for name in before if not torch.equal(before[name], tuned[name])}
        assert moved == {"state.prompt.rows", "state.prompt.sides"}, "batch-norm statistics stay too"
        METHOD.step(client, whole(client))
        after = copies(client)
        still = {name for name in tuned if torch.equal(tuned[name], after[name])}
        assert still == {"state.prompt.rows", "state.prompt.sides"}

    def test_the_border_is_tuned_by_the_loss_that_the_model_descends(self):
        client = client_with(self.normed())
        client.model.train()
        batch = whole(client)
        descended = METHOD.loss(client, batch).detach()  # running statistics move, but are not used in training
        torch.testing.assert_close(tune(client, batch).detach(), descended)

    def test_loss_is_of_what_is_predicted(self):
        client = client_with(flat_split(math.prod(SHAPE), 2))
        batch = whole(client)
        logits = METHOD.predict(client, batch.x)
        assert torch.equal(METHOD.loss(client, batch), F.cross_entropy(logits, batch.y))
        assert torch.equal(logits, client.model(batch.x + client.state.prompt.delta()))
        assert not torch.allclose(logits, client.model(batch.x))

    @pytest.mark.parametrize("epochs", [0, 1, 3])
    def test_epochs_of_each(self, epochs, monkeypatch):
        client, calls = client_with(flat_split(math.prod(SHAPE), 2), samples=20), []
        for name in ("prompt_loss", "step"):
            original = getattr(PFedPT, name)

            def counted(self, client, batch, original=original, name=name):
                calls.append(name)
                return original(self, client, batch)

            monkeypatch.setattr(PFedPT, name, counted)
        PFedPT(border=1, prompt_epochs=epochs).local_update(client)
        assert calls == ["prompt_loss"] * 2 * epochs + ["step"] * 2


class TestRun:
    def test_the_mean_is_fedavgs_and_the_border_stays(self):
        parts = assemble_tiny("pfedpt", data=few_digits(160))
        hand = ByHand(parts)
        hand.round(0, range(4))
        clients = [hand.host.client(k) for k in range(4)]
        borders = [pixels(client.state.prompt) for client in clients]
        assert len({tuple(border.flatten().tolist()) for border in borders}) == 4
        total = sum(parts.cards[k].samples for k in range(4))
        for name, value in hand.server.state.shared.state_dict().items():
            mean = sum(c.model.state_dict()[name] * (parts.cards[c.card.id].samples / total) for c in clients)
            torch.testing.assert_close(value, mean)
        for client, border in zip(clients, borders, strict=True):
            parts.method.receive(client, parts.method.download(hand.server, client.card.id))
            assert torch.equal(pixels(client.state.prompt), border)

    def test_who_never_took_part_has_its_first_border(self):
        parts = assemble_tiny("pfedpt", data=few_digits(160))
        hand, born = ByHand(parts), make_host(parts)
        hand.round(0, [0, 1])
        for k in range(4):
            same = torch.equal(pixels(hand.host.client(k).state.prompt), pixels(born.client(k).state.prompt))
            assert same == (k > 1)

    def test_traffic_is_what_the_sheet_says(self):
        """The model each way, as with FedAvg: delta never travels."""
        parts = assemble_tiny("pfedpt")
        assert parts.method.schema(parts.task, parts.cards[0]) == FedAvg().schema(parts.task, parts.cards[0])
        result = run_tiny("pfedpt", data=few_digits(160), rounds=2)
        sizes = {n: 2 * 4 * 4 * v.numel() for n, v in parts.task.build("cnn-16").state_dict().items()}
        for way in ("up", "down"):
            found = result.ledger.by("tensor", way)
            found.pop("(header)")
            assert found == sizes


class TestRefusals:
    @pytest.mark.parametrize("border", [0, -1, 4, 5])
    def test_a_border_that_leaves_nothing_inside(self, border):
        with refused(RangeError, "--border", 1, border):
            assemble_tiny("pfedpt", border=border)

    def test_the_widest_border(self):
        assemble_tiny("pfedpt", border=3)
        assemble_tiny("pfedpt", border=4, image_size=9)

    def test_values(self):
        with refused(RangeError, "--prompt-lr", 0):
            assemble_tiny("pfedpt", prompt_lr=0)
        with refused(RangeError, "--prompt-epochs", 0, -1):
            assemble_tiny("pfedpt", prompt_epochs=-1)
