"""FD by hand: the logits that go up, their mean, the loss, and what leaving one out means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import assemble_tiny, run_tiny
from kit import ByHand
from parties import client_of, data_of, equal, federation_of, flat_split, run_through, server_of, signs, task_of
from pluribus.client import Batch, Client
from pluribus.errors import RangeError
from pluribus.message import Message, Rows
from pluribus.methods.fd import FD
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import refused

C = 10


def rows(classes: int, **given: list[float]) -> Rows:
    """`c2=[...]` is the row of class 2."""
    found = Rows(torch.zeros(classes, len(next(iter(given.values())))), torch.zeros(classes, dtype=torch.bool))
    for name, row in given.items():
        found.value[int(name[1:])] = torch.tensor(row)
        found.held[int(name[1:])] = True
    return found


def upload(classes: int, **given: list[float]) -> Message:
    return Message({"logits": rows(classes, **given)})


def party(method: FD, pixels: list[list[int]], labels: list[int], model: TwoPartModel | None = None, **how) -> Client:
    """A client whose logits are its two pixels, unless a model is given."""
    if model is None:
        model = flat_split(2, 2)
        model.head.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    down = method.schema(task_of(2, 2), None).down
    client = client_of(model, data_of(signs(pixels), labels), down=down, **how)
    method.prepare(client)
    return client


def whole(client: Client) -> Batch:
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


def gradient(method: FD, client: Client) -> Tensor:
    """Of the head's weights."""
    return client.grads(method.loss(client, whole(client)))["head.weight"]


class TestLoss:
    """Logits (1, -1): p = (0.8807971, 0.1192029), log p = (-0.1269280, -2.1269280). Target (0, ln 3): q = (1/4, 3/4).

    CE(o, 0) = 0.1269280 and CE(o, q) = 1/4 * 0.1269280 + 3/4 * 2.1269280 = 1.6269280.
    """

    TARGET = (0.0, 1.0986123)

    def test_by_hand(self):
        method = FD(gamma=2.0)
        client = party(method, [[1, -1]], [0])
        client.take(upload(2, c0=list(self.TARGET)))
        assert method.loss(client, whole(client)).item() == pytest.approx(0.1269280 + 2 * 1.6269280, abs=1e-6)

    def test_a_step_by_hand(self):
        """d/do = (p - e_0) + 2 (p - q): (-0.1192029 + 2 * 0.6307971) = 1.1423912 for o_0, minus that for o_1."""
        method = FD(gamma=2.0)
        client = party(method, [[1, -1]], [0], rule=Rule(lr=0.1))
        client.take(upload(2, c0=list(self.TARGET)))
        method.local_update(client)
        expected = torch.tensor([[1 - 0.11423912, 0.11423912], [0.11423912, 1 - 0.11423912]])
        torch.testing.assert_close(client.model.head.weight.detach(), expected, rtol=0, atol=1e-6)

    def test_a_class_without_a_target_adds_nothing_and_counts_in_the_mean(self):
        """Two samples with logits (1, -1) and (-1, 1), each with CE 0.1269280; only class 0 has a target."""
        method = FD()
        client = party(method, [[1, -1], [-1, 1]], [0, 1])
        client.take(upload(2, c0=list(self.TARGET)))
        assert method.loss(client, whole(client)).item() == pytest.approx(0.1269280 + 1.6269280 / 2, abs=1e-6)
        alone = party(method, [[-1, 1], [-1, 1]], [1, 1])
        alone.take(upload(2, c0=list(self.TARGET)))
        assert torch.equal(gradient(method, alone), gradient(FD(gamma=0.0), alone))

    def test_before_the_first_message_it_is_cross_entropy(self):
        client = party(FD(), [[1, -1]], [0])
        assert FD().loss(client, whole(client)).item() == pytest.approx(0.1269280, abs=1e-6)

    def test_the_term_is_never_below_the_entropy_of_its_target(self):
        """With equality where the logits are the target's, whatever constant is added."""
        client = party(FD(), [[1, -1]], [0])
        target = torch.tensor([1.5, -0.5])
        client.take(upload(2, c0=target.tolist()))
        q = target.softmax(0)
        entropy = -(q * q.log()).sum().item()
        y = torch.zeros(200, dtype=torch.long)
        logits = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)) * 5
        terms = [FD().distillation(client, logits[i : i + 1], y[:1]).item() for i in range(200)]
        assert min(terms) >= entropy - 1e-6
        assert FD().distillation(client, target[None] + 7, y[:1]).item() == pytest.approx(entropy, abs=1e-6)

    def test_probabilities_by_hand(self):
        """The target is (1/4, 3/4) as it came, with no softmax: CE(o, q) = 1.6269280, and d/do as above."""
        method = FD(gamma=2.0, average="probabilities")
        client = party(method, [[1, -1]], [0], rule=Rule(lr=0.1))
        client.take(upload(2, c0=[0.25, 0.75]))
        assert method.loss(client, whole(client)).item() == pytest.approx(0.1269280 + 2 * 1.6269280, abs=1e-6)
        method.local_update(client)
        expected = torch.tensor([[1 - 0.11423912, 0.11423912], [0.11423912, 1 - 0.11423912]])
        torch.testing.assert_close(client.model.head.weight.detach(), expected, rtol=0, atol=1e-6)

    def test_no_gradient_flows_into_the_target(self):
        client = party(FD(), [[1, -1]], [0])
        client.take(upload(2, c0=list(self.TARGET)))
        assert not client.got.rows("logits").value.requires_grad


