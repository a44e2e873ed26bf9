"""FedTGP by hand: the margin, a step of the server's net, and what comes of many."""

from __future__ import annotations

import pytest
import torch
from test_fedproto import linear_model, party, rows, upload, whole
from torch.nn import functional as F

from conftest import assemble_tiny, make_host, run_tiny
from parties import copies, equal, federation_of, run_through, server_of, task_of
from pluribus.errors import RangeError
from pluribus.message import Message, Rows, decode, encode
from pluribus.methods.fedtgp import FedTGP, distances, margined
from pluribus.request import Work
from pluribus.server import Server
from refusals import refused

K, C = 64, 10


def server_with(method: FedTGP, classes: int = 3, width: int = 2) -> Server:
    server = server_of(task_of(classes, width), {0: 1, 1: 1})
    method.setup(server)
    server.begin(0, {})
    return server


def net_of(server: Server) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in server.state.net.state_dict().items()}


class TestMargin:
    """(0, 0), (3, 4), (3, 5): the nearest neighbors are 5, 1 and 1 away."""

    def test_of_the_most_remote_class(self):
        assert FedTGP().margin(rows(4, c0=[0.0, 0.0], c1=[3.0, 4.0], c3=[3.0, 5.0])) == 5

    def test_never_above_tau(self):
        assert FedTGP(threshold=2.0).margin(rows(4, c0=[0.0, 0.0], c1=[3.0, 4.0], c3=[3.0, 5.0])) == 2

    def test_a_class_that_nobody_reports_does_not_count(self):
        """Its row is zero, which would lie sqrt(2) from the nearest."""
        assert FedTGP().margin(rows(3, c1=[1.0, 1.0], c2=[1.0, 1.5])) == 0.5

    def test_of_one_class_it_is_tau(self):
        assert FedTGP(threshold=7.0).margin(rows(3, c1=[1.0, 1.0])) == 7

    def test_it_is_taken_between_means_over_clients(self):
        """Class 0 has the mean (0, 0), class 1 the mean (0, 4)."""
        method = FedTGP(server_epochs=0)
        server = server_with(method)
        method.aggregate(server, {0: upload(3, c0=[-1.0, 0.0], c1=[0.0, 4.0]), 1: upload(3, c0=[1.0, 0.0])})
        assert server.notes["margin"] == 4


class TestServerStep:
    def test_by_hand(self):
        """K = 1, e = (1, 2), w_1 = w_2 = 1, no biases: T = (1, 2). One point 1/2 of class 0: d = (1/2, 3/2).

        One class, so delta = tau = 1 and d + delta e_0 = (3/2, 3/2): softmax(-d) = (1/2, 1/2). The gradient is 1/2 for
        T(0) and -1/2 for T(1). Down the net, with eta = 1/2: dw_2 = 1/2 - 1, db_2 = 0, and the same for w_1, b_1;
        de = (1/2, -1/2).
        """
        method = FedTGP(threshold=1.0, server_epochs=1, server_lr=0.5)
        server = server_with(method, classes=2, width=1)
        one, zero = torch.ones(1, 1), torch.zeros(1)
        layers = {"1.weight": one, "1.bias": zero, "3.weight": one, "3.bias": zero}
        server.state.net.load_state_dict({"0.weight": torch.tensor([[1.0], [2.0]]), **layers})
        sent = Rows(torch.tensor([[0.5], [0.0]]), torch.tensor([True, False]))
        method.aggregate(server, {0: Message({"prototypes": sent})})
        assert {name: value.tolist() for name, value in net_of(server).items()} == {
            "0.weight": [[0.75], [2.25]],
            "1.weight": [[1.25]],
            "1.bias": [0],
            "3.weight": [[1.25]],
            "3.bias": [0],
        }

    def test_the_margin_lengthens_the_own_distance(self):
        found = margined(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([1]), 10.0)
        assert found.tolist() == [[5, 11]]

    def test_gradients_are_finite_where_a_point_is_its_prototype(self):
        prototypes = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 3.0]], requires_grad=True)
        found = margined(torch.tensor([[1.0, 2.0]]), prototypes, torch.tensor([0]), 1.0)
        (gradient,) = torch.autograd.grad(F.cross_entropy(-found, torch.tensor([0])), prototypes)
        assert bool(gradient.isfinite().all())
        assert gradient[:2].eq(0).all()
        assert gradient[2].ne(0).all()

    def test_distances_of_large_near_vectors_are_exact(self):
        """The expanded squares would cancel to nothing, or below."""
        one = torch.full((1, 64), 1000.0)
        assert distances(one, one + 0.125).item() == 1
        assert distances(one, one).item() == 0

    def test_every_prototype_of_every_client_is_met_once_an_epoch(self, monkeypatch):
        met = []

        def watched(points, prototypes, y, margin):
            met.append(sorted(zip(points[:, 0].tolist(), y.tolist(), strict=True)))
            return margined(points, prototypes, y, margin)

        monkeypatch.setattr("pluribus.methods.fedtgp.margined", watched)
        method = FedTGP(server_epochs=3, server_batch=2)
        uploads = {0: upload(3, c0=[1.0, 0.0], c2=[2.0, 0.0]), 1: upload(3, c0=[3.0, 0.0])}
        method.aggregate(server_with(method), uploads)
        assert [len(batch) for batch in met] == [2, 1] * 3
        for epoch in range(3):
            assert sorted(met[2 * epoch] + met[2 * epoch + 1]) == [(1, 0), (2, 2), (3, 0)]
        assert any(met[2 * epoch] != met[0] for epoch in range(3)), "batches are shuffled"


