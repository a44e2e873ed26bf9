"""FedGen, by hand from its losses, and the promises of its page."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from test_stacked import OneThread
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import assemble_tiny, few_digits, make_host, run_tiny
from kit import ByHand
from parties import card_of, client_of, copies, data_of, equal, federation_of, noise, run_through, task_of
from pluribus.client import Batch, Client
from pluribus.engines.stacked import Group, is_stackable
from pluribus.errors import RangeError
from pluribus.message import Message, encode
from pluribus.methods._generator import Frozen, Generator, alikeness, label_at
from pluribus.methods.fedgen import FedGen
from pluribus.models import TwoPartModel
from pluribus.request import Work
from pluribus.server import Server
from pluribus.storage.folder import RunFolder
from refusals import refused

K = 64  # width of the small group
C = 10
SMALL = FedGen(noise=3, hidden=5, generator_steps=4, generator_batch=6)


# ---- pieces --------------------------------------------------------------------------------------------------------


class TestGenerator:
    def test_parameters_and_buffers(self):
        """P_gen = (d + C) H + 2 H + H K + K, and 2 H + 1 numbers of batch normalization."""
        one = Generator(32, C, 256, K)
        assert sum(p.numel() for p in one.parameters()) == (32 + C) * 256 + 2 * 256 + 256 * K + K
        assert sum(b.numel() for b in one.buffers()) == 2 * 256 + 1

    def test_everything_that_travels_can_learn(self):
        """A bias before batch normalization would have no gradient but rounding."""
        one, draws = Generator(3, C, 5, 4), torch.Generator().manual_seed(0)
        made = one(torch.rand(32, 3, generator=draws), torch.randint(C, (32,), generator=draws))
        grads = torch.autograd.grad((made * torch.randn(made.shape, generator=draws)).sum(), list(one.parameters()))
        assert len(grads) == 5
        assert min(float(g.abs().max()) for g in grads) > 1e-3

    def test_by_hand(self):
        """eps = 1/2, y = 1 of 2: inner (1/2 + 2, 0), normalized by mean 0 and variance 1 (eps 0), then ReLU."""
        one = Frozen(1, 2, 2, 1)
        one.norm.eps = 0.0
        numbers = {"inner.weight": [[1.0, 7.0, 2.0], [0.0, 1.0, -1.0]]}
        numbers |= {"outer.weight": [[2.0, 5.0]], "outer.bias": [-1.0]}
        one.load_state_dict({n: torch.tensor(v) for n, v in numbers.items()}, strict=False)
        assert one.train()(torch.tensor([[0.5]]), torch.tensor([1])).tolist() == [[4.0]]

    def test_a_client_s_never_trains(self):
        whole = nn.Sequential(Frozen(3, 2, 5, 4)).train()
        before = {name: value.clone() for name, value in whole.state_dict().items()}
        made = whole[0](torch.rand(6, 3), torch.zeros(6, dtype=torch.long))
        assert not made.requires_grad
        assert equal(before, dict(whole.state_dict()))
        assert not any(part.training for part in whole[0].modules())

    def test_the_server_s_normalizes_by_its_batch(self):
        one = Generator(3, 2, 5, 4)
        one(torch.rand(6, 3), torch.zeros(6, dtype=torch.long))
        assert one.norm.num_batches_tracked == 1


class TestLabels:
    def test_labels_that_nobody_holds_are_never_drawn(self):
        shares = torch.tensor([0.0, 0.3, 0.0, 0.0, 0.7, 0.0])
        u = torch.cat([torch.rand(20_000, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 1 - 2**-24])])
        drawn = label_at(shares.double().cumsum(0), u)
        assert set(drawn.tolist()) == {1, 4}
        assert (drawn == 1).float().mean().item() == pytest.approx(0.3, abs=0.01)

    def test_shares_that_do_not_sum_to_one_exactly(self):
        shares = torch.full((10,), 0.1)
        shares[9] = 0
        assert label_at(shares.double().cumsum(0), torch.tensor([1 - 2**-24])).tolist() == [8]

    def test_without_any_share_it_is_still_a_label(self):
        """Places that nobody takes in a stack of clients hold zeros, and compute something for nobody."""
        assert label_at(torch.zeros(3), torch.tensor([0.0, 0.9])).tolist() == [2, 2]


class TestDiversity:
    def test_by_hand(self):
        """Noise 1 apart (mean square), features (2 + 4) / 2 = 3 apart; two of four pairs: exp(-2 * 3 / 4)."""
        found = alikeness(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
        assert found.item() == pytest.approx(math.exp(-1.5), rel=1e-6)

    def test_square_of_the_noise_and_absolute_value_of_features(self):
        """Noise (1/2, 0) apart: mean square 1/8. Features 8 apart: 2 * (1/8 * 8) / 4 = 1/2."""
        found = alikeness(torch.tensor([[0.0, 1.0], [0.5, 1.0]]), torch.tensor([[-4.0], [4.0]]))
        assert found.item() == pytest.approx(math.exp(-0.5), rel=1e-6)

    def test_one_where_all_features_are_alike(self):
        assert alikeness(torch.rand(4, 3), torch.ones(4, 2)).item() == 1


# ---- server --------------------------------------------------------------------------------------------------------


def toy_server(method: FedGen, counts: dict[int, list[int]], width: int = 4) -> Server:
    """A server whose clients hold so many samples of each class."""
    classes = len(next(iter(counts.values())))
    task = task_of(classes, width, clients=max(counts) + 1)
    cards = {k: card_of(k, task, sum(n)) for k, n in counts.items()}
    told = {k: Message({"counts": torch.tensor(n, dtype=torch.int32)}) for k, n in counts.items()}
    server = Server(task, {k: replace(card, enrolled=told[k]) for k, card in cards.items()})
    object.__setattr__(task, "build", lambda *key: TwoPartModel(nn.Flatten(), nn.Linear(width, classes), width))
    method.setup(server)
    server.begin(0, {})
    return server


def head_of(weight: Tensor, bias: list[float]) -> Message:
    return Message({"head.weight": weight, "head.bias": torch.tensor(bias)})


def blind(*bias: float) -> Message:
    """A head that sees no feature: its logits are its bias, whatever is generated."""
    return head_of(torch.zeros(len(bias), 4), list(bias))


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """The losses that the generator goes down."""
    seen: list[float] = []
    descend = Server.descend

    def watched(server, loss, name):
        seen.append(loss.item())
        descend(server, loss, name)

    monkeypatch.setattr(Server, "descend", watched)
    return seen


class TestTeachers:
    def test_each_counts_by_its_share_of_the_label(self, losses):
        """All labels are 0; shares 1/4 and 3/4. Bias (0, 0): CE = ln 2; bias (ln 3, 0): CE = ln 4/3."""
        method = replace(SMALL, diversity=0.0)
        server = toy_server(method, {0: [1, 0], 1: [3, 0]})
        method.aggregate(server, {0: blind(0.0, 0.0), 1: blind(math.log(3), 0.0)})
        assert losses == pytest.approx([math.log(2) / 4 + 3 * math.log(4 / 3) / 4] * 4, rel=1e-6)

    def test_shares_are_per_label(self, losses):
        """Client 0 alone holds label 0, client 1 alone label 1: each is asked for its own, whatever their sizes.

        CE of label 0 at bias (ln 3, 0) is ln 4/3, and of label 1 at bias (0, ln 7) it is ln 8/7.
        """
        method = replace(SMALL, diversity=0.0, generator_batch=500, generator_steps=1)
        server = toy_server(method, {0: [30, 0], 1: [0, 10]})
        method.aggregate(server, {0: blind(math.log(3), 0.0), 1: blind(0.0, math.log(7))})
        u = torch.rand(1, 500, generator=server.draw("labels"))
        ones = (u >= 0.75).double().mean().item()
        assert 0.15 < ones < 0.35
        assert losses == pytest.approx([(1 - ones) * math.log(4 / 3) + ones * math.log(8 / 7)], rel=1e-5)

    def test_equal_heads_make_weights_irrelevant(self, losses):
        head = head_of(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), [0.1, 0.2, 0.3])
        found = []
        for counts in ({0: [4, 4, 4], 1: [4, 4, 4]}, {0: [1, 7, 8], 1: [7, 1, 0]}, {0: [8, 8, 8]}):
            server = toy_server(SMALL, counts)
            SMALL.aggregate(server, dict.fromkeys(counts, head))
            found.append(losses.copy())
            losses.clear()
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        assert found[2] == pytest.approx(found[0], rel=1e-5)

    def test_a_label_without_a_teacher_this_round_teaches_nothing(self, losses):
        """Label 1 is known from round 0; of its holder there is no answer now. What is left is ln 2 for label 0."""
        method = replace(SMALL, diversity=0.0, generator_batch=400, generator_steps=1)
        server = toy_server(method, {0: [10, 0], 1: [0, 10]})
        method.aggregate(server, {0: blind(0.0, 0.0), 1: blind(0.0, 0.0)})
        server.begin(1, {})
        method.aggregate(server, {0: blind(0.0, 0.0)})
        zeros = (torch.rand(1, 400, generator=server.draw("labels")) < 0.5).double().mean().item()
        assert losses == pytest.approx([math.log(2), zeros * math.log(2)], rel=1e-5)

    @pytest.mark.parametrize(("weighting", "bias"), [("samples", 3.0), ("uniform", 2.0)])
    def test_heads_are_averaged_by_samples_or_evenly(self, losses, weighting, bias):
        """1 sample and bias (0, 0), 3 samples and bias (4, 0)."""
        method = replace(SMALL, weighting=weighting)
        server = toy_server(method, {0: [1, 0], 1: [3, 0]})
        method.aggregate(server, {0: blind(0.0, 0.0), 1: blind(4.0, 0.0)})
        assert server.state.head.bias.tolist() == [bias, 0]
        assert FedGen().weighting == "samples"

    def test_diversity_is_added(self, losses):
        """Blind heads: the losses differ by eta times what `alikeness` says of the first batch."""
        uploads = {0: blind(0.0, 0.0)}
        for eta in (0.0, 2.0):
            method = replace(SMALL, diversity=eta, generator_steps=1)
            server = toy_server(method, {0: [3, 5]})
            eps = torch.rand(1, 6, 3, generator=server.draw("noise"))[0]
            y = label_at(torch.tensor([3.0, 8.0]), torch.rand(1, 6, generator=server.draw("labels")))[0]
            apart = alikeness(eps, server.state.generator(eps, y)).item()
            method.aggregate(server, uploads)
        assert losses[1] - losses[0] == pytest.approx(2 * apart, rel=1e-5)

    def test_the_generator_learns_what_the_heads_ask_for(self, losses):
        method = replace(SMALL, generator_steps=60, generator_lr=0.01)
        server = toy_server(method, {0: [5, 5, 5]})
        method.aggregate(server, {0: head_of(torch.eye(4)[:3] * 3, [0.0, 0.0, 0.0])})
        assert losses[-1] < 0.5 * losses[0]
        assert server.notes["generator_loss"] == losses[-1]


class TestAggregate:
    def test_the_head_is_the_mean_by_samples(self):
        """(2 * 1 + 6 * 5) / 8 = 4, whatever the generator does."""
        server = toy_server(SMALL, {0: [1, 1], 1: [6, 0]})
        SMALL.aggregate(server, {0: head_of(torch.ones(2, 4), [1.0, 1.0]), 1: head_of(torch.full((2, 4), 5.0), [5, 5])})
        assert (server.state.head.weight == 4).all()
        assert (server.state.head.bias == 4).all()

    def test_uploads_are_not_touched(self):
        server, sent = toy_server(SMALL, {0: [1, 1]}), head_of(torch.ones(2, 4), [1.0, 1.0])
        SMALL.aggregate(server, {0: sent})
        assert (sent.tensor("head.weight") == 1).all()

    def test_generator_and_its_moments_go_on_from_round_to_round(self):
        server = toy_server(SMALL, {0: [1, 1]})
        states = [{n: v.clone() for n, v in server.state.generator.state_dict().items()}]
        for t in range(2):
            server.begin(t, {})
            SMALL.aggregate(server, {0: head_of(torch.ones(2, 4), [1.0, 0.0])})
            states.append({n: v.clone() for n, v in server.state.generator.state_dict().items()})
        for one, other in pairwise(states):
            assert all(not torch.equal(one[n], other[n]) for n in one)
        assert states[2]["norm.num_batches_tracked"] == 2 * 4
        slots = server.state.generator_optimiser
        assert {v.item() for n, v in slots.items() if n.endswith("step")} == {8}

    def test_counts_are_pooled_once_over_whoever_answered(self):
        server = toy_server(SMALL, {0: [1, 1], 1: [6, 0], 2: [0, 9]})
        assert SMALL.download(server, 0).tensor("shares").tolist() == [0.5, 0.5]
        head = head_of(torch.ones(2, 4), [1.0, 1.0])
        SMALL.aggregate(server, {1: head})
        assert SMALL.download(server, 0).tensor("shares").tolist() == [1, 0]
        SMALL.aggregate(server, {0: head, 1: head})
        assert server.state.counts.tolist() == [7, 1]
        assert SMALL.download(server, 0).tensor("shares").tolist() == [0.875, 0.125]


# ---- client --------------------------------------------------------------------------------------------------------


def model_of(width: int = 4, classes: int = 3) -> TwoPartModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(16, width)), nn.Linear(width, classes), width)


def toy_client(method: FedGen, t: int = 1) -> Client:
    """A client with a generator of its own, at the start of a round."""
    client = client_of(model_of(), data_of(noise(8), [0, 1, 2, 0, 1, 2, 0, 1]), classes=3)
    method.prepare(client)
    client.equip(method.optimizers(client), {})
    client.begin(t, 0, method.schedule(t, 3))
    client.state.key = torch.tensor(77)
    client.state.edges = torch.tensor([0.5, 0.5, 1.0])
    return client


def batch_of(client: Client) -> Batch:
    x, y = client.data["train"].take(torch.arange(8))
    return Batch(x, y, torch.arange(8), 8)


class TestClient:
    def test_the_loss_by_hand(self):
        """CE + alpha CE(psi(G(y~)), y~) + beta sum p (ln p - ln q), with p = softmax psi(G(y)) and q = softmax of x."""
        method = replace(SMALL, teach=3.0, guide=5.0, fade=0.5)
        client = toy_client(method)
        batch = batch_of(client)
        found = method.loss(client, batch)
        client.state.key = torch.tensor(77)
        u = method._draw_noise(client, 8).double()
        drawn = torch.where(u[:, 6] < 0.5, 0, 2)
        head, generator = client.model.double().head, client.state.generator.double()
        logits = head(client.model.features(batch.x.double()))
        rows = range(8)
        ce = -logits.log_softmax(1)[rows, batch.y].mean()
        taught = -head(_made(generator, u[:, 3:6], drawn)).log_softmax(1)[rows, drawn].mean()
        p, q = head(_made(generator, u[:, :3], batch.y)).log_softmax(1), logits.log_softmax(1)
        guided = (p.exp() * (p - q)).sum(1).mean()
        assert found.item() == pytest.approx((ce + 1.5 * taught + 2.5 * guided).item(), rel=1e-5)
        assert taught > 0.1
        assert guided > 0.001

    def test_weights_of_the_rounds(self):
        """None in round 0: the generator has learned nothing yet. Then alpha 0.98^t."""
        method = FedGen(teach=10.0, guide=5.0)
        assert method.schedule(0, 9) == {"alpha": 0, "beta": 0}
        assert method.schedule(1, 9) == pytest.approx({"alpha": 9.8, "beta": 4.9})
        assert method.schedule(2, 9) == pytest.approx({"alpha": 9.604, "beta": 4.802})

    def test_round_0_is_cross_entropy(self):
        client = toy_client(SMALL, t=0)
        batch = batch_of(client)
        assert SMALL.loss(client, batch).item() == F.cross_entropy(client.model(batch.x), batch.y).item()

    def gradients(self, **weights: float) -> dict[str, Tensor]:
        """Of all that is not cross-entropy."""
        method = replace(SMALL, **{"teach": 0.0, "guide": 0.0} | weights)
        client = toy_client(method)
        batch = batch_of(client)
        return client.grads(method.loss(client, batch) - F.cross_entropy(client.model(batch.x), batch.y))

    def test_generated_features_teach_the_head_alone(self):
        grads = self.gradients(teach=1.0)
        assert not grads["features.1.weight"].any()
        assert not grads["features.1.bias"].any()
        assert grads["head.weight"].any()
        assert grads["head.bias"].any()

    def test_guidance_reaches_the_features_and_its_teacher_stands_still(self):
        """The gradient of the head's bias is the mean of q - p alone."""
        grads = self.gradients(guide=1 / 0.98)
        client = toy_client(SMALL)
        batch, u = batch_of(client), SMALL._draw_noise(client, 8)
        p = client.model.head(client.state.generator(u[:, :3], batch.y)).softmax(1)
        q = client.model(batch.x).softmax(1)
        torch.testing.assert_close(grads["head.bias"], (q - p).mean(0).detach(), rtol=0, atol=1e-6)
        assert grads["features.1.weight"].any()

    def test_nothing_flows_into_the_generator(self):
        client = toy_client(SMALL)
        before = {n: v.clone() for n, v in client.state.generator.state_dict().items()}
        client.fit(SMALL.step)
        assert not any(p.requires_grad for p in client.state.generator.parameters())
        assert equal(before, dict(client.state.generator.state_dict()))

    def test_noise_is_new_in_every_step_and_every_round(self):
        client = toy_client(SMALL)
        one, other = (SMALL._draw_noise(client, 500) for _ in range(2))
        assert not (one == other).any(1).any()
        for drawn in (one, other):
            assert drawn.min() >= 0
            assert drawn.max() < 1
            assert drawn.mean().item() == pytest.approx(0.5, abs=0.02)
        keys = []
        for t in (1, 2):
            client.begin(t, 0, SMALL.schedule(t, 3))
            SMALL.local_update(client)
            keys.append(client.state.key.item())
        assert keys[0] != keys[1]


