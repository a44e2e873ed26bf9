"""FML: both losses by hand, who teaches whom, and what it must equal where nobody teaches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, run_tiny
from parties import client_of, data_of, equal, federation_of, flat_split, run_through, server_of, signs, task_of
from pluribus.assembly import bytes_per_round
from pluribus.client import Batch
from pluribus.errors import MismatchError, MissingSettingError, RangeError, UnknownNameError
from pluribus.inputs import Input
from pluribus.message import Message
from pluribus.methods.fml import FML
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import assert_facts, refused

LN3 = math.log(3)


def pair(own: list[list[float]], meme: list[list[float]], pixels=((1, -1),), labels=(0,), lr: float = 1.0):
    """A client whose private and meme model are linear, without bias at the start."""
    models = []
    for weight in (own, meme):
        model = flat_split(2, 2)
        model.head.load_state_dict({"weight": torch.tensor(weight), "bias": torch.zeros(2)})
        models.append(model)
    client = client_of(models[0], data_of(signs(list(pixels)), labels), rule=Rule(lr=lr))
    client.state.shared = models[1]
    client.equip(FML().optimizers(client), {})
    return client


def batch_of(client) -> Batch:
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


class TestStep:
    # One sample x = (1, -1) of class 0. Private logits (ln 3, 0): q_p = (3/4, 1/4). Meme logits 0: q_g = (1/2, 1/2).
    # CE moves logits by q - e_0, and KL(t || q) by q - t, both times eta.
    OWN, MEME = [[LN3, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]

    @pytest.mark.parametrize(
        ("alpha", "beta", "own", "meme"),
        [
            (1.0, 1.0, -1 / 4, -1 / 2),  # labels alone: 3/4 - 1, 1/2 - 1
            (0.0, 0.0, 1 / 4, -1 / 4),  # teachers alone: 3/4 - 1/2, 1/2 - 3/4
            (0.5, 0.5, 0.0, -3 / 8),
            (0.8, 0.25, -3 / 20, -5 / 16),  # -0.8/4 + 0.2/4; -1/8 - 3/16
        ],
    )
    def test_by_hand(self, alpha, beta, own, meme):
        client = pair(self.OWN, self.MEME)
        loss = FML(label_weight=alpha, meme_label_weight=beta).step(client, batch_of(client))
        assert loss.item() == pytest.approx(math.log(4 / 3)), "the private model's task loss is logged"
        for model, start, error in ((client.model, LN3, own), (client.state.shared, 0.0, meme)):
            assert model.head.bias.tolist() == pytest.approx([-error, error], abs=1e-7)
            expected = [start - error, error, error, -error]
            assert model.head.weight.flatten().tolist() == pytest.approx(expected, abs=1e-6)

    def test_equal_models_teach_nothing(self):
        """KL = 0, and so is its gradient, but for the rounding of q - q."""
        client = pair(self.OWN, self.OWN)
        before = {name: value.clone() for name, value in client.tensors().items()}
        FML(label_weight=0.0, meme_label_weight=0.0).step(client, batch_of(client))
        for name, value in client.tensors().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=1e-7)

    def test_the_mean_over_samples_and_the_sum_over_classes(self):
        """The same batch twice is the same step."""
        once, twice = pair(self.OWN, self.MEME), pair(self.OWN, self.MEME, ((1, -1), (1, -1)), (0, 0))
        for client in (once, twice):
            FML().step(client, batch_of(client))
        for name, value in once.tensors().items():
            torch.testing.assert_close(value, twice.tensors()[name])

    def test_a_loss_reaches_its_own_model_alone(self):
        """dL_p / d theta_g = 0: whatever the meme model is worth to the private one, it does not move for it."""
        client = pair(self.OWN, self.MEME)
        FML(label_weight=0.0, meme_label_weight=1.0).step(client, batch_of(client))
        alone = pair(self.OWN, self.MEME)
        FML(label_weight=1.0, meme_label_weight=1.0).step(alone, batch_of(alone))
        assert equal(dict(client.state.shared.state_dict()), dict(alone.state.shared.state_dict()))
        assert not equal(dict(client.model.state_dict()), dict(alone.model.state_dict()))


class TestServer:
    def test_each_client_counts_once_and_buffers_too(self):
        """(0 + 4) / 2 = 2, whoever has more samples."""
        net = partial(nn.Sequential, nn.Linear(1, 2), nn.BatchNorm1d(2))
        server = server_of(task_of(2, 2), {0: 1, 1: 99})
        server.state.shared = net()
        uploads = {k: Message({n: torch.full_like(v, 4 * k) for n, v in net().state_dict().items()}) for k in (0, 1)}
        FML().aggregate(server, uploads)
        found = server.state.shared.state_dict()
        assert all((found[name] == 2).all() for name in found if name != "1.num_batches_tracked")
        assert found["1.num_batches_tracked"] == 4

    def test_everyone_begins_with_the_server_s(self):
        federation = federation_of(assemble_tiny("fml"))
        shared = dict(federation.server.state.shared.state_dict())
        for k in range(4):
            assert equal(dict(federation.engine.host.client(k).state.shared.state_dict()), shared)


class TestNobodyTeaches:
    """alpha = beta = 1."""

    @pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.001}], ids=["sgd", "momentum"])
    def test_private_models_train_alone(self, settings):
        settings |= {"rounds": 2, "lr": 0.05}
        mutual = federation_of(assemble_tiny("fml", label_weight=1.0, meme_label_weight=1.0, **settings))
        alone = federation_of(assemble_tiny("local", **settings))
        results = run_through(mutual), run_through(alone)
        for k in range(4):
            models = [dict(one.engine.host.client(k).model.state_dict()) for one in (mutual, alone)]
            assert equal(*models)
        assert [r["loss"] for r in results[0].history] == [r["loss"] for r in results[1].history]

    @pytest.mark.parametrize("aux", ["cnn-16", "cnn-16-32"])
    def test_the_meme_model_is_fedavg_of_equal_clients(self, aux):
        settings = {"rounds": 2, "partition": "iid", "lr": 0.05}
        mutual = federation_of(assemble_tiny("fml", aux_model=aux, label_weight=1.0, meme_label_weight=1.0, **settings))
        averaging = federation_of(assemble_tiny("fedavg", models=aux, width=64, **settings))
        averaging.server.state.shared.load_state_dict(mutual.server.state.shared.state_dict())
        counts = {card.samples for card in averaging.server.cards.values()}
        assert len(counts) == 1, "so that uniform and weighted means are one"
        run_through(mutual)
        run_through(averaging)
        one, other = mutual.server.state.shared.state_dict(), averaging.server.state.shared.state_dict()
        assert equal(dict(one), dict(other))


METHODS = pytest.mark.parametrize("method", ["fml", "fedkd", "fedmrl", "fedapen"])


class TestSmallest:
    """Unless one is named, all share the smallest model of the federation.

    On digits with K = 64: mlp-64 has 65 * 64 + 65 * 10 = 4,810 parameters, cnn-16-32 13,802 and cnn-16 17,258.
    """

    @METHODS
    @pytest.mark.parametrize(
        ("models", "expected"),
        [
            ("small", "mlp-64"),
            ("cnn-16,cnn-16-32", "cnn-16-32"),
            ("cnn-16", "cnn-16"),
            ("mlp-64,test_fml.narrow", "test_fml.narrow"),  # 65 * 32 + 650
            ("test_fml.twin,mlp-64", "test_fml.twin"),  # of equal ones that of the first client
            ("mlp-64,test_fml.twin", "mlp-64"),
        ],
    )
    def test_it_is_that_of_the_clients(self, method, models, expected):
        parts = assemble_tiny(method, models=models)
        assert parts.method.aux_model == expected
        (warning,) = parts.warnings
        assert_facts(warning, "--aux-model", method, expected)
        named = assemble_tiny(method, models=models, aux_model=expected)
        assert named.warnings == []
        assert bytes_per_round(named) == bytes_per_round(parts)
        assert parts.method == named.method

    def test_whoever_holds_it(self):
        """Client 3 has it, and all share it."""
        federation = federation_of(assemble_tiny("fml", models="cnn-16,cnn-16,cnn-16,mlp-64"))
        for k in range(4):
            assert sum(p.numel() for p in federation.engine.host.client(k).state.shared.parameters()) == 4810

    def test_it_depends_on_the_task(self):
        """3 x 32 x 32 pixels: the perceptron alone has 3,073 * 64 weights in its first layer."""
        parts = assemble_tiny("fml")
        larger = replace(parts.task, input=Input("image", (3, 32, 32)))
        assert larger.smallest(("mlp-64", "cnn-16", "cnn-16-32")) == "cnn-16-32"

    @METHODS
    def test_a_run_says_it_and_is_the_run_with_that_name(self, method):
        own, named = run_tiny(method), run_tiny(method, aux_model="mlp-64")
        assert [r["loss"] for r in own.history] == [r["loss"] for r in named.history]
        assert own.bytes == named.bytes
        assert [text for text in own.warnings if "--aux-model" in text and "mlp-64" in text]

    def test_nobody_builds_what_nobody_chose(self):
        with refused(MissingSettingError, "--aux-model"):
            FML().auxiliary(task_of(2, 2))


class TestRun:
    def test_traffic_is_what_the_sheet_says(self):
        """P numbers each way, whatever the clients' own models are."""
        result = run_tiny("fml", aux_model="cnn-16-32")
        sizes = {n: v.nbytes for n, v in assemble_tiny("fml").task.build("cnn-16-32").state_dict().items()}
        for way in ("up", "down"):
            by_tensor = result.ledger.by("tensor", way)
            del by_tensor["(header)"]
            assert by_tensor == {name: 2 * 4 * size for name, size in sizes.items()}

    def test_widths_of_their_own(self):
        assert run_tiny("fml", models="mlp-64,test_fml.narrow", projector="none", rounds=1).accuracy is not None


def narrow(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32))


def twin(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU())


def ready(shape) -> TwoPartModel:
    return TwoPartModel(narrow(shape), nn.Linear(32, 10), 32)


class TestRefusals:
    @pytest.mark.parametrize("name", ["label_weight", "meme_label_weight"])
    @pytest.mark.parametrize("value", [-0.1, 1.5])
    def test_shares(self, name, value):
        with refused(RangeError, f"--{name.replace('_', '-')}", 0, 1):
            assemble_tiny("fml", **{name: value})

    @pytest.mark.parametrize(
        ("aux", "kind", "facts"),
        [
            ("cnn-17", UnknownNameError, ("'cnn-17'",)),
            ("cnn4", MismatchError, ("'cnn4'", "1x8x8", "--image-size 32")),
            ("test_fml.ready", MismatchError, ("'test_fml.ready'", "width 32")),
        ],
    )
    @METHODS
    def test_a_model_that_cannot_be_built(self, method, aux, kind, facts):
        with refused(kind, "--aux-model", *facts):
            assemble_tiny(method, aux_model=aux)