class TestTraining:
    UPLOADS = {  # noqa: RUF012
        0: upload(3, c0=[0.0, 0.0], c1=[2.0, 0.0]),
        1: upload(3, c0=[0.2, 0.0], c2=[0.0, 2.0], c1=[2.0, 0.2]),
    }

    def test_it_falls_and_keeps_classes_apart(self):
        """Three classes, the most remote of which is 2 away from the next: in the end the prototypes are that apart."""
        method = FedTGP(server_epochs=400, server_lr=0.05)
        server = server_with(method)
        points = torch.cat([u.rows("prototypes").value[u.rows("prototypes").held] for u in self.UPLOADS.values()])
        labels = torch.tensor([0, 1, 0, 1, 2])
        margin = method.margin(rows(3, c0=[0.1, 0.0], c1=[2.0, 0.1], c2=[0.0, 2.0]))

        def loss() -> float:
            return F.cross_entropy(-margined(points, method.prototypes(server), labels, margin), labels).item()

        def apart() -> float:
            learned = method.download(server, 0).rows("prototypes").value
            return distances(learned, learned).fill_diagonal_(torch.inf).min().item()

        before = loss()
        assert apart() < margin
        method.aggregate(server, self.UPLOADS)
        assert server.notes["margin"] == pytest.approx(margin)
        assert loss() < before / 2
        assert apart() >= margin

    def test_no_epoch_no_change(self):
        method = FedTGP(server_epochs=0)
        server = server_with(method)
        before = net_of(server)
        method.aggregate(server, self.UPLOADS)
        assert equal(net_of(server), before)
        assert method.download(server, 0).rows("prototypes").held.all()

    def test_the_net_goes_on_from_where_it_was(self):
        method = FedTGP(server_epochs=2)
        server = server_with(method)
        method.aggregate(server, self.UPLOADS)
        once = net_of(server)
        method.aggregate(server, self.UPLOADS)
        assert not equal(net_of(server), once)

    def test_an_upload_without_any_class_moves_nothing(self):
        method = FedTGP()
        server = server_with(method)
        before = net_of(server)
        method.aggregate(server, {0: upload(3)})
        assert equal(net_of(server), before)
        assert not method.download(server, 0).rows("prototypes").held.any()

    def test_the_first_net_is_drawn_by_the_seed_and_leaves_the_global_generator_alone(self):
        torch.manual_seed(3)
        expected = torch.get_rng_state()
        one, other = server_with(FedTGP()), server_with(FedTGP())
        assert torch.equal(torch.get_rng_state(), expected)
        assert equal(net_of(one), net_of(other))
        third = server_of(task_of(3, 2, seed=1), {0: 1})
        FedTGP().setup(third)
        assert not equal(net_of(one), net_of(third))


