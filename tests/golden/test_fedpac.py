"""FedPAC: the loss, the statistics, centroids and combined heads by hand; weights against a grid of the simplex."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from conftest import assemble_tiny, run_tiny
from kit import ByHand, kept
from parties import client_of, data_of, equal, server_of, signs, task_of
from pluribus.client import Batch, Client
from pluribus.errors import MismatchError, RangeError
from pluribus.message import Field, Message, Rows
from pluribus.methods._classifier_weights import combining_weights, smallest_on_simplex
from pluribus.methods.fedpac import FedPAC, _moments
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import refused

PIXELS, LABELS = [[1, -1], [1, 1], [1, 1]], [0, 0, 1]  # class 2 is nobody's


def client_with(method: FedPAC, centroids: Rows | None = None) -> Client:
    """A client whose features are at first its two pixels, with a head of zeros and three classes."""
    model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)), nn.Linear(2, 3), 2)
    nn.init.eye_(model.features[1].weight)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    down = {"centroids": Field((3, 2), form="rows")}
    client = client_of(model, data_of(signs(PIXELS), LABELS), classes=3, rule=Rule(lr=1.0), down=down)
    client.equip(method.optimizers(client), down)
    client.begin(0, 0, {})
    if centroids is not None:
        client.take(Message({"centroids": centroids}))
    return client


def whole(client: Client) -> Batch:
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


class TestClient:
    def test_the_loss_by_hand(self):
        """Cross-entropy log 3. Class 0 is pulled to (1, 3): squared distances 16 and 4. Class 1 has no centroid.

        The mean is over 3 samples and 2 features: 20 / 6.
        """
        method = FedPAC(pull=0.5)
        client = client_with(method, Rows(torch.tensor([[1.0, 3], [0, 0], [0, 0]]), torch.tensor([True, False, False])))
        assert method.loss(client, whole(client)).item() == pytest.approx(math.log(3) + 0.5 * 20 / 6, abs=1e-6)

    def test_without_centroids_nothing_pulls(self):
        client = client_with(FedPAC())
        assert FedPAC().loss(client, whole(client)).item() == pytest.approx(math.log(3), abs=1e-6)

    def test_what_goes_up_by_hand(self):
        """p = (2/3, 1/3, 0), mu = (1, 0) and (1, 1), so h = (2/3, 0) and (1/3, 1/3), |h|^2 = 4/9 + 2/9 = 2/3.

        Every |f|^2 is 2, so V = (2 - 2/3) / 3 = 4/9. Centroids are those of the trained body.
        """
        client = client_with(FedPAC())
        up = FedPAC().local_update(client)
        for name in ("means", "centroids"):
            assert up.rows(name).held.tolist() == [True, True, False]
        assert up.rows("means").value.tolist() == [[1, 0], [1, 1], [0, 0]]
        turned = up.rows("means").value @ client.model.features[1].weight.detach().T
        torch.testing.assert_close(up.rows("centroids").value, turned)
        assert not torch.equal(turned, up.rows("means").value)
        assert up.tensor("counts").tolist() == [2, 1, 0]
        assert up.tensor("variance").item() == pytest.approx(4 / 9)
        assert equal(up.part("head"), dict(client.model.head.state_dict()))
        assert up.tensor("head.weight").any(), "the head was trained"

    def test_means_are_of_the_features_before_training_and_centroids_of_those_after(self):
        hand = ByHand(assemble_tiny("fedpac", models="mlp-64"))
        client = hand.host.client(0)
        hand.method.receive(client, hand.method.download(hand.server, 0))
        before = client.sweep(Client.features).mean(0)
        client.begin(0, 0, {})
        up = hand.method.local_update(client)
        shares = up.tensor("counts") / up.tensor("counts").sum()
        torch.testing.assert_close(shares @ up.rows("means").value, before)
        torch.testing.assert_close(shares @ up.rows("centroids").value, client.sweep(Client.features).mean(0))


def objective(alpha: Tensor, h: Tensor, v: Tensor, i: int) -> float:
    """sum_j alpha_j^2 V_j + |h_i - sum_j alpha_j h_j|^2, as the paper writes it."""
    return float((alpha.square() * v).sum() + (h[i] - torch.einsum("j,jyk->yk", alpha, h)).square().sum())


class TestWeights:
    def test_two_clients_by_hand(self):
        """h = 0 and 1, V = 1 and 1. For client 0: alpha^2 + (1 - alpha)^2 + (1 - alpha)^2 is least at alpha = 2/3."""
        found = combining_weights(torch.tensor([[[0.0]], [[1.0]]]), torch.ones(2))
        torch.testing.assert_close(found, torch.tensor([[2 / 3, 1 / 3], [1 / 3, 2 / 3]], dtype=torch.float64))

    def test_equal_clients_share_by_their_variances(self):
        """V = 1 and 3: weights in proportion to 1 / V."""
        found = combining_weights(torch.zeros(2, 1, 1), torch.tensor([1.0, 3.0]))
        torch.testing.assert_close(found, torch.tensor([[0.75, 0.25]] * 2, dtype=torch.float64))

    @pytest.mark.parametrize("variance", [0.0, 1e-6, 5.0])
    def test_identical_clients_get_uniform_weights(self, variance):
        found = combining_weights(torch.ones(5, 3, 2), torch.full((5,), variance))
        torch.testing.assert_close(found, torch.full((5, 5), 0.2, dtype=torch.float64))

    def test_a_client_alone_keeps_its_head(self):
        assert combining_weights(torch.ones(1, 2, 2), torch.zeros(1)).tolist() == [[1.0]]

    def test_without_variance_a_client_trusts_itself_alone(self):
        """Nothing is gained from others, and their statistics differ."""
        h = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(combining_weights(h, torch.zeros(3)), torch.eye(3).double(), atol=1e-3, rtol=0)

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("clients", [2, 3])
    def test_no_point_of_a_grid_is_better(self, clients, seed):
        draw = torch.Generator().manual_seed(seed)
        h = torch.randn(clients, 2, 3, generator=draw).double()
        v = torch.rand(clients, generator=draw).double() * 10 ** (seed - 3)
        found = combining_weights(h, v)
        assert (found >= 0).all()
        torch.testing.assert_close(found.sum(1), torch.ones(clients).double())
        shares = [n for n in product(range(101), repeat=clients) if sum(n) == 100]
        for i in range(clients):
            best = min(objective(torch.tensor(n).double() / 100, h, v, i) for n in shares)
            mine = objective(found[i], h, v, i)
            assert mine <= best * (1 + 1e-6)
            assert mine >= best - 0.05 * (1 + best), "the grid is fine enough to come near"

    def test_the_conditions_of_the_minimum_with_many_clients(self):
        """P alpha is the same where alpha > 0, and nowhere smaller."""
        root = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).double()
        p = root @ root.T + 0.1 * torch.eye(40).double()
        alpha = smallest_on_simplex(p)
        slope, used = p @ alpha, alpha > 0
        assert 1 < int(used.sum()) < 40
        torch.testing.assert_close(slope[used], slope.min().expand(int(used.sum())), rtol=1e-5, atol=0)

    def test_impossible_statistics_raise(self):
        with pytest.raises(ValueError, match="statistics"):
            combining_weights(torch.full((2, 1, 1), 1e30), torch.ones(2))


class TestServer:
    def test_moments_by_hand(self):
        """p = (2/3, 1/3, 0) and mu = (1, 0) and (1, 1), as a client sends them."""
        up = FedPAC().local_update(client_with(FedPAC()))
        expected = torch.tensor([[2 / 3, 0], [1 / 3, 1 / 3], [0, 0]], dtype=torch.float64)
        torch.testing.assert_close(_moments(up), expected)

    def test_heads_and_centroids_by_hand(self):
        """Two clients with h = (0, .) and (1, .): the weights 2/3 and 1/3 of TestWeights. Class 2 is nobody's.

        One feature. Client 0 has 4 samples of class 0 with mean 0, client 1 has 1 of it with mean 1: V = 1 for both.
        Centroids of class 0: (4 * 5 + 1 * 10) / 5 = 6. The body's mean is by samples: (4 * 1 + 1 * 6) / 5 = 2.
        """
        server = server_of(task_of(3, 1), {0: 4, 1: 1})
        server.state.shared = nn.Linear(1, 1, bias=False)
        server.state.heads = {"weight": torch.zeros(3, 3, 1)}  # client 2 is absent
        known = Rows(torch.tensor([[9.0], [8.0], [0.0]]), torch.tensor([True, True, False]))
        server.state.centroids = known
        held = torch.tensor([True, False, False])

        def upload(body: float, head: float, mean: float, centroid: float, count: int) -> Message:
            return Message(
                {
                    "features.weight": torch.full((1, 1), body),
                    "head.weight": torch.full((3, 1), head),
                    "means": Rows(torch.tensor([[mean], [0.0], [0.0]]), held),
                    "centroids": Rows(torch.tensor([[centroid], [0.0], [0.0]]), held),
                    "counts": torch.tensor([count, 0, 0], dtype=torch.int32),
                    "variance": torch.tensor(1.0),
                }
            )

        FedPAC().aggregate(server, {0: upload(1.0, 3.0, 0.0, 5.0, 4), 1: upload(6.0, 9.0, 1.0, 10.0, 1)})
        assert server.state.shared.weight.item() == pytest.approx(2)
        heads = server.state.heads["weight"].flatten(1)
        torch.testing.assert_close(heads, torch.tensor([[5.0] * 3, [7.0] * 3, [0.0] * 3]))
        assert server.state.centroids.value.flatten().tolist() == [6, 8, 0]
        assert server.state.centroids.held.tolist() == [True, True, False]
        assert server.notes["own_weights"] == pytest.approx({"0": 2 / 3, "1": 2 / 3})


class TestRun:
    def test_everyone_gets_its_own_head_and_the_same_body(self):
        hand = ByHand(assemble_tiny("fedpac", models="mlp-64"))
        first = [hand.method.download(hand.server, k) for k in range(4)]
        assert all(equal(first[0].part(), other.part()) for other in first[1:])
        hand.round(0, [0, 1, 2])
        later = [hand.method.download(hand.server, k) for k in range(4)]
        assert not torch.equal(later[0].tensor("head.weight"), later[1].tensor("head.weight"))
        assert torch.equal(later[3].tensor("head.weight"), first[3].tensor("head.weight")), "absent: as before"
        assert equal(later[0].part("features"), later[3].part("features"))

    def test_a_class_that_nobody_holds_has_no_centroid(self):
        result = run_tiny("fedpac", partition="pathological", classes_per_client=2, models="mlp-64")
        data = assemble_tiny("fedpac", partition="pathological", classes_per_client=2, models="mlp-64").data
        seen = [any(data.counts(k)[c] for k in range(4)) for c in range(10)]
        assert not all(seen)
        assert kept(result)["server centroids.held"].tolist() == seen

    def test_traffic_is_the_model_and_the_statistics(self):
        result = run_tiny("fedpac", models="mlp-64")
        floats = 64 * 64 + 64 + 64 * 10 + 10
        weights = ("features.", "head.")
        for way in ("up", "down"):
            sizes = result.ledger.by("tensor", way)
            assert sum(size for name, size in sizes.items() if name.startswith(weights)) == 2 * 4 * 4 * floats
        assert result.ledger.by("tensor", "up")["variance"] == 2 * 4 * 4
        assert "means" not in result.ledger.by("tensor", "down")


def test_refusals():
    with refused(RangeError, "--pull", 0, -1):
        assemble_tiny("fedpac", pull=-1.0)
    with refused(MismatchError, "fedpac", "mlp-64", "cnn-16"):
        assemble_tiny("fedpac", models="mlp-64,cnn-16")
