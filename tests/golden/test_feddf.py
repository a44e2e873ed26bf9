"""FedDF by hand: the ensemble, a step of distillation, and where it equals FedAvg."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from test_server_steps import StandIn
from torch import Tensor, nn

import pluribus
from conftest import assemble_tiny, few_digits, run_tiny
from kit import assert_same, differing, numbers, selected
from parties import CPU, GivenCards, card_of, equal, federation_of, run_through, signs, task_of
from pluribus.client import Batch
from pluribus.data.federated import Data, Store
from pluribus.engines.server_steps import CapturedServer
from pluribus.errors import MismatchError, PartitionError, RangeError
from pluribus.message import Message
from pluribus.methods.feddf import Distillation, FedDF, ensemble
from pluribus.ops import sgd_step
from pluribus.result import Result
from pluribus.server import PublicRows, Server
from pluribus.storage.checkpoint import Checkpoint
from refusals import refused

LN3 = math.log(3)
PUBLIC = [(1, 1), (1, -1)]
TINY = {"data": few_digits(160), "public_fraction": 0.2}
ADAM_EPS = 1e-8


def linear(weight: list[list[float]], bias: list[float]) -> Message:
    """The upload of a linear model on two pixels."""
    return Message({"head.weight": torch.tensor(weight), "head.bias": torch.tensor(bias)})


def biased(*bias: float) -> Message:
    """The upload of a model that says the same of all rows."""
    return linear([[0.0, 0.0], [0.0, 0.0]], list(bias))


def server_with(method: FedDF, models: Mapping[int, str], samples: Mapping[int, int] | None = None) -> Server:
    """A server of linear models on two pixels, all zero, with two public rows."""
    task = task_of(2, 2, clients=len(models))
    cards = GivenCards({k: card_of(k, task, (samples or {}).get(k, 1), model) for k, model in models.items()})
    server = Server(task, cards, public=public_rows(PUBLIC))
    method.setup(server)
    for model in server.state.models.values():
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    server.begin(0, {})
    return server


def public_rows(pixels: list[tuple[int, int]]) -> PublicRows:
    store = Store(signs(pixels), torch.zeros(len(pixels), dtype=torch.long), CPU)
    return PublicRows(Data(store, torch.arange(len(pixels))))


def one(shape) -> nn.Module:
    """A model whose features are the pixels."""
    return nn.Flatten()


def other(shape) -> nn.Module:
    """The same as another architecture."""
    return nn.Flatten()


ONE, OTHER = "test_feddf.one", "test_feddf.other"
KEYS = {ONE: "test_feddf/one", OTHER: "test_feddf/other"}


def head_of(server: Server, model: str) -> tuple[list, list]:
    head = server.state.models[KEYS[model]].head
    return head.weight.tolist(), head.bias.tolist()


class TestEnsemble:
    def mean(self, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        models = {0: ONE, 1: ONE, 2: OTHER}
        uploads = biased(3.0, 0.0), biased(0.0, 0.0), linear([[3.0, 0.0], [0.0, 3.0]], [0.0, 0.0])
        server = server_with(FedDF(), models, {0: 10, 1: 1, 2: 1})
        groups = {}
        for k in order:
            groups.setdefault(KEYS[models[k]], {})[k] = uploads[k]
        return ensemble(server, groups, server.public.take(torch.arange(2)))

    def test_the_mean_of_all_logits_by_hand(self):
        """Row (1, 1): (3, 0), (0, 0) and (3, 3); row (1, -1): the last is (3, -3). Samples are no weights here."""
        assert self.mean().tolist() == [[2, 1], [2, -1]]

    def test_the_order_of_uploads_does_not_matter(self):
        torch.testing.assert_close(self.mean((2, 1, 0)), self.mean())

    def test_batch_norm_takes_the_statistics_of_each_teacher(self):
        """A teacher with mean 1 and variance 4 says (x - 1) / 2 of a row, whatever else is in the batch."""
        server = server_with(FedDF(), {0: ONE})
        server.state.models[KEYS[ONE]] = model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, eps=0.0))
        own = Message.of(model).part() | {"1.running_mean": torch.ones(2), "1.running_var": torch.full((2,), 4.0)}
        found = ensemble(server, {KEYS[ONE]: {0: Message(own)}}, server.public.take(torch.arange(2)))
        assert found.tolist() == [[0, 0], [0, -1]]
        assert model[1].running_mean.tolist() == [0, 0], "the student keeps its own"


class TestDistillation:
    def test_the_loss_by_hand(self):
        """Teacher (3/4, 1/4) against (1/2, 1/2)."""
        method, models = FedDF(server_steps=1), {0: ONE}
        server = server_with(method, models)
        x = server.public.take(torch.arange(2))
        loss = Distillation(KEYS[ONE])(server, Batch(x, torch.tensor([[LN3, 0.0]] * 2), torch.arange(2), 2))
        assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))

    def test_a_step_by_hand(self):
        """Two architectures of one client each: biases (2 ln 3, 0) and zero. The mean logits are (ln 3, 0), so the
        teacher says (3/4, 1/4). The second student says (1/2, 1/2): its bias has the gradient (-1/4, 1/4), and its
        weights for the first pixel, which is 1 in both rows, too. The second pixel averages out. Adam's first step is
        lr g / (|g| + eps) for each. The first student says (9/10, 1/10): g = (3/20, -3/20), a step back."""
        method, models = FedDF(server_steps=1, server_lr=0.5), {0: ONE, 1: OTHER}
        server = server_with(method, models)
        method.aggregate(server, {0: biased(2 * LN3, 0.0), 1: biased(0.0, 0.0)})
        step = 0.5 * 0.25 / (0.25 + ADAM_EPS)
        weight, bias = head_of(server, OTHER)
        assert bias == pytest.approx([step, -step])
        assert weight[0] + weight[1] == pytest.approx([step, 0, -step, 0], abs=1e-6)
        weight, bias = head_of(server, ONE)
        assert bias == pytest.approx([2 * LN3 - step, step])
        assert weight[0] + weight[1] == pytest.approx([-step, 0, step, 0], abs=1e-6)

    def test_the_rate_falls_along_a_cosine(self):
        """Gradients of one sign: Adam's steps are about as long as the rate, which is 1, 3/4 and 1/4 of it."""
        moved = []
        for steps in (1, 3):
            method = FedDF(server_steps=steps, server_lr=1e-4)
            server = server_with(method, {0: ONE, 1: OTHER})
            method.aggregate(server, {0: biased(2 * LN3, 0.0), 1: biased(0.0, 0.0)})
            moved.append(head_of(server, OTHER)[1][0])
        assert moved == pytest.approx([1e-4, 2e-4], rel=1e-3)

    def test_every_round_begins_with_a_new_optimizer(self):
        method, models = FedDF(server_steps=2, server_lr=0.1), {0: ONE, 1: OTHER}
        uploads = {0: biased(2 * LN3, 0.0), 1: biased(0.0, 0.0)}
        server = server_with(method, models)
        found = []
        for t in range(2):
            server.begin(t, {})
            method.aggregate(server, uploads)
            found.append(head_of(server, OTHER)[1])
        assert found[0] == found[1]

    def test_an_architecture_that_nobody_sent_is_distilled_from_its_last_model(self):
        method, models = FedDF(server_steps=1, server_lr=0.5), {0: ONE, 1: OTHER}
        server = server_with(method, models)
        method.aggregate(server, {0: biased(LN3, 0.0)})
        assert head_of(server, OTHER)[1] == pytest.approx([0.5, -0.5])
        before = head_of(server, OTHER)
        server.begin(1, {})
        method.aggregate(server, {0: biased(8 * LN3, 0.0)})
        assert head_of(server, OTHER)[1][0] > before[1][0]

    def test_the_mean_within_an_architecture_by_hand(self):
        """Samples 1 and 3: (0 + 3 * 4) / 4."""
        for weighting, expected in (("samples", 3.0), ("uniform", 2.0)):
            method = FedDF(server_steps=0, weighting=weighting)
            server = server_with(method, {0: ONE, 1: ONE, 2: OTHER}, {0: 1, 1: 3, 2: 9})
            method.aggregate(server, {0: biased(0.0, 0.0), 1: biased(4.0, 4.0), 2: biased(7.0, 7.0)})
            assert head_of(server, ONE)[1] == [expected, expected]
            assert head_of(server, OTHER)[1] == [7, 7]

    def test_rows_of_a_round_are_as_many_as_it_visits(self):
        server = server_with(FedDF(), {0: ONE})
        server = Server(server.task, server.cards, public=public_rows(PUBLIC * 50))
        assert len(FedDF(server_steps=3, server_batch=8).draw_rows(server)) == 24
        assert sorted(FedDF().draw_rows(server).tolist()) == list(range(100))

    def test_it_lowers_the_divergence_from_the_ensemble(self):
        losses = [run_tiny("feddf", **TINY, server_steps=n).history[0]["notes"]["distillation_loss"] for n in (1, 100)]
        assert losses[1] < losses[0] / 2


