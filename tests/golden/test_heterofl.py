"""HeteroFL and FedRolex: a mean over holders by hand, the scaler and the mask, and where they must be FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from conftest import assemble_tiny, make_host, run_tiny
from kit import differing, kept
from pluribus.client import Batch
from pluribus.errors import MismatchError
from pluribus.methods._submodels import mean_of_holders
from pluribus.models.width import Part
from refusals import refused

CUT = {"models": "cnn-16-32", "capacity": "1,0.5,0.25"}
WHOLE = {"models": "cnn-16-32", "capacity": "1", "partition": "iid"}


class TestMean:
    def test_over_those_who_hold_a_number_by_hand(self):
        """Client 0 holds outputs 0 and 1 of three and input 0 of two; client 1, of weight 3, outputs 1 and 2."""
        whole = {"weight": torch.full((3, 2), 9.0), "seen": torch.tensor(1)}
        parts = {
            0: Part({"weight": (torch.tensor([0, 1]), torch.tensor([0])), "seen": ()}),
            1: Part({"weight": (torch.tensor([1, 2]), None), "seen": ()}),
        }
        sent = {
            0: {"weight": torch.tensor([[1.0], [2.0]]), "seen": torch.tensor(4)},
            1: {"weight": torch.tensor([[4.0, 5.0], [6.0, 7.0]]), "seen": torch.tensor(3)},
        }
        found = mean_of_holders(whole, sent, parts, {0: 1, 1: 3})
        assert found["weight"].tolist() == [[1.0, 9.0], [(2 + 3 * 4) / 4, 5.0], [6.0, 7.0]]
        assert found["seen"] == 4

    def test_a_client_gets_and_changes_its_part_only(self):
        parts = assemble_tiny("heterofl", clients=1, **(CUT | {"capacity": "0.5"}))
        from pluribus.federation import Federation
        from pluribus.storage.memory import MemoryRun

        federation = Federation(parts, MemoryRun())
        before = {name: value.clone() for name, value in federation.half.state().items()}
        federation.run()
        part = parts.task.part_of("cnn-16-32@0.5")
        for name, value in before.items():
            changed = federation.half.state()[name] != value
            held = torch.zeros_like(changed)
            held[part.at(name.removeprefix("shared."))] = True
            assert not bool((changed & ~held).any()), name
            assert bool(changed.any()), name


class TestClient:
    def client(self, **settings):
        host = make_host(assemble_tiny("heterofl", models="mlp-64", capacity="0.5", clients=2, **settings))
        return host.method, host.client(0)

    def test_the_scaler_divides_by_the_share_in_training_alone(self):
        """One hidden layer: ReLU(h / 0.5) = 2 ReLU(h)."""
        _, client = self.client()
        x, _ = client.data["train"].take(torch.arange(3))
        with torch.no_grad():
            still = client.model.eval().features(x)
            assert torch.equal(client.model.train().features(x), 2 * still)
        _, plain = self.client(scaler=False)
        assert torch.equal(plain.model.train().features(x), plain.model.eval().features(x))

    def test_logits_of_classes_that_are_not_held_count_zero(self):
        method, client = self.client(partition="pathological", classes_per_client=2)
        positions = torch.arange(4)
        x, y = client.data["train"].take(positions)
        held = torch.zeros(10)
        held[client.data["train"].labels()] = 1
        assert held.sum() == 2
        logits = client.model.train()(x)
        loss = method.loss(client, Batch(x, y, positions, 4))
        torch.testing.assert_close(loss, F.cross_entropy(logits * held, y))
        loss.backward()
        assert client.model.head.bias.grad[held == 0].eq(0).all()


class TestInvariants:
    @pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
    def test_with_the_whole_width_it_is_fedavg_with_equal_weights(self, method):
        one = run_tiny(method, **WHOLE)
        other = run_tiny("fedavg", models="cnn-16-32", partition="iid", weighting="uniform")
        mine, theirs = ({name: v for name, v in kept(run).items() if "held" not in name} for run in (one, other))
        assert not differing(mine, theirs)
        assert one.summary["before"] == other.summary["before"]

    def test_without_batch_norm_the_global_model_is_the_one_that_whole_clients_get(self):
        run = run_tiny("heterofl", models="cnn-16", capacity="1", rounds=2)
        assert run.summary["global"] == run.summary["before"]

    def test_the_global_model_normalizes_by_gathered_statistics(self):
        """Mean and variance of what the first layer gives for all training rows of the client."""
        run = run_tiny("heterofl", **CUT, rounds=1)
        model = run.server_model(client=1)
        with run._open() as (parts, _):
            data = parts.data.sets(1)["train"]
            x, _ = data.take(torch.arange(len(data)))
        with torch.no_grad():
            first = model.features.backbone.conv1(x).transpose(0, 1).flatten(1)
        norm = model.features.backbone.conv1_norm
        torch.testing.assert_close(norm.running_mean, first.mean(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, first.var(1), rtol=1e-4, atol=1e-5)
        assert not norm.training

    def test_fedrolex_begins_as_heterofl_without_scaler(self):
        runs = [run_tiny("fedrolex", **CUT, rounds=1), run_tiny("heterofl", **CUT, rounds=1, scaler=False)]
        assert not differing(*(kept(run) for run in runs))
        later = [run_tiny("fedrolex", **CUT, rounds=2), run_tiny("heterofl", **CUT, rounds=2, scaler=False)]
        assert differing(*(kept(run) for run in later))

    def test_every_channel_is_covered_after_as_many_rounds_as_channels(self):
        """Of a weight between two layers, pairs of channels that never share a window stay: 0.25 of 16 holds 4."""
        task = assemble_tiny("fedrolex", **CUT).task
        whole = task.shape_of("cnn-16-32").state_dict()
        seen = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in whole.items()}
        for t in range(64):  # the widest layer has 64 channels
            part = task.part_of("cnn-16-32@0.25", t)
            for name, value in seen.items():
                value[part.at(name)] = True
        assert all(bool(value.flatten(1).any(1).all()) for value in seen.values() if value.dim() > 1)
        assert all(bool(value.all()) for value in seen.values() if value.dim() < 2)
        assert all(bool(value.flatten(1).all()) for name, value in seen.items() if name == "head.weight")
        inner = seen["features.backbone.conv2.weight"][:, :, 0, 0]  # 32 x 16
        assert inner.sum() == 32 * 11  # a window of 8 of 32 meets one of 4 of 16 in 11 places of 16

    def test_the_window_goes_around_the_end(self):
        task = assemble_tiny("fedrolex", **CUT).task
        value = torch.arange(16.0)
        whole = {name: torch.zeros(one.shape) for name, one in task.shape_of("cnn-16-32").state_dict().items()}
        whole["features.backbone.conv1.bias"] = value
        taken = task.part_of("cnn-16-32@0.25", 14).take(whole)
        assert taken["features.backbone.conv1.bias"].tolist() == [14, 15, 0, 1]


class TestRefused:
    def test_two_architectures(self):
        with refused(MismatchError, "heterofl", "mlp-64", "cnn-16"):
            run_tiny("heterofl", models="mlp-64,cnn-16", capacity="1")

    def test_a_model_that_joins_channels(self):
        with refused(MismatchError, "googlenet", "joins"):
            run_tiny("heterofl", models="googlenet", capacity="0.5", image_size=32)

    def test_features_that_are_not_cut(self):
        with refused(MismatchError, "cnn-16@0.5", "--width"):
            run_tiny("heterofl", models="cnn-16", capacity="1,0.5", width=64)
