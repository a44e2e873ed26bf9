"""FedGH, by hand from Eq. 3 to 6 of the paper, and the promises of its page."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, make_host, run_tiny
from parties import client_of, copies, data_of, equal, federation_of, flat_split, run_through, server_of, signs, task_of
from pluribus.errors import MismatchError, UnknownNameError
from pluribus.message import Message, Rows, decode, encode
from pluribus.methods.fedgh import FedGH
from pluribus.models import TwoPartModel
from pluribus.ops import class_means
from pluribus.optim import Rule
from pluribus.request import Work
from pluribus.storage.folder import RunFolder
from refusals import refused

K = 64  # width of the small group
C = 10


def server_with(weight: list[list[float]], bias: list[float]):
    """A server whose global head has these numbers."""
    classes, width = len(weight), len(weight[0])
    server = server_of(task_of(classes, width), {0: 1, 1: 1})
    server.state.head = nn.Linear(width, classes)
    server.state.head.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    return server


def upload(classes: int, **means: list[float]) -> Message:
    """A client's LARs: `c2=[...]` is that of class 2."""
    width = len(next(iter(means.values())))
    rows = Rows(torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool))
    for name, mean in means.items():
        rows.value[int(name[1:])] = torch.tensor(mean)
        rows.held[int(name[1:])] = True
    return Message({"means": rows})


def head_numbers(server) -> tuple[list, list]:
    head = server.state.head
    return head.weight.tolist(), head.bias.tolist()


