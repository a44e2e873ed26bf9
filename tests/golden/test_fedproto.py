"""FedProto by hand: prototypes as they were seen, their mean, the loss, and the nearest one at the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import assemble_tiny, run_tiny
from parties import client_of, data_of, equal, federation_of, flat_split, run_through, server_of, signs, task_of
from pluribus.client import Batch, Client
from pluribus.errors import MismatchError, RangeError, UnknownNameError
from pluribus.message import Message, Rows
from pluribus.methods.fedproto import FedProto
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import refused

K, C = 64, 10


def rows(classes: int, **given: list[float]) -> Rows:
    """`c2=[...]` is the row of class 2."""
    found = Rows(torch.zeros(classes, 2), torch.zeros(classes, dtype=torch.bool))
    for name, row in given.items():
        found.value[int(name[1:])] = torch.tensor(row)
        found.held[int(name[1:])] = True
    return found


def upload(classes: int, counts: list[int] | None = None, **given: list[float]) -> Message:
    weights = {} if counts is None else {"counts": torch.tensor(counts, dtype=torch.int32)}
    return Message({"prototypes": rows(classes, **given), **weights})


def linear_model() -> TwoPartModel:
    """Features 2 x, logits equal to the features."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    model = TwoPartModel(features, nn.Linear(2, 2), 2)
    with torch.no_grad():
        features[1].weight.copy_(2 * torch.eye(2))
        model.head.weight.copy_(torch.eye(2))
        model.head.bias.zero_()
    return model


def party(method, pixels: list[list[int]], labels: list[int], model: TwoPartModel | None = None, **how) -> Client:
    """A client whose features are its two pixels, unless a model is given."""
    down = method.schema(task_of(2, 2), server_of(task_of(2, 2), {0: 1}).cards[0]).down
    client = client_of(model or flat_split(2, 2), data_of(signs(pixels), labels), down=down, **how)
    method.prepare(client)
    return client


def whole(client: Client) -> Batch:
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


class TestLoss:
    """Features (2, -2) of class 0: p = (0.9820138, 0.0179862), cross-entropy 0.0181499."""

    def test_by_hand(self):
        """Prototype (1, 1): squares 1 and 9, their mean over two dimensions is 5."""
        client = party(FedProto(), [[1, -1]], [0], linear_model())
        client.take(upload(2, c0=[1.0, 1.0]))
        assert FedProto(pull=0.5).loss(client, whole(client)).item() == pytest.approx(0.0181499 + 2.5, abs=1e-6)

    def test_a_step_by_hand(self):
        """d/dz = p - e_0 + lambda 2 (z - p) / K = (-0.0179862 + 1, 0.0179862 - 3), times x = (1, -1); eta = 0.1.

        The head gets the gradient of cross-entropy alone: (-0.0179862, 0.0179862) times z = (2, -2).
        """
        client = party(FedProto(), [[1, -1]], [0], linear_model(), rule=Rule(lr=0.1))
        client.take(upload(2, c0=[1.0, 1.0]))
        FedProto().local_update(client)
        a, b, h = 0.09820138, 0.29820138, 0.00359724
        expected = torch.tensor([[2 - a, a], [b, 2 - b]])
        torch.testing.assert_close(client.model.features[1].weight.detach(), expected, rtol=0, atol=1e-6)
        expected = torch.tensor([[1 + h, -h], [-h, 1 + h]])
        torch.testing.assert_close(client.model.head.weight.detach(), expected, rtol=0, atol=1e-6)

    def test_a_class_without_a_prototype_counts_in_the_mean_only(self):
        client = party(FedProto(), [[1, -1], [-1, 1]], [0, 1], linear_model())
        client.take(upload(2, c0=[1.0, 1.0]))
        assert FedProto().loss(client, whole(client)).item() == pytest.approx(0.0181499 + 5 / 2, abs=1e-6)

    def test_before_the_first_message_it_is_cross_entropy(self):
        client = party(FedProto(), [[1, -1]], [0], linear_model())
        assert FedProto().loss(client, whole(client)).item() == pytest.approx(0.0181499, abs=1e-6)


