"""FedBN: a step, an upload and a mean by hand, batch norm that stays at home, and where it must be LG-FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assemble_tiny, run_tiny
from kit import ByHand, differing, kept, numbers
from parties import client_of, data_of, equal, server_of, signs, task_of
from pluribus.client import Client
from pluribus.errors import MismatchError
from pluribus.message import Message
from pluribus.methods.fedbn import FedBN
from pluribus.models import TwoPartModel
from pluribus.models.layers import batch_norms
from pluribus.optim import Rule
from pluribus.request import Evaluate
from refusals import refused

NORM = ("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")


def normed_client() -> Client:
    """Batch norm of two pixels, and a head of zeros. Four images (1, -1) of class 0, four (1, 1) of class 1."""
    model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2)), nn.Linear(2, 2), 2)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return client_of(model, data_of(signs([[1, -1], [1, 1]] * 4), [0, 1] * 4), rule=Rule(lr=1.0))


class TestClient:
    def test_a_step_by_hand_and_what_is_sent(self):
        """Normalized pixels are (0, -1) and (0, 1), all but for the 1e-5 of batch norm, and p = (1/2, 1/2).

        The gradient of row 0 is ((-1/2)(0, -1) + (1/2)(0, 1)) / 2 = (0, 1/2). A head of zeros passes no
        gradient on to batch norm. Statistics: mean 0.9 * 0 + 0.1 * (1, 0), variance 0.9 * 1 + 0.1 * (0, 8/7).
        """
        client = normed_client()
        up = FedBN().local_update(client)
        assert set(up) == {"head.weight", "head.bias"}
        assert up.tensor("head.weight").flatten().tolist() == pytest.approx([0, -0.5, 0, 0.5], abs=1e-5)
        assert up.tensor("head.bias").tolist() == [0, 0]
        norm = client.model.features[1]
        assert norm.weight.tolist() == [1, 1]
        assert norm.running_mean.tolist() == pytest.approx([0.1, 0])
        assert norm.running_var.tolist() == pytest.approx([0.9, 0.9 + 0.8 / 7])

    def test_a_download_leaves_batch_norm_alone(self):
        client = normed_client()
        own = {name: torch.full_like(value, 7) for name, value in client.model.features.state_dict().items()}
        client.model.features.load_state_dict(own)
        head = {"head.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "head.bias": torch.tensor([5.0, 6.0])}
        FedBN().receive(client, Message(head))
        assert equal(dict(client.model.features.state_dict()), own)
        assert equal({f"head.{n}": v for n, v in client.model.head.state_dict().items()}, head)

    def test_everything_of_batch_norm_is_private_and_no_other_norm(self):
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.LayerNorm(2))
        assert batch_norms(net) == set(NORM)


@pytest.mark.parametrize(("weighting", "mean"), [("samples", 3.0), ("uniform", 2.0)])
def test_the_mean_by_hand(weighting, mean):
    """Heads of 0 and 4, with 1 and 3 samples: (0 * 1 + 4 * 3) / 4, or (0 + 4) / 2."""
    server = server_of(task_of(2, 2), {0: 1, 1: 3})
    server.state.shared = {"head.weight": torch.zeros(2, 2)}
    FedBN(weighting=weighting).aggregate(
        server, {k: Message({"head.weight": torch.full((2, 2), 4.0 * k)}) for k in (0, 1)}
    )
    assert server.state.shared["head.weight"].flatten().tolist() == [mean] * 4


def only_norm(shape) -> nn.Module:
    """A body whose only state is batch norm."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64))


class TestAgainstOthers:
    @pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.001, "participation": 0.5}])
    def test_with_nothing_but_batch_norm_in_the_body_it_is_lg_fedavg(self, settings):
        """Then the head is all that is averaged."""
        settings |= {"models": "test_fedbn.only_norm", "rounds": 3}
        one, other = run_tiny("fedbn", **settings), run_tiny("lg-fedavg", **settings)
        assert [r["loss"] for r in one.history] == [r["loss"] for r in other.history]
        assert [r["clients"] for r in one.history] == [r["clients"] for r in other.history]
        states, others = ({n: v for n, v in kept(run).items() if " model." in n} for run in (one, other))
        assert differing(states, others) == []
        assert states

    def test_the_first_round_is_fedavgs_without_batch_norm(self):
        """Batch norm has the same initial values everywhere."""
        hands = [ByHand(assemble_tiny(name, models="cnn-16-32")) for name in ("fedbn", "fedavg")]
        for hand in hands:
            hand.round(0, range(4))
        shared, everything = hands[0].server.state.shared, hands[1].server.state.shared.state_dict()
        assert set(everything) - set(shared) == batch_norms(hands[1].server.state.shared)
        assert differing(dict(shared), {name: everything[name] for name in shared}) == []

    def test_later_rounds_are_not(self):
        settings = {"models": "cnn-16-32", "rounds": 2}
        assert numbers(run_tiny("fedbn", **settings)) != numbers(run_tiny("fedavg", **settings))


class TestRun:
    def test_batch_norm_never_travels_and_differs(self):
        result = run_tiny("fedbn")
        model = assemble_tiny("fedbn").task.build("cnn-16-32")
        private = batch_norms(model)
        assert len(private) == 10  # two layers, five tensors each
        assert result.ledger.by("tensor").keys() == (set(model.state_dict()) - private) | {"(header)"}
        states = kept(result)
        for name in private - {name for name in private if name.endswith("num_batches_tracked")}:
            assert not torch.equal(states[f"client 0 model.{name}"], states[f"client 1 model.{name}"])

    def test_before_is_the_global_weights_with_the_own_batch_norm(self):
        hand = ByHand(assemble_tiny("fedbn"))
        hand.round(0, range(4))
        client = hand.host.client(2)
        measured = hand.host.answer(Evaluate(2, 0, hand.download(0, 2))).figures
        assert list(measured) == ["before", "after"]
        model = hand.server.task.build("cnn-16-32").eval()
        model.load_state_dict({**client.model.state_dict(), **hand.server.state.shared})
        data = client.data["test"]
        x, y = data.take(torch.arange(len(data)))
        assert measured["before"]["test_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)

    def test_who_never_takes_part_keeps_its_first_batch_norm(self):
        hand = ByHand(assemble_tiny("fedbn"))
        hand.round(0, [0, 3])
        means = [hand.host.client(k).model.state_dict()["features.backbone.conv1_norm.running_mean"] for k in range(4)]
        assert [bool(mean.any()) for mean in means] == [True, False, False, True]


@pytest.mark.parametrize("models", ["mlp-64", "cnn-16"])
def test_a_model_without_batch_norm_is_refused(models):
    """It would be FedAvg under another name."""
    with refused(MismatchError, "fedbn", models, "batch norm", "fedavg"):
        assemble_tiny("fedbn", models=models)


def test_two_architectures_are_refused():
    with refused(MismatchError, "fedbn", "cnn-16-32", "mlp-64"):
        assemble_tiny("fedbn", models="cnn-16-32,mlp-64")