def _made(generator: Generator, eps: Tensor, y: Tensor) -> Tensor:
    """G by its layers, in eval mode."""
    row = torch.cat([eps, torch.eye(generator.classes, dtype=eps.dtype)[y]], 1) @ generator.inner.weight.T
    norm = generator.norm
    hidden = (row - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    return (hidden * norm.weight + norm.bias).clamp(min=0) @ generator.outer.weight.T + generator.outer.bias


# ---- rounds --------------------------------------------------------------------------------------------------------

TINY = {"data": few_digits(160), "generator_steps": 3, "hidden": 8, "noise": 4}
seen: list[tuple[int, dict[str, Tensor], dict[str, Tensor]]] = []


@dataclass(frozen=True)
class Watched(FedGen):
    """FedGen that writes down the generator and the head that its clients start from."""

    def local_update(self, client):
        parts = client.state.generator, client.model.head
        seen.append((client.t, *({n: v.clone() for n, v in part.state_dict().items()} for part in parts)))
        return super().local_update(client)


class TestRounds:
    def test_everyone_gets_the_newest_generator_and_head(self):
        seen.clear()
        result = run_tiny(Watched, rounds=3, **TINY)
        by_round = [[entry[1:] for entry in seen if entry[0] == t] for t in range(3)]
        for entries in by_round:
            assert len(entries) == 4
            assert all(equal(entries[0][part], other[part]) for other in entries for part in (0, 1))
        for one, other in pairwise(by_round):
            assert all(not torch.equal(one[0][0][n], other[0][0][n]) for n in one[0][0])
        with closing(RunFolder.open(result.folder)) as folder:
            saved = folder.checkpoint.server()
        assert saved["generator.norm.num_batches_tracked"] == 3 * 3
        assert by_round[2][0][0]["norm.num_batches_tracked"] == 2 * 3

    def test_alone_and_without_the_generator_it_is_local_training(self):
        settings = {"clients": 1, "rounds": 3, "epochs": 2, "models": "cnn-16-32"}
        generating = federation_of(assemble_tiny("fedgen", teach=0.0, guide=0.0, **TINY, **settings))
        alone = federation_of(assemble_tiny("local", data=TINY["data"], **settings))
        generating.server.state.head.load_state_dict(alone.engine.host.client(0).model.head.state_dict())
        run_through(generating)
        run_through(alone)
        assert equal(*(dict(one.engine.host.client(0).model.state_dict()) for one in (generating, alone)))

    def test_the_generator_matters_from_round_1_on(self):
        """Two runs that differ in alpha alone: the same models after round 0, others after round 1."""
        hands = [ByHand(assemble_tiny("fedgen", teach=teach, **TINY)) for teach in (1.0, 2.0)]
        for t in range(2):
            for hand in hands:
                hand.round(t, range(4))
            models = [dict(hand.host.client(0).model.state_dict()) for hand in hands]
            assert equal(*models) == (t == 0)

    def test_evaluation_before_training_has_the_mean_head(self):
        result = run_tiny("fedgen", rounds=1, **TINY)
        assert result.views == ("after", "before")

    def test_clients_of_one_architecture_may_train_together(self):
        """Stacked as on a GPU: the same weights as one after the other."""
        small = {"clients": 9, "models": "mlp-64", "batch_size": 4, "min_samples": 4} | TINY
        parts, told = assemble_tiny("fedgen", **small), []
        assert is_stackable(parts.method, make_host(parts).client(0))
        server = Server(parts.task, parts.cards)
        parts.method.setup(server)
        sites = make_host(parts), make_host(parts)
        down = encode(parts.method.download(server, 0), sites[0].wires(0)[0].down, "server")
        for k in range(9):
            sites[0].answer(Work(k, 1, 0, down))
        group = Group(told.append)
        jobs = {k: partial(sites[1].answer, Work(k, 1, 0, down)) for k in range(9)}
        for future in group.do({k: sites[1].client(k) for k in range(9)}, jobs, OneThread()).values():
            future.result()
        group.close()
        assert told == []
        for k in range(9):
            expected, found = (copies(host.client(k)) for host in sites)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_traffic_is_what_the_sheet_says():
    """Up C K + C, and C label counts once; down C K + C + P_gen with its statistics, and the C shares of labels."""
    rounds, clients, hidden, eps = 2, 4, 8, 4
    result = run_tiny("fedgen", rounds=rounds, clients=clients, **TINY)
    up, down = (result.ledger.by("tensor", way) for way in ("up", "down"))
    for sent in (up, down):
        assert sent.pop("(header)") > 0
    assert up.pop("counts") == 4 * C * clients
    assert sum(up.values()) == 4 * (C * K + C) * rounds * clients
    assert sum(down[n] for n in up) == sum(up.values())
    assert down["shares"] == 4 * C * rounds * clients
    generator = {n: size for n, size in down.items() if n.startswith("generator.")}
    assert generator.pop("generator.norm.num_batches_tracked") == 8 * rounds * clients
    weights = (eps + C) * hidden + 2 * hidden + hidden * K + K
    assert sum(generator.values()) == 4 * (weights + 2 * hidden) * rounds * clients
    assert len(down) == 2 + 1 + 8


class TestRefusals:
    @pytest.mark.parametrize(
        ("hyper", "facts"),
        [
            ({"teach": -1.0}, ("--teach", 0, -1.0)),
            ({"guide": -1.0}, ("--guide", 0, -1.0)),
            ({"diversity": -0.5}, ("--diversity", 0, -0.5)),
            ({"noise": 0}, ("--noise", 1, 0)),
            ({"hidden": 0}, ("--hidden", 1, 0)),
            ({"generator_steps": 0}, ("--generator-steps", 1, 0)),
            ({"generator_batch": 1}, ("--generator-batch", 2, 1)),
            ({"generator_lr": 0.0}, ("--generator-lr", 0.0)),
            ({"fade": 0.0}, ("--fade", 0, 1, 0.0)),
            ({"fade": 1.5}, ("--fade", 0, 1, 1.5)),
        ],
    )
    def test_numbers_that_make_no_sense(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("fedgen", **hyper)