class TestReport:
    def test_the_mean_of_each_class(self):
        client = party(FedProto(), [[1, 1], [1, -1], [-1, -1]], [0, 0, 1])
        sent = FedProto().local_update(client).rows("prototypes")
        assert sent.held.tolist() == [True, True]
        assert sent.value.tolist() == [[1, 0], [-1, -1]]

    def test_every_sample_counts_once_whatever_the_batches(self):
        pixels, labels = [[1, 1], [1, -1], [-1, -1], [-1, 1], [-1, 1]], [0, 0, 0, 1, 0]
        found = [
            FedProto().local_update(party(FedProto(), pixels, labels, batch=size)).rows("prototypes").value
            for size in (2, 3, 5)
        ]
        assert all(value.tolist() == [[0, 0], [-1, 1]] for value in found)

    def reported(self, method: FedProto, epochs: int) -> list[float]:
        """Of one sample per step, features 2 x; the step of `TestLoss` without a prototype, with eta = 1."""
        client = party(method, [[1, -1]], [0], linear_model(), rule=Rule(lr=1.0), epochs=epochs)
        return method.local_update(client).rows("prototypes").value[0].tolist()

    def test_before_each_step(self):
        """The first features are (2, -2); W then rises by 0.0179862 x x^T, so the second are (2.0359724, ...)."""
        assert self.reported(FedProto(), 1) == [2, -2]
        assert self.reported(FedProto(), 2) == pytest.approx([2.0179862, -2.0179862], abs=1e-6)

    def test_of_the_last_epoch(self):
        assert self.reported(FedProto(last_epoch=True), 1) == [2, -2]
        assert self.reported(FedProto(last_epoch=True), 2) == pytest.approx([2.0359724, -2.0359724], abs=1e-6)

    def test_in_train_mode(self):
        """Batch norm over one batch: (4/3) / (sqrt(8)/3) = sqrt(2) for class 0, minus half of that for class 1."""
        model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, eps=1e-12)), nn.Linear(2, 2), 2)
        sent = FedProto().local_update(party(FedProto(), [[1, -1], [-1, 1], [-1, 1]] * 3, [0, 1, 1] * 3, model))
        assert sent.rows("prototypes").value[0].tolist() == pytest.approx([2**0.5, -(2**0.5)], abs=1e-5)
        assert sent.rows("prototypes").value[1].tolist() == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-5)

    def test_every_round_starts_anew(self):
        client = party(FedProto(), [[1, -1]], [0])
        for _ in range(2):
            FedProto().local_update(client)
            assert client.state.seen.counts.tolist() == [1, 0]

    def test_counts_travel_where_they_weigh(self):
        method = FedProto(weighting="samples")
        sent = method.local_update(party(method, [[1, 1], [1, -1], [-1, -1]], [0, 0, 1]))
        assert sent.tensor("counts").tolist() == [2, 1]
        assert "counts" not in FedProto().local_update(party(FedProto(), [[1, 1]], [0]))


class TestServer:
    def down(self, method: FedProto, *rounds: dict[int, Message], classes: int = 3) -> dict[int, list[float]]:
        server = server_of(task_of(classes, 2, clients=3), dict.fromkeys(range(3), 1))
        method.setup(server)
        for uploads in rounds:
            method.aggregate(server, uploads)
        found = method.download(server, 0).rows("prototypes")
        assert not found.value[~found.held].any()
        return {c: found.value[c].tolist() for c in found.held.nonzero().flatten().tolist()}

    def test_nothing_is_known_at_first(self):
        assert self.down(FedProto()) == {}

    def test_the_mean_over_reporters(self):
        uploads = {0: upload(3, c0=[1.0, 2.0]), 1: upload(3, c0=[3.0, 6.0], c2=[1.0, 1.0]), 2: upload(3, c2=[2.0, 0.0])}
        assert self.down(FedProto(), uploads) == {0: [2, 4], 2: [1.5, 0.5]}

    def test_weighted_by_samples_of_the_class(self):
        """(1 * 0 + 3 * 4) / 4 = 3; class 2 is only the second's, whatever its weight."""
        uploads = {0: upload(3, [1, 0, 0], c0=[0.0, 0.0]), 1: upload(3, [3, 0, 7], c0=[4.0, 8.0], c2=[1.0, 2.0])}
        assert self.down(FedProto(weighting="samples"), uploads) == {0: [3, 6], 2: [1, 2]}

    def test_equal_counts_are_no_weights(self):
        given = {0: {"c0": [0.3, 1.0]}, 1: {"c0": [0.7, -2.0], "c1": [1.0, 5.0]}, 2: {"c1": [2.0, 2.0]}}
        plain = self.down(FedProto(), {k: upload(3, **one) for k, one in given.items()})
        counted = {k: upload(3, [5, 5, 5], **one) for k, one in given.items()}
        weighted = self.down(FedProto(weighting="samples"), counted)
        assert weighted.keys() == plain.keys()
        assert all(weighted[c] == pytest.approx(plain[c], abs=1e-6) for c in plain)

    def test_one_client_with_all_classes_is_copied(self):
        one = upload(3, c0=[0.1, 0.2], c1=[0.3, 0.4], c2=[0.5, 0.6])
        found = self.down(FedProto(), {1: one})
        assert list(found.values()) == one.rows("prototypes").value.tolist()

    ROUNDS = {0: upload(3, c0=[1.0, 1.0], c1=[2.0, 2.0])}, {1: upload(3, c1=[4.0, 6.0])}

    def test_a_class_that_nobody_reports_keeps_its_prototype(self):
        assert self.down(FedProto(), *self.ROUNDS) == {0: [1, 1], 1: [4, 6]}

    def test_or_is_forgotten(self):
        assert self.down(FedProto(rebuild=True), *self.ROUNDS) == {1: [4, 6]}


