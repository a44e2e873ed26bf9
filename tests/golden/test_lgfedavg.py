"""LG-FedAvg: means of heads by hand, what stays at home, and what it must equal in the simplest cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, make_host, run_tiny
from parties import client_of, data_of, equal, federation_of, flat_split, run_through, server_of, signs, task_of
from pluribus.errors import MismatchError, UnknownNameError
from pluribus.evaluate import measure
from pluribus.message import Message
from pluribus.methods.lgfedavg import LGFedAvg
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import refused

K, C = 64, 10


def head(weight: list[list[float]], bias: list[float]) -> Message:
    return Message({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})


def merged(uploads: dict[int, Message], samples: dict[int, int], method: LGFedAvg = LGFedAvg()) -> dict:  # noqa: B008
    """The global head after these uploads."""
    server = server_of(task_of(2, 1), samples)
    server.state.shared = nn.Linear(1, 2)
    method.aggregate(server, uploads)
    return {name: value.tolist() for name, value in server.state.shared.state_dict().items()}


class TestAggregate:
    TWO = {0: head([[4.0], [0.0]], [0.0, 8.0]), 1: head([[0.0], [8.0]], [4.0, 0.0])}  # noqa: RUF012

    def test_weighted_by_training_samples(self):
        """3/4 and 1/4."""
        assert merged(self.TWO, {0: 3, 1: 1}) == {"weight": [[3], [2]], "bias": [1, 6]}

    def test_uniform(self):
        found = merged(self.TWO, {0: 3, 1: 1}, LGFedAvg(weighting="uniform"))
        assert found == {"weight": [[2], [4]], "bias": [2, 4]}

    def test_weights_sum_to_one_over_those_who_answered(self):
        assert merged(self.TWO, {0: 3, 1: 1, 2: 1000}) == merged(self.TWO, {0: 3, 1: 1})

    def test_equal_heads_are_a_fixed_point(self):
        same = head([[0.3], [-1.7]], [0.9, 2.2])
        found = merged({0: same, 1: same, 2: same}, {0: 3, 1: 5, 2: 11})
        assert found["weight"] == [pytest.approx([0.3]), pytest.approx([-1.7])]
        assert found["bias"] == pytest.approx([0.9, 2.2])


class TestClient:
    def test_a_local_step_by_hand(self):
        """Head 0, p = (1/2, 1/2). Pixels (1, -1) of class 0, eta = 1: row 0 gets (1, -1) / 2, row 1 the opposite.

        Class 1, which the client does not hold, is pushed down, and this row goes up like the other.
        """
        client = client_of(flat_split(2, 2), data_of(signs([[1, -1]]), [0]), rule=Rule(lr=1.0))
        method = LGFedAvg()
        method.receive(client, head([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]))
        sent = method.local_update(client)
        assert set(sent) == {"weight", "bias"}
        assert sent.tensor("weight").tolist() == [[0.5, -0.5], [-0.5, 0.5]]
        assert sent.tensor("bias").tolist() == [0.5, -0.5]

    def test_only_the_head_is_installed(self):
        host = make_host(assemble_tiny("lg-fedavg"))
        client, other = host.client(3), host.task.build("mlp-64", "other").head
        before = {name: value.clone() for name, value in client.model.features.state_dict().items()}
        LGFedAvg().receive(client, Message.of(other))
        assert equal(dict(client.model.features.state_dict()), before)
        assert equal(dict(client.model.head.state_dict()), dict(other.state_dict()))


class TestRun:
    def test_everyone_starts_from_one_head(self):
        federation = federation_of(assemble_tiny("lg-fedavg"))
        heads = [LGFedAvg().download(federation.server, k).part() for k in range(4)]
        assert all(equal(one, heads[0]) for one in heads)

    @pytest.mark.parametrize("model", ["cnn-16-32", "mlp-64"])
    def test_with_one_client_it_is_local_training(self, model):
        settings = {"clients": 1, "rounds": 3, "epochs": 2, "models": model, "momentum": 0.9}
        averaging = federation_of(assemble_tiny("lg-fedavg", **settings))
        alone = federation_of(assemble_tiny("local", **settings))
        averaging.server.state.shared.load_state_dict(alone.engine.host.client(0).model.head.state_dict())
        results = run_through(averaging), run_through(alone)
        assert equal(*(dict(one.engine.host.client(0).model.state_dict()) for one in (averaging, alone)))
        assert [r["loss"] for r in results[0].history] == [r["loss"] for r in results[1].history]

    def test_before_is_the_own_extractor_with_the_global_head(self):
        federation = federation_of(assemble_tiny("lg-fedavg", rounds=1))
        run_through(federation)
        for k in range(4):
            client = federation.engine.host.client(k)
            client.model.head.load_state_dict(federation.server.state.shared.state_dict())
            assert measure(LGFedAvg().predict, client) == federation.history[0]["clients"][str(k)]["before"]

    def test_traffic_is_what_the_sheet_says(self):
        """CK + C floats each way, per client and round; nothing of an extractor."""
        result = run_tiny("lg-fedavg", rounds=2)
        assert len({facts.model for facts in result.clients.values()}) == 4
        for way in ("up", "down"):
            by_tensor = result.ledger.by("tensor", way)
            del by_tensor["(header)"]
            assert by_tensor == {"weight": 2 * 4 * 4 * C * K, "bias": 2 * 4 * 4 * C}


def deep_head(shape) -> TwoPartModel:
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, K))
    return TwoPartModel(features, nn.Sequential(nn.Linear(K, 8), nn.ReLU(), nn.Linear(8, C)), K)


class TestRefusals:
    def test_heads_of_two_shapes(self):
        with refused(MismatchError, "lg-fedavg", "head", "clients 0 (mlp-64) and 1 (test_lgfedavg.deep_head)"):
            assemble_tiny("lg-fedavg", models="mlp-64,test_lgfedavg.deep_head")

    def test_features_of_two_widths(self):
        with refused(MismatchError, "lg-fedavg", "widths 64 and 32"):
            assemble_tiny("lg-fedavg", models="mlp-64,test_fedgh.narrow", projector="none")

    def test_no_other_weighting(self):
        with refused(UnknownNameError, "--weighting", "samples", "uniform", "size"):
            assemble_tiny("lg-fedavg", weighting="size")