def sent(result: Result) -> list:
    """What clients and server sent each other."""
    return [entry for entry in result.ledger.entries() if entry.direction != "evaluation"]


class TestFedAvg:
    def test_without_steps_one_architecture_is_fedavg(self):
        """Bit for bit: metrics, bytes and weights. FedAvg has no view of the server's models."""
        settings = TINY | {"models": "test_feddf.normed", "rounds": 3, "participation": 0.75}
        feddf = federation_of(assemble_tiny("feddf", **settings, server_steps=0))
        fedavg = federation_of(assemble_tiny("fedavg", **settings))
        results = [run_through(federation) for federation in (fedavg, feddf)]
        usual, found = map(numbers, results)
        for record in found:
            for views in (record["mean"], *record["clients"].values()):
                assert views.pop("group") == views["before"]
        assert [{**record, "bytes": None} for record in found] == [{**record, "bytes": None} for record in usual]
        assert sent(results[0]) == sent(results[1])
        assert differing(*map(selected, results)) == []
        (mine,) = feddf.server.state.models.values()
        assert equal(dict(fedavg.server.state.shared.state_dict()), dict(mine.state_dict()))

    def test_without_steps_two_architectures_are_fedavg_within_each(self):
        """Each half alone would have other clients: so the mean is taken by hand, of what clients sent."""
        parts = assemble_tiny("feddf", **TINY, models="mlp-64,cnn-16@0.5", server_steps=0, rounds=1)
        federation = federation_of(parts)
        uploads_of = {}
        merge = federation.half.aggregate

        def watched(stage, uploads):
            uploads_of.update(uploads)
            return merge(stage, uploads)

        federation.half.aggregate = watched
        run_through(federation)
        for model, clients in (("mlp-64", (0, 2)), ("cnn-16@0/5", (1, 3))):
            n = [parts.cards[k].samples for k in clients]
            for name, value in federation.server.state.models[model].state_dict().items():
                pair = [uploads_of[k].tensor(name) for k in clients]
                torch.testing.assert_close(value, (n[0] * pair[0] + n[1] * pair[1]) / sum(n))