class TestReport:
    def test_the_mean_of_what_was_seen_before_each_step(self):
        """One batch of (1, -1) and (1, 1), both of class 0, two epochs: W = I gives logits (1, 0) on average.

        p_1 = 0.1192029 and 1/2, so d o_1 is their mean times x; eta = 1. Row 0 of W and b rise by (p_1 sums) / 2 in
        (x_0, x_1, 1): a = (0.6192029 / 2, 0.3807971 / 2, 0.6192029 / 2); row 1 falls alike. Mean logits of the second
        epoch: W x + b at x = (1, 0) is (1 + a_0 + a_2, -(a_0 + a_2)) = (1.6192029, -0.6192029).
        """
        method = FD()
        client = party(method, [[1, -1], [1, 1]], [0, 0], rule=Rule(lr=1.0), epochs=2)
        sent = method.local_update(client).rows("logits")
        assert sent.held.tolist() == [True, False]
        assert sent.value[0].tolist() == pytest.approx([1.3096015, -0.3096015], abs=1e-6)

    @pytest.mark.parametrize(("average", "sent"), [("logits", [1.0, 0.0]), ("probabilities", [0.69039855, 0.30960145])])
    def test_logits_or_their_softmax(self, average, sent):
        """Logits (1, -1) and (1, 1): p = (0.8807971, 0.1192029) and (1/2, 1/2). The softmax of the mean logit (1, 0)
        would be (0.7310586, 0.2689414)."""
        method = FD(average=average)
        client = party(method, [[1, -1], [1, 1]], [0, 0], rule=Rule(lr=0.0))
        assert method.local_update(client).rows("logits").value[0].tolist() == pytest.approx(sent, abs=1e-6)

    def test_every_round_starts_anew(self):
        method = FD()
        client = party(method, [[1, -1]], [0], rule=Rule(lr=0.0))
        first = method.local_update(client).rows("logits")
        assert client.state.seen.counts.tolist() == [1, 0]
        second = method.local_update(client).rows("logits")
        assert client.state.seen.counts.tolist() == [1, 0]
        assert torch.equal(first.value, second.value)

    def test_in_train_mode(self):
        """Batch norm over one batch; means -1/3 and 1/3, deviation sqrt(8)/3.

        (4/3) / (sqrt(8)/3) = sqrt(2) for class 0, and minus half of that for class 1.
        """
        model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, eps=1e-12)), nn.Linear(2, 2), 2)
        model.head.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        method = FD()
        client = party(method, [[1, -1], [-1, 1], [-1, 1]] * 3, [0, 1, 1] * 3, model)
        sent = method.local_update(client).rows("logits")
        assert sent.value[0].tolist() == pytest.approx([2**0.5, -(2**0.5)], abs=1e-5)
        assert sent.value[1].tolist() == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-5)


