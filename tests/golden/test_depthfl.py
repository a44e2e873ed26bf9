"""DepthFL: the loss of exits by hand, who votes about which stage, what it equals at depth 1, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, run_tiny
from kit import ByHand, differing, numbers
from parties import client_of, data_of, server_of, signs, task_of
from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, MismatchError, RangeError
from pluribus.message import Message, decode
from pluribus.method import Method
from pluribus.methods.depthfl import DepthFL, parts
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import refused

LN3 = math.log(3)
BOTH = {"models": "cnn-16-32", "capacity": "2,1"}  # clients 0 and 2 are deep


def head_of(logit: float) -> nn.Linear:
    """A head that gives the image (1, -1) the logits (logit, 0)."""
    head = nn.Linear(2, 2)
    head.load_state_dict({"weight": torch.tensor([[logit, 0.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
    return head


def deep_client(*logits: float, method: Method | None = None) -> Client:
    """A client whose stages pass the image (1, -1) of class 0 on, and whose exits give it these first logits."""
    method = method or DepthFL()
    stages = [nn.Linear(2, 2, bias=False) for _ in logits]
    for stage in stages:
        nn.init.eye_(stage.weight)
    model = TwoPartModel(nn.Sequential(nn.Flatten(), *stages), head_of(logits[-1]), 2)
    client = client_of(model, data_of(signs([[1, -1]]), [0]), rule=Rule(lr=1.0))
    client.state.exits = nn.ModuleList(TwoPartModel(nn.Identity(), head_of(one), 2) for one in logits[:-1])
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, method.schedule(0, 1))
    return client


def batch_of(client: Client) -> Batch:
    x, y = client.data["train"].take(torch.arange(1))
    return Batch(x, y, torch.arange(1), 1)


class TestStep:
    """Logits (ln 3, 0) are p = (3/4, 1/4), and logits 0 are q = (1/2, 1/2)."""

    CE = (-math.log(3 / 4), math.log(2))
    KL_QP = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    KL_PQ = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)

    def loss(self, *logits: float, **hyper: float) -> float:
        method = DepthFL(**hyper)
        client = deep_client(*logits, method=method)
        return method.step(client, batch_of(client)).item()

    def test_one_exit_learns_from_labels(self):
        assert self.loss(LN3) == pytest.approx(self.CE[0])

    def test_two_exits(self):
        assert self.loss(LN3, 0) == pytest.approx(sum(self.CE) + self.KL_QP + self.KL_PQ)

    def test_three_exits_divide_by_two(self):
        """Exits 1 and 3 agree. Exit 2 differs from both, in both directions."""
        apart = 2 * (self.KL_QP + self.KL_PQ) / 2
        assert self.loss(LN3, 0, LN3) == pytest.approx(2 * self.CE[0] + self.CE[1] + apart)

    def test_the_weight_of_the_divergence(self):
        assert self.loss(LN3, 0, distill=0) == pytest.approx(sum(self.CE))
        apart = 0.5 * (self.KL_QP + self.KL_PQ)
        assert self.loss(LN3, 0, distill=0.5) == pytest.approx(sum(self.CE) + apart)
        assert self.loss(LN3, 0, ramp_up=10) == pytest.approx(sum(self.CE) + 2 * math.exp(-5) * apart)

    def test_teachers_get_no_gradient(self):
        """Exit 1: CE moves its logits by p - e_0 = (-1/4, 1/4), its teacher by p - q = (1/4, -1/4): 0 in all.

        Exit 2: q - e_0 = (-1/2, 1/2) and q - p = (-1/4, 1/4). A step of rate 1 subtracts that.
        """
        client = deep_client(LN3, 0)
        DepthFL().step(client, batch_of(client))
        assert client.state.exits[0].head.bias.tolist() == pytest.approx([0, 0], abs=1e-6)
        assert client.model.head.bias.tolist() == pytest.approx([0.75, -0.75])

    def test_the_weight_grows(self):
        weights = [DepthFL(ramp_up=10, distill=2.0).schedule(t, 20)["distill"] for t in (0, 5, 10, 15)]
        assert weights == pytest.approx([2 * math.exp(-5), 2 * math.exp(-5 / 4), 2, 2])
        assert DepthFL().schedule(0, 20) == {"distill": 1.0}

    def test_predictions_are_the_mean_logits_of_all_exits(self):
        client = deep_client(LN3, 0, 3 * LN3)
        scores = DepthFL().predict(client, batch_of(client).x)
        assert scores.flatten().tolist() == pytest.approx([4 / 3 * LN3, 0])


@pytest.mark.parametrize(("weighting", "both"), [("samples", 3.0), ("uniform", 2.0)])
def test_the_mean_is_over_those_who_have_a_part(weighting, both):
    """Stage 1: 0 and 4, of 1 and 3 samples. Stage 2: client 1 alone. Stage 3: nobody, so it stays."""
    server = server_of(task_of(2, 2), {0: 1, 1: 3})
    server.state.shared = {f"stage{number}.weight": torch.full((2,), 9.0) for number in (1, 2, 3)}
    uploads = {0: {"stage1.weight": 0.0}, 1: {"stage1.weight": 4.0, "stage2.weight": 5.0}}
    messages = {k: Message({n: torch.full((2,), v) for n, v in sent.items()}) for k, sent in uploads.items()}
    DepthFL(weighting=weighting).aggregate(server, messages)
    assert {name: value.tolist() for name, value in server.state.shared.items()} == {
        "stage1.weight": [both] * 2,
        "stage2.weight": [5.0] * 2,
        "stage3.weight": [9.0] * 2,
    }


def worked(clients, **settings):
    """What clients sent in round 0, and the server before and after it."""
    hand = ByHand(assemble_tiny("depthfl", **settings))
    before = {name: value.clone() for name, value in hand.server.state.shared.items()}
    answers = hand.round(0, clients)
    sent = {k: decode(answers[0, k], hand.host.wires(k)[0].up, "up").part() for k in clients}
    return sent, before, dict(hand.server.state.shared)


class TestRound:
    def test_at_full_depth_no_part_has_one_voter(self):
        sent, before, after = worked(range(4), models="cnn-16-32", capacity="2")
        assert all(part.keys() == after.keys() for part in sent.values())
        for name, value in after.items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.stack([part[name] for part in sent.values()]).mean(0))
            assert not torch.equal(value, before[name])

    def test_without_a_capacity_everyone_has_full_depth(self):
        settings = {"models": "cnn-16-32", "rounds": 2}
        named, unnamed = run_tiny("depthfl", capacity="2", **settings), run_tiny("depthfl", **settings)
        assert [r["clients"] for r in named.history] == [r["clients"] for r in unnamed.history]

    def test_shallow_clients_have_the_first_parts(self):
        sent, _, after = worked(range(4), **BOTH)
        shallow = {name for name in after if name.startswith(("stage1.", "exit1."))}
        assert set(sent[0]) == set(sent[2]) == set(after)
        assert set(sent[1]) == set(sent[3]) == shallow
        assert {name.partition(".")[0] for name in after} == {"stage1", "stage2", "exit1", "exit2"}
        for name in after:
            voters = [part[name] for part in sent.values() if name in part]
            assert len(voters) == (4 if name in shallow else 2)
            if after[name].is_floating_point():
                torch.testing.assert_close(after[name], torch.stack(voters).mean(0))

    def test_shallow_clients_change_no_deep_part(self):
        _, before, after = worked([1, 3], **BOTH)
        changed = set(differing(before, after))
        assert changed
        assert {name.partition(".")[0] for name in changed} == {"stage1", "exit1"}

    def test_a_download_is_all_that_a_client_predicts_with(self):
        hand = ByHand(parts_of := assemble_tiny("depthfl", **BOTH))
        hand.round(0, range(4))
        for k in range(4):
            client = hand.host.client(k)
            DepthFL().receive(client, DepthFL().download(hand.server, k))
            own = parts(client.model, client.state.exits)
            assert differing(own, {name: hand.server.state.shared[name] for name in own}) == []
            assert len(client.state.exits) == (1, 0)[k % 2]
        assert parts_of.task.width is None

    def test_at_depth_1_it_is_fedavg_of_equal_weights(self):
        settings = {"models": "cnn-16-32@depth1", "rounds": 3, "momentum": 0.9}
        one, other = run_tiny("depthfl", **settings), run_tiny("fedavg", weighting="uniform", **settings)
        assert [r["loss"] for r in one.history] == [r["loss"] for r in other.history]
        assert [r["clients"] for r in one.history] == [r["clients"] for r in other.history]

    def test_exits_that_teach_make_a_difference(self):
        assert numbers(run_tiny("depthfl", **BOTH)) != numbers(run_tiny("depthfl", distill=0.0, **BOTH))

    @pytest.mark.parametrize("model", ["resnet6", "mlp-128-64", "cnn-16-32-gn"])
    def test_other_models(self, model):
        settings = {"models": model, "capacity": "2,1", "clients": 2, "rounds": 1}
        result = run_tiny("depthfl", **settings)
        assert {facts.model for facts in result.clients.values()} == {f"{model}@depth1", f"{model}@depth2"}

    def test_exits_of_a_common_width(self):
        """Every exit has a projector of its own, which is averaged with it."""
        sent, _, _ = worked(range(2), width=8, projector="linear", **BOTH)
        assert sent[0]["exit1.features.projector.weight"].shape == (8, 256)
        assert sent[0]["exit2.features.projector.weight"].shape == (8, 64)
        assert "exit1.features.projector.weight" in sent[1]

    def test_traffic_is_what_the_page_says(self):
        result = run_tiny("depthfl", rounds=3, **BOTH)
        for way in ("up", "down"):
            sizes = {"stage1": 0, "stage2": 0, "exit1": 0, "exit2": 0}
            for name, size in result.ledger.by("tensor", way).items():
                if name != "(header)":
                    sizes[name.partition(".")[0]] += size
            # 3 rounds; 4 clients have the first stage and exit, 2 the second
            assert sizes == {
                "stage1": 3 * 4 * 904,
                "exit1": 3 * 4 * 10_280,
                "stage2": 3 * 2 * 19_080,
                "exit2": 3 * 2 * 35_624,
            }


class TestRefusals:
    def test_depth_0(self):
        with refused(RangeError, 0, "at least 1"):
            assemble_tiny("depthfl", models="cnn-16-32", capacity="2,0")

    def test_a_share_is_no_depth(self):
        with refused(RangeError, 0.5):
            assemble_tiny("depthfl", models="cnn-16-32", capacity="1,0.5")

    def test_more_stages_than_there_are(self):
        with refused(MismatchError, "cnn-16-32", "depth of 3", "2 stages"):
            assemble_tiny("depthfl", models="cnn-16-32", capacity="3,1")

    def test_mixed_architectures(self):
        with refused(MismatchError, "depthfl", "cnn-16-32@depth1", "mlp-128-64@depth1", "--models"):
            assemble_tiny("depthfl", models="cnn-16-32,mlp-128-64", capacity="1")

    @pytest.mark.parametrize("capacity", ["", "1"])
    def test_a_model_without_stages(self, capacity):
        with refused(MismatchError, "logistic", "no stages"):
            assemble_tiny("depthfl", models="logistic", capacity=capacity)

    def test_a_pretrained_model(self):
        with refused(MismatchError, "tiny-cnn-64", "pretrained"):
            assemble_tiny("depthfl", models="tiny-cnn-64", image_size=16)

    def test_a_narrow_model(self):
        with refused(MismatchError, "depthfl", "cnn-16-32@0.5", "--capacity"):
            assemble_tiny("depthfl", models="cnn-16-32,cnn-16-32@0.5")

    def test_two_capacities(self):
        with refused(ConflictError, "--capacity", "cnn-16-32@depth1"):
            assemble_tiny("depthfl", models="cnn-16-32@depth1", capacity="1")

    @pytest.mark.parametrize(
        ("hyper", "facts"), [({"distill": -1}, ("--distill", -1)), ({"ramp_up": -1}, ("--ramp-up", -1))]
    )
    def test_numbers_that_make_no_sense(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("depthfl", **hyper)