def normed(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.BatchNorm1d(16), nn.ReLU())


class TestBatchNorm:
    def test_distillation_moves_the_statistics_of_the_student(self):
        settings = TINY | {"models": "test_feddf.normed", "rounds": 1}
        found = []
        for steps in (0, 3):
            federation = federation_of(assemble_tiny("feddf", **settings, server_steps=steps))
            run_through(federation)
            (student,) = federation.server.state.models.values()
            found.append({n: v.clone() for n, v in student.state_dict().items()})
        tracked = next(n for n in found[0] if n.endswith("num_batches_tracked"))
        assert found[1][tracked] == found[0][tracked] + 3
        assert not torch.equal(*(one[tracked.replace("num_batches_tracked", "running_mean")] for one in found))


class TestServersModels:
    def test_the_model_of_an_architecture_is_served(self, tmp_path):
        result = run_tiny("feddf", tmp_path / "run", **TINY, models="mlp-64,cnn-16", server_steps=3)
        one, other, third = (pluribus.load_model(result.folder, k, server=True).state_dict() for k in (0, 1, 2))
        assert equal(one, third)
        assert one.keys() != other.keys()
        saved = Checkpoint(result.folder / "state").server()
        assert equal(
            {f"models.mlp-64.{name}": value for name, value in one.items()},
            {name: value for name, value in saved.items() if name.startswith("models.mlp-64.")},
        )


class TestEngines:
    def test_recorded_steps_leave_the_same_bits(self, monkeypatch):
        """Without Adam, which reads its counters on a CPU."""
        monkeypatch.setattr(Server, "descend", lambda server, loss, key: sgd_step(server.state.models[key], loss, 0.1))
        settings = TINY | {"rounds": 4, "participation": 0.75, "models": "mlp-64,cnn-16", "server_steps": 6}
        usual, recorder, told = run_tiny("feddf", **settings), StandIn(), []
        runner = CapturedServer(recorder, told.append)
        monkeypatch.setattr("pluribus.federation.server_runner_for", lambda parts, tell: runner)
        federation = federation_of(assemble_tiny("feddf", **settings))
        recorder.server = federation.server
        assert_same(usual, run_through(federation))
        assert told == []
        assert (recorder.recorded, recorder.replayed) == (2, 4 * 2 * 6 - 2), "one recording per architecture"


class TestRefusals:
    def test_no_public_data(self):
        with refused(MismatchError, "feddf", "public data", "--public-fraction 0.1"):
            assemble_tiny("feddf", public_fraction=0.0)

    def test_too_few_public_rows(self):
        with refused(PartitionError, "feddf", 2, "--public-fraction"):
            assemble_tiny("feddf", public_fraction=1e-9)

    def test_public_rows_of_another_shape(self):
        other = (np.zeros((20, 1, 9, 9), dtype=np.uint8), np.arange(20) % 10)
        with refused(MismatchError, "--public-data", "9"):
            assemble_tiny("feddf", data=few_digits(160), public_data=other)

    def test_public_rows_without_labels_of_ours_will_do(self):
        x = np.random.default_rng(0).integers(0, 256, (30, 1, 8, 8), dtype=np.uint8)
        result = run_tiny("feddf", data=few_digits(160), public_data=(x, np.arange(30) % 3), server_steps=2)
        assert result.history[-1]["notes"]["distillation_loss"] > 0

    def test_numbers_to_predict(self):
        x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
        with refused(MismatchError, "feddf", "numbers"):
            assemble_tiny("feddf", data=(x, x[:, 0]), models="mlp-64", label_kind="numbers", public_fraction=0.2)

    @pytest.mark.parametrize(
        ("hyper", "facts"),
        [
            ({"server_steps": -1}, ("--server-steps", 0, -1)),
            ({"server_lr": 0.0}, ("--server-lr", 0)),
            ({"server_batch": 1}, ("--server-batch", 2, 1)),
        ],
    )
    def test_numbers_that_make_no_sense(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("feddf", **TINY, **hyper)