class Told:
    """A server that was told these uploads, round after round."""

    def __init__(self, method: FD, clients: int = 3, classes: int = 2) -> None:
        self.method = method
        self.server = server_of(task_of(classes, 2, clients=clients), dict.fromkeys(range(clients), 1))
        method.setup(self.server)

    def __call__(self, uploads: dict[int, Message]) -> Told:
        self.method.aggregate(self.server, uploads)
        return self

    def down(self, client: int = 0) -> dict[int, list[float]]:
        found = self.method.download(self.server, client).rows("logits")
        assert not found.value[~found.held].any()
        return {c: found.value[c].tolist() for c in found.held.nonzero().flatten().tolist()}


class TestServer:
    def test_nothing_is_known_at_first(self):
        assert Told(FD()).down() == {}

    def test_the_mean_over_reporters(self):
        two = {0: upload(2, c0=[1.0, 3.0]), 1: upload(2, c0=[3.0, -3.0], c1=[4.0, 5.0])}
        told = Told(FD())({**two, 2: upload(2, c1=[0.0, 1.0])})
        assert told.down() == {0: [2, 0], 1: [2, 3]}

    def test_a_class_that_one_client_holds_is_that_client_s(self):
        told = Told(FD())({0: upload(2, c0=[1.0, 3.0]), 1: upload(2, c1=[0.1, 0.7])})
        assert told.down()[1] == pytest.approx([0.1, 0.7])

    def test_who_is_who_does_not_matter(self):
        reports = [upload(2, c0=[1.0, 2.0]), upload(2, c0=[4.0, 8.0], c1=[1.0, 0.0]), upload(2, c1=[3.0, 0.5])]
        one, other = (Told(FD())({k: reports[j] for k, j in enumerate(order)}) for order in ((0, 1, 2), (2, 0, 1)))
        assert one.down() == other.down()

    def test_each_round_replaces_the_last_and_an_unreported_class_stays(self):
        told = Told(FD())({0: upload(2, c0=[1.0, 3.0], c1=[2.0, 2.0]), 1: upload(2, c1=[4.0, 4.0])})
        told({2: upload(2, c0=[8.0, 9.0])})
        assert told.down() == {0: [8, 9], 1: [3, 3]}


@pytest.mark.parametrize(
    ("average", "term"),
    [("logits", 0.7310586 * 0.1269280 + 0.2689414 * 2.1269280), ("probabilities", 0.5 * 0.1269280 + 0.5 * 2.1269280)],
)
def test_what_one_client_learns_from_two(average, term):
    """From reports to the loss of a sample with log p = (-0.1269280, -2.1269280).

    Logits (3, 0) and (-1, 0) have the mean (1, 0), whose softmax is (0.7310586, 0.2689414). Probabilities (0.9, 0.1)
    and (0.1, 0.9) have the mean (1/2, 1/2).
    """
    method = FD(average=average)
    first, second = ([3.0, 0.0], [-1.0, 0.0]) if average == "logits" else ([0.9, 0.1], [0.1, 0.9])
    told = Told(method)({0: upload(2, c0=first), 1: upload(2, c0=second)})
    client = party(method, [[1, -1]], [0])
    client.take(method.download(told.server, 0))
    assert method.loss(client, whole(client)).item() == pytest.approx(0.1269280 + term, abs=1e-6)


@pytest.mark.parametrize("exclude_self", [False, True])
def test_what_travels_of_probabilities_are_distributions(exclude_self):
    hand = ByHand(assemble_tiny("fd", average="probabilities", exclude_self=exclude_self))
    for t in range(2):
        hand.round(t, range(4))
    for k in range(4):
        down = hand.method.download(hand.server, k).rows("logits")
        assert down.held.any()
        torch.testing.assert_close(down.value[down.held].sum(1), torch.ones(int(down.held.sum())))
        assert down.value.min() > -1e-6