class TestDownload:
    def test_nothing_in_the_first_round_then_every_class_also_unseen_ones(self):
        method = FedTGP(server_epochs=1)
        server = server_with(method)
        assert not method.download(server, 0).rows("prototypes").held.any()
        method.aggregate(server, {0: upload(3, c1=[1.0, 0.0])})
        sent = method.download(server, 0).rows("prototypes")
        assert sent.held.tolist() == [True] * 3
        assert torch.equal(sent.value, method.prototypes(server).detach())
        assert sent.value[2].any()

    def test_it_is_pure(self):
        method = FedTGP(server_epochs=1)
        server = server_with(method)
        method.aggregate(server, TestTraining.UPLOADS)
        first = method.download(server, 0).rows("prototypes").value
        assert torch.equal(method.download(server, 1).rows("prototypes").value, first)


class TestClient:
    def test_the_loss_is_that_of_fedproto(self):
        """Cross-entropy 0.0181499 and the mean of squares 1 and 9."""
        client = party(FedTGP(), [[1, -1]], [0], linear_model())
        client.take(upload(2, c0=[1.0, 1.0]))
        assert FedTGP(pull=0.5).loss(client, whole(client)).item() == pytest.approx(0.0181499 + 2.5, abs=1e-6)

    def test_prototypes_are_those_of_the_trained_model_in_eval_mode(self):
        host = make_host(parts := assemble_tiny("fedtgp"))
        server = server_of(parts.task, dict.fromkeys(range(4), 1), model="mlp-64")
        parts.method.setup(server)
        k = 3  # cnn-16-32, with batch norm
        wire = host.wires(k)[0]
        down = encode(parts.method.download(server, k), wire.down, "s")
        sent = decode(host.answer(Work(k, 0, 0, down)).up, wire.up, "c")
        client = host.client(k)
        trained = copies(client)
        x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
        client.model.eval()
        with torch.no_grad():
            features = client.model.features(x)
        for c in range(C):
            assert sent.rows("prototypes").held[c] == (y == c).any()
            if (y == c).any():
                torch.testing.assert_close(sent.rows("prototypes").value[c], features[y == c].mean(0))
        assert equal(copies(client), trained)


class TestRun:
    def test_without_its_term_it_is_local_training_scored_by_the_head(self):
        settings = {"pull": 0.0, "server_epochs": 2}
        pulled, alone = federation_of(assemble_tiny("fedtgp", **settings)), federation_of(assemble_tiny("local"))
        run_through(pulled)
        run_through(alone)
        for one, other in zip(pulled.history, alone.history, strict=True):
            for k, views in one["clients"].items():
                assert views["after"] == other["clients"][k]["after"]

    def test_traffic_is_what_the_sheet_says(self):
        """c_i K floats up; C K down, none in the first round."""
        settings = {"rounds": 3, "partition": "pathological", "classes_per_client": 2, "server_epochs": 2}
        result, data = run_tiny("fedtgp", **settings), assemble_tiny("fedtgp", **settings).data
        held = [{c for c, n in enumerate(data.counts(k)) if n} for k in range(4)]
        assert len(set().union(*held)) < C
        assert result.ledger.by("tensor", "up")["prototypes"] == 3 * 4 * K * sum(map(len, held))
        assert result.ledger.by("tensor", "down")["prototypes"] == 2 * 4 * 4 * K * C
        for way in ("up", "down"):
            assert set(result.ledger.by("tensor", way)) == {"prototypes", "prototypes.ids", "(header)"}

    def test_the_margin_is_noted(self):
        result = run_tiny("fedtgp", rounds=1, server_epochs=0)
        assert 0 < result.history[0]["notes"]["margin"] <= 100


@pytest.mark.parametrize(
    ("option", "least"), [("threshold", 0), ("server_epochs", 0), ("server_batch", 1), ("pull", 0)]
)
def test_values_that_cannot_be_are_refused(option, least):
    with refused(RangeError, f"--{option.replace('_', '-')}", least, least - 1):
        assemble_tiny("fedtgp", **{option: least - 1})