class TestPredict:
    def scores(self, down: Message | None) -> Tensor:
        """Of the images (1, -1) and (-1, -1), whose features are doubled."""
        client = party(FedProto(), [[1, -1], [-1, -1]], [0, 1], linear_model())
        if down is not None:
            client.take(down)
        return client.sweep(FedProto().predict)

    def test_minus_the_squared_distance(self):
        """(2, -2) is 1 and 25 away from (2, -1) and (-2, 1); (-2, -2) is 17 and 9 away."""
        assert self.scores(upload(2, c0=[2.0, -1.0], c1=[-2.0, 1.0])).tolist() == [[-1, -25], [-17, -9]]

    def test_among_known_prototypes(self):
        assert self.scores(upload(2, c1=[9.0, 9.0])).argmax(1).tolist() == [1, 1]

    def test_by_the_head_while_none_is_known(self):
        assert self.scores(None).tolist() == [[2, -2], [-2, -2]]

    def test_a_constant_on_all_distances_changes_no_prediction(self):
        scores = self.scores(upload(2, c0=[2.0, -1.0], c1=[-2.0, 1.0]))
        assert torch.equal((scores + 5).argmax(1), scores.argmax(1))


class TestRun:
    def test_without_its_term_it_is_local_training_scored_by_the_head(self):
        pulled, alone = federation_of(assemble_tiny("fedproto", pull=0.0)), federation_of(assemble_tiny("local"))
        run_through(pulled)
        run_through(alone)
        for k in range(4):
            assert equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in (pulled, alone)))
        for one, other in zip(pulled.history, alone.history, strict=True):
            assert one["loss"] == other["loss"]
            for k, views in one["clients"].items():
                assert views["after"] == other["clients"][k]["after"]

    def test_with_its_term_it_is_not(self):
        pulled, alone = federation_of(assemble_tiny("fedproto")), federation_of(assemble_tiny("local"))
        run_through(pulled)
        run_through(alone)
        for k in range(4):
            assert not equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in (pulled, alone)))

    def test_the_headline_asks_the_newest_prototypes(self):
        federation = federation_of(assemble_tiny("fedproto", rounds=1))
        run_through(federation)
        newest = federation.server.state.value
        for k in range(4):
            client = federation.engine.host.client(k)
            z, data = client.sweep(Client.features, "test"), client.data["test"]
            distance = (z[:, None] - newest).square().sum(2).masked_fill(~federation.server.state.held, torch.inf)
            correct = (distance.argmin(1) == data.labels()).float().mean().item()
            assert federation.history[0]["clients"][str(k)]["before"]["test"] == pytest.approx(correct)

    def test_traffic_is_what_the_sheet_says(self):
        """c_i K floats up; C_seen K down, none in the first round."""
        settings = {"rounds": 3, "partition": "pathological", "classes_per_client": 2}
        result, data = run_tiny("fedproto", **settings), assemble_tiny("fedproto", **settings).data
        held = [{c for c, n in enumerate(data.counts(k)) if n} for k in range(4)]
        seen = len(set().union(*held))
        assert seen < C
        assert result.ledger.by("tensor", "up")["prototypes"] == 3 * 4 * K * sum(map(len, held))
        assert result.ledger.by("tensor", "down")["prototypes"] == 2 * 4 * 4 * K * seen
        for way in ("up", "down"):
            assert set(result.ledger.by("tensor", way)) == {"prototypes", "prototypes.ids", "(header)"}

    def test_counts_are_paid_for(self):
        result = run_tiny("fedproto", weighting="samples", rounds=2)
        assert result.ledger.by("tensor", "up")["counts"] == 2 * 4 * 4 * C
        assert "counts" not in result.ledger.by("tensor", "down")

    @pytest.mark.parametrize("option", [{"rebuild": True}, {"last_epoch": True, "epochs": 2}, {"weighting": "samples"}])
    def test_options_run(self, option):
        settings = {"partition": "dirichlet", "participation": 0.5, "rounds": 3}
        assert run_tiny("fedproto", **settings, **option).accuracy is not None


class TestRefusals:
    def test_a_negative_weight(self):
        with refused(RangeError, "--pull", 0, -1):
            assemble_tiny("fedproto", pull=-1.0)

    def test_no_other_weighting(self):
        with refused(UnknownNameError, "--weighting", "uniform", "samples", "size"):
            assemble_tiny("fedproto", weighting="size")

    def test_features_of_two_widths(self):
        with refused(MismatchError, "fedproto", "widths 64 and 32"):
            assemble_tiny("fedproto", models="mlp-64,test_fedgh.narrow", projector="none")