class TestServerStep:
    """Eq. 4: theta <- theta - eta (softmax(theta r) - e_s) r^T."""

    def test_from_zero(self):
        """p = (1/2, 1/2), p - e_0 = (-1/2, 1/2), eta = 1/2: every number is exact."""
        server = server_with([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
        FedGH(server_lr=0.5).aggregate(server, {0: upload(2, c0=[1.0, -2.0])})
        assert head_numbers(server) == ([[0.25, -0.5], [-0.25, 0.5]], [0.25, -0.25])

    def test_one_client_one_class_one_step(self):
        """r = (1, 2), logits (1, 2, 0), exponentials 2.7182818, 7.3890561, 1, their sum 11.1073379.

        p = (0.2447285, 0.6652410, 0.0900306); p - e_0 = (-0.7552715, 0.6652410, 0.0900306); eta = 0.1.
        """
        server = server_with([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [0.0, 0.0, 0.0])
        FedGH(server_lr=0.1).aggregate(server, {0: upload(3, c0=[1.0, 2.0])})
        weight, bias = server.state.head.weight, server.state.head.bias
        expected = torch.tensor([[1.07552715, 0.15105431], [-0.06652410, 0.86695181], [-0.00900306, -0.01800611]])
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-7)
        torch.testing.assert_close(
            bias.detach(), torch.tensor([0.07552715, -0.06652410, -0.00900306]), rtol=0, atol=1e-7
        )

    # K = 1, C = 2, theta = 0, eta = 1, LARs r_0 = 1 and r_1 = 2; sigma(3) = 0.9525741.
    # Class 0, then 1: w = (1/2, -1/2), b = (1/2, -1/2); logits (3/2, -3/2), p_0 = sigma(3);
    # w_0 = 1/2 - 2 sigma(3) = -1.4051483, b_0 = 1/2 - sigma(3) = -0.4525741.
    ZERO_THEN_ONE = -1.4051483, -0.4525741
    # Class 1, then 0: w = (-1, 1), b = (-1/2, 1/2); logits (-3/2, 3/2), 1 - p_0 = sigma(3);
    # w_0 = -1 + sigma(3) = -0.0474259, b_0 = -1/2 + sigma(3) = 0.4525741.
    ONE_THEN_ZERO = -0.0474259, 0.4525741

    def first_row(self, uploads, step: str) -> tuple[float, float]:
        """Weight and bias of class 0; those of class 1 are the same with the other sign."""
        server = server_with([[0.0], [0.0]], [0.0, 0.0])
        FedGH(server_lr=1.0, server_step=step).aggregate(server, uploads)
        (w0,), (w1,) = server.state.head.weight.tolist()
        b0, b1 = server.state.head.bias.tolist()
        assert (w1, b1) == pytest.approx((-w0, -b0), abs=1e-6)
        return w0, b0

    def test_classes_in_order(self):
        uploads = {0: upload(2, c1=[2.0], c0=[1.0])}
        assert self.first_row(uploads, "class") == pytest.approx(self.ZERO_THEN_ONE, abs=1e-6)

    def test_one_step_per_client(self):
        """The mean over both LARs: dw_0 = (-1/2 * 1 + 1/2 * 2) / 2 = 1/4, db_0 = 0."""
        assert self.first_row({0: upload(2, c0=[1.0], c1=[2.0])}, "client") == (-0.25, 0.0)

    @pytest.mark.parametrize("step", ["class", "client"])
    def test_clients_in_order(self, step):
        zero, one = upload(2, c0=[1.0]), upload(2, c1=[2.0])
        assert self.first_row({0: zero, 1: one}, step) == pytest.approx(self.ZERO_THEN_ONE, abs=1e-6)
        assert self.first_row({0: one, 1: zero}, step) == pytest.approx(self.ONE_THEN_ZERO, abs=1e-6)

    def test_a_class_that_nobody_reports_gets_negatives_only(self):
        """Row 2 moves by -eta p_2 r, away from every LAR; p_2 = 1/3, then by hand as above."""
        server = server_with([[0.0], [0.0], [0.0]], [0.0, 0.0, 0.0])
        FedGH(server_lr=0.75).aggregate(server, {0: upload(3, c0=[1.0])})
        assert server.state.head.weight[2].item() == pytest.approx(-0.25, abs=1e-7)
        before = server.state.head.weight[2].item(), server.state.head.bias[2].item()
        FedGH(server_lr=0.75).aggregate(server, {0: upload(3, c0=[1.0], c1=[2.0]), 1: upload(3, c1=[0.5])})
        assert server.state.head.weight[2].item() < before[0]
        assert server.state.head.bias[2].item() < before[1]

    @pytest.mark.parametrize("step", ["class", "client"])
    def test_an_upload_without_any_class_moves_nothing(self, step):
        server = server_with([[1.0], [2.0]], [3.0, 4.0])
        empty = Message({"means": Rows(torch.zeros(2, 1), torch.zeros(2, dtype=torch.bool))})
        FedGH(server_step=step).aggregate(server, {0: empty})
        assert head_numbers(server) == ([[1.0], [2.0]], [3.0, 4.0])


class TestLars:
    """Eq. 3, over every training sample, with the trained extractor."""

    PIXELS = [[1, 1], [1, -1], [-1, -1], [-1, -1], [-1, 1]]  # noqa: RUF012
    LABELS = [0, 2, 2, 0, 2]  # noqa: RUF012

    def lars(self, order=(0, 1, 2, 3, 4), batch: int = 10) -> Rows:
        pixels, labels = [self.PIXELS[i] for i in order], [self.LABELS[i] for i in order]
        client = client_of(flat_split(2, 3), data_of(signs(pixels), labels), classes=3, batch=batch)
        return FedGH().local_update(client).rows("means")

    def test_by_hand(self):
        """Class 0: (1, 1) and (-1, -1). Class 2: (1, -1), (-1, -1) and (-1, 1). The features are the pixels."""
        rows = self.lars()
        assert rows.held.tolist() == [True, False, True]
        assert rows.value.tolist() == [[0, 0], [0, 0], pytest.approx([-1 / 3, -1 / 3])]

    def test_invariant_to_batch_size_and_order(self, monkeypatch):
        whole = self.lars()
        for size, batch, order in ((1, 2, (4, 3, 2, 1, 0)), (2, 3, (2, 0, 4, 1, 3)), (4, 1, (1, 0, 3, 2, 4))):
            monkeypatch.setattr("pluribus.internal.steps.SWEEP_BATCH", size)
            rows = self.lars(order, batch)
            assert torch.equal(rows.value, whole.value)
            assert torch.equal(rows.held, whole.held)

    def test_of_the_trained_extractor_in_eval_mode(self):
        host = make_host(assemble_tiny("fedgh"))
        k = 3  # cnn-16-32, with batch norm
        head = Message.of(host.task.build("mlp-64", "global").head)
        wire = host.wires(k)[0]
        reply = host.answer(Work(k, 0, 0, encode(head, wire.down, "server")))
        sent = decode(reply.up, wire.up, "client").rows("means")
        client = host.client(k)
        x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
        client.model.eval()
        with torch.no_grad():
            features = client.model.features(x)
        for c in range(C):
            assert sent.held[c] == (y == c).any()
            if sent.held[c]:
                torch.testing.assert_close(sent.value[c], features[y == c].mean(0))
        assert equal({"m": class_means(client).value}, {"m": sent.value})


class TestRound:
    def test_a_whole_round_by_hand(self):
        """Clients train from theta^0, and the server steps through their LARs by client and class."""
        result = run_tiny("fedgh", rounds=1, server_lr=0.1)
        parts = assemble_tiny("fedgh", server_lr=0.1)
        host = make_host(parts)
        head = parts.task.build(parts.cards[0].model, "global").head
        down = encode(Message.of(head), host.wires(0)[0].down, "server")
        weight, bias = head.weight.detach().double(), head.bias.detach().double()
        for k in range(4):
            means = decode(host.answer(Work(k, 0, 0, down)).up, host.wires(k)[0].up, "client").rows("means")
            for c in range(C):
                if means.held[c]:
                    r = means.value[c].double()
                    error = torch.softmax(weight @ r + bias, 0) - torch.eye(C, dtype=torch.float64)[c]
                    weight = weight - 0.1 * torch.outer(error, r)
                    bias = bias - 0.1 * error
        with closing(RunFolder.open(result.folder)) as folder:
            saved = folder.checkpoint.server()
        torch.testing.assert_close(saved["head.weight"].double(), weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(saved["head.bias"].double(), bias, rtol=0, atol=1e-6)

    def test_a_local_step_by_hand(self):
        """Eq. 5 and 6: the head is theta, then the whole model takes a step; theta = 0, so p = (1/2, 1/2).

        Pixels (1, -1) of class 0 and (1, 1) of class 1, one batch, eta = 1: the mean of (p - e_y) r^T is
        (-1/2 (1, -1) + 1/2 (1, 1)) / 2 = (0, 1/2) in row 0; the biases' gradients cancel.
        """
        client = client_of(flat_split(2, 2), data_of(signs([[1, -1], [1, 1]]), [0, 1]), rule=Rule(lr=1.0))
        method = FedGH()
        method.receive(client, Message({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}))
        method.local_update(client)
        assert client.model.head.weight.tolist() == [[0, -0.5], [0, 0.5]]
        assert client.model.head.bias.tolist() == [0, 0]

    def test_the_server_step_changes_the_head_and_no_client(self):
        host = make_host(parts := assemble_tiny("fedgh"))
        server = server_of(parts.task, dict.fromkeys(range(4), 1), model="mlp-64")
        method = parts.method
        method.setup(server)
        down = encode(method.download(server, 0), host.wires(0)[0].down, "server")
        uploads = {k: decode(host.answer(Work(k, 0, 0, down)).up, host.wires(k)[0].up, "client") for k in range(4)}
        before, clients = Message.of(server.state.head), [copies(host.client(k)) for k in range(4)]
        method.aggregate(server, uploads)
        after = Message.of(server.state.head)
        assert not torch.equal(before.tensor("weight"), after.tensor("weight"))
        assert not torch.equal(before.tensor("bias"), after.tensor("bias"))
        assert all(equal(copies(host.client(k)), clients[k]) for k in range(4))
        assert list(server.state.state_dict()) == ["head.weight", "head.bias"]

    def test_download_is_pure_and_does_not_alias_the_head(self):
        server = server_with([[1.0], [2.0]], [3.0, 4.0])
        sent = FedGH().download(server, 0)
        FedGH().aggregate(server, {0: upload(2, c0=[1.0])})
        assert sent.tensor("weight").tolist() == [[1], [2]]


heads: list[tuple[int, int, torch.Tensor]] = []  # round, client, head at the start of local training
thetas: list[torch.Tensor] = []  # the global head after each round


@dataclass(frozen=True)
class Watched(FedGH):
    """FedGH that writes down what its clients start from."""

    def local_update(self, client):
        heads.append((client.t, client.card.id, client.model.head.weight.detach().clone()))
        return super().local_update(client)

    def aggregate(self, server, uploads):
        super().aggregate(server, uploads)
        thetas.append(server.state.head.weight.detach().clone())


class TestRounds:
    def test_clients_of_the_next_round_hold_theta_bit_for_bit(self):
        heads.clear()
        thetas.clear()
        run_tiny(Watched, rounds=3)
        assert len(heads) == 12
        for t, _, head in heads:
            if t:
                assert torch.equal(head, thetas[t - 1])
        assert not torch.equal(thetas[0], thetas[1])

    def test_the_first_round_starts_from_one_random_head(self):
        heads.clear()
        run_tiny(Watched, rounds=1)
        assert all(torch.equal(head, heads[0][2]) for _, _, head in heads)
        assert heads[0][2].any()

    def test_partial_participation(self):
        """Only who is sampled sends, receives and trains; theta comes from their LARs alone."""
        heads.clear()
        thetas.clear()
        result = run_tiny(Watched, rounds=3, participation=0.5)
        for t in range(3):
            took_part = {k for at, k, _ in heads if at == t}
            assert len(took_part) == 2
            for way in ("up", "down"):
                assert {e.client for e in result.ledger.entries() if (e.round, e.direction) == (t, way)} == took_part
        assert all(torch.equal(head, thetas[t - 1]) for t, _, head in heads if t)

    def test_who_never_takes_part_keeps_its_first_model(self):
        parts = assemble_tiny("fedgh", rounds=1, participation=0.5)
        federation = federation_of(parts)
        fresh = make_host(parts)
        run_through(federation)
        absent = set(range(4)) - set(federation.ledger.by("client", "up"))
        assert len(absent) == 2
        for k in range(4):
            untouched = equal(
                dict(federation.engine.host.client(k).model.state_dict()), dict(fresh.client(k).model.state_dict())
            )
            assert untouched == (k in absent)

    def test_nobody_answers(self):
        parts = assemble_tiny("fedgh", rounds=2, straggler_rate=0.999999)
        federation = federation_of(parts)
        before = {name: value.clone() for name, value in federation.server.state.state_dict().items()}
        run_through(federation)
        assert [record["answered"] for record in federation.history] == [0, 0]
        assert equal(dict(federation.server.state.state_dict()), before)


class TestTraffic:
    def test_up_is_one_mean_and_one_number_per_held_class(self):
        result = run_tiny("fedgh", rounds=2, partition="pathological", classes_per_client=3)
        parts = assemble_tiny("fedgh", rounds=2, partition="pathological", classes_per_client=3)
        up = [e for e in result.ledger.entries() if e.direction == "up"]
        for t in range(2):
            for k in range(4):
                held = sum(count > 0 for count in parts.data.counts(k))
                assert held == 3
                sent = {e.tensor: e.bytes for e in up if (e.round, e.client) == (t, k)}
                assert sent.pop("(header)") > 0
                assert sent == {"means": 4 * held * K, "means.ids": 4 * held}

    def test_down_is_the_head(self):
        result = run_tiny("fedgh", rounds=2)
        down = [e for e in result.ledger.entries() if e.direction == "down"]
        assert {(e.tensor, e.bytes) for e in down if e.tensor != "(header)"} == {
            ("weight", 4 * C * K),
            ("bias", 4 * C),
        }
        assert len(down) == 2 * 4 * 3

    def test_downloads_made_to_measure_are_booked_apart(self):
        result = run_tiny("fedgh", rounds=2)
        assert result.bytes["evaluation"] == result.bytes["down"]


def deep_head(shape) -> TwoPartModel:
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, K))
    return TwoPartModel(features, nn.Sequential(nn.Linear(K, 8), nn.ReLU(), nn.Linear(8, C)), K)


def narrow(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32))


class TestRefusals:
    def test_heads_of_two_shapes(self):
        with refused(MismatchError, "fedgh", "head", "clients 0 (mlp-64) and 1 (test_fedgh.deep_head)"):
            assemble_tiny("fedgh", models="mlp-64,test_fedgh.deep_head")

    def test_features_of_two_widths(self):
        with refused(MismatchError, "widths 64 and 32", "--projector pool --width 32"):
            assemble_tiny("fedgh", models="mlp-64,test_fedgh.narrow", projector="none")

    def test_a_common_head_that_is_not_linear(self):
        """Equal heads of any form will do."""
        assert run_tiny("fedgh", models="test_fedgh.deep_head", rounds=1).accuracy is not None

    def test_no_other_server_step(self):
        with refused(UnknownNameError, "--server-step", "class", "client", "epoch"):
            assemble_tiny("fedgh", server_step="epoch")
