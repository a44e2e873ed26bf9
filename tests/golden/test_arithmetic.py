"""Settings that change how clients compute: learning rates that decay, precision, memory layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pluribus
from conftest import assemble_tiny, make_host, run_tiny
from pluribus.client import Batch, Client
from pluribus.errors import RangeError, UnknownNameError
from pluribus.optim import Rule
from pluribus.storage.checkpoint import Checkpoint
from refusals import refused


class TestLearningRate:
    def test_by_hand(self):
        assert [Rule(lr=0.8, decay=0.5).rate(t) for t in range(3)] == [0.8, 0.4, 0.2]
        assert Rule(lr=0.3).rate(1000) == 0.3

    def test_a_step_in_round_t_uses_the_rate_of_round_t(self):
        client = make_host(assemble_tiny("local", models="mlp-64", lr=0.8, lr_decay=0.5)).client(0)
        x, y = client.data["train"].take(torch.arange(8))
        for t in (0, 1, 3):
            client.begin(t, 0, {})
            assert client.now["lr"].item() == 0.8 * 0.5**t
            before = client.model.head.bias.detach().clone()
            grad = torch.autograd.grad(F.cross_entropy(client.model(x), y), client.model.head.bias)[0]
            client.descend(F.cross_entropy(client.model(x), y))
            torch.testing.assert_close(client.model.head.bias, before - 0.8 * 0.5**t * grad)

    def test_fedl2g_looks_ahead_by_the_rate_of_the_round(self):
        """Its gradient has the rate as a factor, and depends on it a little besides."""
        method = assemble_tiny("fedl2g-l", lr=1e-5, lr_decay=0.5, warmup=0)
        client = make_host(method).client(0)
        found = []
        for t in (0, 1):
            client.begin(t, 0, {})
            data = client.data["study"]
            batch = Batch(*data.take(torch.arange(6)), torch.arange(6), 6)
            method.method.guide_step(client, batch)
            found.append(client.state.gradient.clone())
        largest = found[0].abs().max().item()
        assert largest > 0
        torch.testing.assert_close(found[1], found[0] / 2, rtol=0, atol=1e-4 * largest)

    def test_a_run_without_decay_is_as_ever(self):
        one, other = run_tiny("local"), run_tiny("local", lr_decay=0.5)
        assert one.history[0]["loss"] == other.history[0]["loss"]
        assert one.history[1]["loss"] != other.history[1]["loss"]

    @pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
    def test_nonsense_is_refused(self, value):
        with refused(RangeError, "--lr-decay", value):
            run_tiny("local", lr_decay=value)


class TestLayout:
    def test_channels_last_trains_alike(self):
        settings = {"models": "cnn-16-32,cnn-16", "rounds": 1}
        plain, last = (run_tiny("fedgh", channels_last=value, **settings) for value in (False, True))
        assert last.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-4)
        assert last.history[0]["bytes"] == plain.history[0]["bytes"]
        one, other = (Checkpoint(result.folder / "state").client(0) for result in (plain, last))
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name].is_contiguous()
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)

    def test_images_and_filters_lie_so(self):
        client = make_host(assemble_tiny("local", models="cnn-16-32", channels_last=True)).client(0)
        x, _ = client.data["train"].take(torch.arange(2))
        assert x.is_contiguous(memory_format=torch.channels_last)
        weights = client.model.features.backbone.conv2.weight
        assert weights.is_contiguous(memory_format=torch.channels_last)
        assert not weights.is_contiguous()

    def test_a_cpu_keeps_torchs_layout_unless_asked(self):
        client = make_host(assemble_tiny("local", models="cnn-16-32")).client(0)
        assert client.model.features.backbone.conv2.weight.is_contiguous()


class TestPrecision:
    def test_bfloat16_is_for_the_arithmetic_not_for_what_is_kept(self):
        plain, half = (run_tiny("fedgh", precision=name, rounds=1) for name in ("float32", "bfloat16"))
        assert half.history[0]["loss"] != plain.history[0]["loss"]
        assert half.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=0.05)
        state = Checkpoint(half.folder / "state").client(0)
        assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}

    def test_sweeps_too(self):
        client = make_host(assemble_tiny("local", precision="bfloat16")).client(0)
        features = client.sweep(Client.features)
        assert features.dtype == torch.float32
        assert torch.equal(features, features.bfloat16().float())

    def test_float32_means_float32_and_leaves_torch_as_it_was(self):
        seen = {}

        class Watch:
            def start(self, federation):
                pass

            def round(self, record, ledger):
                seen[name] = torch.backends.cudnn.allow_tf32

            def finish(self, result):
                pass

        before = torch.backends.cudnn.allow_tf32
        for name in ("tf32", "float32"):
            run_tiny("local", precision=name, rounds=1, observers=[Watch()])
        assert seen == {"tf32": True, "float32": False}
        assert torch.backends.cudnn.allow_tf32 == before

    def test_an_unknown_one_is_refused(self):
        with refused(UnknownNameError, "--precision", "tf32", "float32", "bfloat16", "fp8"):
            pluribus.run("local", precision="fp8")