class TestExcludeSelf:
    def test_the_mean_over_the_others(self):
        told = Told(FD(exclude_self=True))
        told({0: upload(2, c0=[1.0, 0.0]), 1: upload(2, c0=[2.0, 4.0]), 2: upload(2, c0=[4.0, 8.0])})
        assert [told.down(k) for k in range(3)] == [{0: [3, 6]}, {0: [2.5, 4]}, {0: [1.5, 2]}]

    def test_alone_there_is_no_target(self):
        told = Told(FD(exclude_self=True))({0: upload(2, c0=[0.1, 0.3], c1=[1.0, 1.0]), 1: upload(2, c1=[3.0, 5.0])})
        mine = pytest.approx([0.1, 0.3])
        assert [told.down(k) for k in range(3)] == [{1: [3, 5]}, {0: mine, 1: [1, 1]}, {0: mine, 1: [2, 3]}]

    def test_who_was_absent_gets_the_whole_mean(self):
        """Client 0's report of round 0 is no part of class 0 any more, but still of class 1, unreported since."""
        told = Told(FD(exclude_self=True))({0: upload(2, c0=[1.0, 1.0], c1=[6.0, 6.0]), 1: upload(2, c1=[2.0, 4.0])})
        told({1: upload(2, c0=[2.0, 2.0]), 2: upload(2, c0=[4.0, 4.0])})
        assert told.down(0) == {0: [3, 3], 1: [2, 4]}
        assert told.down(1) == {0: [4, 4], 1: [6, 6]}
        assert told.down(2) == {0: [2, 2], 1: [4, 5]}

    def test_it_is_the_mean_over_the_others_whoever_takes_part(self):
        """Against a list of each class's reports in the round that last had any."""
        told, draw = Told(FD(exclude_self=True), clients=4, classes=3), torch.Generator().manual_seed(0)
        last: dict[int, dict[int, Tensor]] = {}
        for _ in range(12):
            sent = {}
            for k in torch.randperm(4, generator=draw)[:2].sort().values.tolist():
                held = torch.rand(3, generator=draw) > 0.5
                sent[k] = Rows(torch.randn(3, 3, generator=draw) * held[:, None], held)
            for c in range(3):
                if now := {k: r.value[c] for k, r in sent.items() if r.held[c]}:
                    last[c] = now
            told({k: Message({"logits": r}) for k, r in sent.items()})
            for k in range(4):
                others = {c: [v for j, v in by.items() if j != k] for c, by in last.items()}
                expected = {c: torch.stack(v).mean(0).tolist() for c, v in others.items() if v}
                found = told.down(k)
                assert found.keys() == expected.keys()
                assert all(found[c] == pytest.approx(expected[c], abs=1e-6) for c in found)

    def test_in_a_run_with_absent_and_late_clients(self):
        settings = {"participation": 0.75, "straggler_rate": 0.3, "rounds": 4, "partition": "dirichlet"}
        with_self, without = run_tiny("fd", **settings), run_tiny("fd", exclude_self=True, **settings)
        assert without.bytes["up"] == with_self.bytes["up"]
        assert without.history[0]["loss"] == with_self.history[0]["loss"]
        assert without.history[-1]["loss"] != with_self.history[-1]["loss"]


class TestRun:
    def test_without_its_term_it_is_local_training(self):
        federations = [federation_of(assemble_tiny("fd", gamma=0.0)), federation_of(assemble_tiny("local"))]
        for one in federations:
            run_through(one)
        for k in range(4):
            assert equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in federations))

    def test_with_its_term_it_is_not(self):
        federations = [federation_of(assemble_tiny("fd")), federation_of(assemble_tiny("local"))]
        for one in federations:
            run_through(one)
        for k in range(4):
            assert not equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in federations))

    def test_traffic_is_what_the_sheet_says(self):
        """c_i C floats up; C_seen C down, none in the first round."""
        settings = {"rounds": 3, "partition": "pathological", "classes_per_client": 2}
        result, data = run_tiny("fd", **settings), assemble_tiny("fd", **settings).data
        held = [{c for c, n in enumerate(data.counts(k)) if n} for k in range(4)]
        assert all(len(one) == 2 for one in held)
        seen = len(set().union(*held))
        assert seen < C
        assert result.ledger.by("tensor", "up")["logits"] == 3 * 4 * C * sum(map(len, held))
        assert result.ledger.by("tensor", "down")["logits"] == 2 * 4 * 4 * C * seen
        for way in ("up", "down"):
            assert set(result.ledger.by("tensor", way)) == {"logits", "logits.ids", "(header)"}

    def test_a_negative_weight_is_refused(self):
        with refused(RangeError, "--gamma", 0, -1):
            assemble_tiny("fd", gamma=-1.0)
