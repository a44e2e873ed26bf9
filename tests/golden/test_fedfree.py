"""FedFree, by hand from Eq. 2 to 7 of the paper, and the promises of its page."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pluribus
from conftest import assemble_tiny, make_host, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same, differing, kept
from parties import copies, equal, server_of, task_of
from pluribus.client import Client
from pluribus.errors import MismatchError, RangeError, UnknownNameError
from pluribus.federation import Federation
from pluribus.message import Message
from pluribus.methods import _layerwise as layerwise
from pluribus.methods._layerwise import (
    Weights,
    average,
    change,
    dense,
    entropy,
    gaussian_probe,
    imitate,
    layers,
    match,
    overlap,
    probe_loss,
    project,
    same_kind,
    undense,
    weights_of,
)
from pluribus.methods.fedfree import FedFree
from pluribus.models.layers import Layer
from pluribus.request import Work
from pluribus.storage.folder import RunFolder
from refusals import refused

SMALL = ("mlp-64", "cnn-16", "mlp-128-64", "cnn-16-32")
MODES = ("block_retain", "flat_retain", "flat_zero")


def t(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind: str, *shape: int, output: bool = False, groups: int = 1, bias: bool = True) -> Layer:
    return Layer("any", kind, shape, shape[:1] if bias else None, output, groups)


def rough(method="fedfree", **settings):
    """A tiny run; `settings` win."""
    return run_tiny(method, **{"batch_size": 40, **settings})


# ---- Eq. 2 -----------------------------------------------------------------------------------------------------------


class TestScore:
    def test_by_hand(self):
        """Before (3, 4 | 0), now (3, 3 | 2): (1 + 4) / 25."""
        assert change(t(3, 3, 2.0), t(3, 4, 0.0)).item() == pytest.approx(0.2)

    def test_weight_and_bias_count_together(self):
        assert Weights(t([1.0, 2.0]), t(3.0)).flat().tolist() == [1, 2, 3]
        assert Weights(t([1.0, 2.0])).flat().tolist() == [1, 2]

    @pytest.mark.parametrize("factor", [0.25, 8.0])
    def test_common_scale_does_not_matter(self, factor):
        now, before = noise(50), noise(50, seed=1)
        assert torch.equal(change(now * factor, before * factor), change(now, before))

    def test_a_layer_that_was_zero(self):
        assert change(torch.ones(2), torch.zeros(2)).item() == pytest.approx(2e12)
        assert change(torch.zeros(2), torch.zeros(2)).item() == 0


# ---- which layers correspond -----------------------------------------------------------------------------------------

GLOBAL = (
    layer("conv", 32, 1, 5, 5),
    layer("conv", 64, 32, 5, 5),
    layer("linear", 1500, 64),
    layer("linear", 500, 1500),
    layer("linear", 10, 500, output=True),
)
CONV, LINEAR = layer("conv", 4, 4, 3, 3), layer("linear", 4, 4)
OUTPUT = layer("linear", 10, 4, output=True)


class TestMatching:
    def test_convolutions_by_relative_depth(self):
        """Four: 1/8, 3/8 | 5/8, 7/8 against 1/4 and 3/4."""
        assert match([CONV] * 4, GLOBAL) == {0: 0, 1: 0, 2: 1, 3: 1}

    def test_on_a_tie_the_shallower(self):
        """Three: 1/6, 1/2, 5/6; the middle one is as near to 1/4 as to 3/4."""
        assert match([CONV] * 3, GLOBAL) == {0: 0, 1: 0, 2: 1}
        assert match([CONV], GLOBAL) == {0: 0}

    def test_depth_counts_within_the_kind(self):
        norm = layer("norm", 4)
        assert match([CONV, norm, norm, norm, CONV, norm], GLOBAL) == {0: 0, 4: 1}

    def test_output_goes_with_output_only(self):
        """The last hidden of six linear layers, at 9/12, is nearer to the global output at 5/6 than to 3/6."""
        assert match([LINEAR] * 5 + [OUTPUT], GLOBAL) == {0: 2, 1: 2, 2: 3, 3: 3, 4: 3, 5: 4}

    def test_without_a_counterpart(self):
        assert match([layer("norm", 4), layer("dwconv", 4, 1, 3, 3)], GLOBAL) == {}
        assert match([LINEAR], [OUTPUT]) == match([OUTPUT], [LINEAR]) == {}

    def test_the_small_group(self):
        task = task_of(10, 64, shape=(1, 16, 16))
        theirs = layers(task, "fedfree-cnn")
        short = {
            model: {
                layers(task, model)[at].name.rpartition(".")[2]: theirs[j].name.rpartition(".")[2]
                for at, j in match(layers(task, model), theirs).items()
            }
            for model in SMALL
        }
        assert short == {
            "mlp-64": {"fc1": "fc1", "head": "head"},  # 1/4 among 1/6, 3/6
            "cnn-16": {"conv1": "conv1", "fc1": "fc1", "head": "head"},  # 1/2 between 1/4 and 3/4
            "mlp-128-64": {"fc1": "fc1", "fc2": "fc2", "head": "head"},
            "cnn-16-32": {"conv1": "conv1", "conv2": "conv2", "fc1": "fc1", "head": "head"},
        }

    @pytest.mark.parametrize(
        ("model", "shape", "convolutions", "median", "output"),
        [("cnn-16-32", (1, 16, 16), 2, 1.0, 1.0), ("resnet18", (3, 32, 32), 20, 0.0200, 0.9766)],
    )
    def test_how_much_of_a_layer_a_global_one_covers(self, model, shape, convolutions, median, output):
        """The table of the page. Half of a ResNet-18's layers: at most 64 x 32 of n x m channels, all of 3 x 3 taps."""
        task = task_of(10, 64 if model == "cnn-16-32" else None, shape=shape)
        mine, theirs = layers(task, model), layers(task, "fedfree-cnn")
        covered = {"conv": [], "output": []}
        for at, j in match(mine, theirs).items():
            one, other = mine[at].weight, theirs[j].weight
            common = math.prod(map(min, one, other)) / math.prod(one)
            if mine[at].output or mine[at].kind == "conv":
                covered["output" if mine[at].output else "conv"].append(common)
        assert len(covered["conv"]) == convolutions
        assert statistics.median(covered["conv"]) == pytest.approx(median, abs=0.0005)
        assert covered["output"] == pytest.approx([output], abs=0.0005)

    def test_what_may_replace_what(self):
        """All of the kind; the logits' layer is replaced by a logits' layer alone."""
        assert same_kind(LINEAR, GLOBAL) == [2, 3, 4]
        assert same_kind(OUTPUT, GLOBAL) == [4]
        assert same_kind(CONV, GLOBAL) == [0, 1]
        assert same_kind(layer("norm", 4), GLOBAL) == []

    def test_layers_are_traced_once(self, monkeypatch):
        task = task_of(10, 64, shape=(1, 16, 16), seed=5)
        layers(task, "mlp-64")
        monkeypatch.setattr("pluribus.task.layers_of", None)
        assert layers(task, "mlp-64")[-1].output


# ---- Eq. 3 to 5 ------------------------------------------------------------------------------------------------------


class TestProbe:
    def test_linear_layers_of_unequal_shapes(self):
        """One output and two inputs in common: 1 + 2 + 1 against 1, then 1 + 1 against 1: (9 + 1) / 2."""
        own = Weights(t([1.0, 2.0], [3.0, 4.0]), t(1.0, 7.0))
        other = Weights(t([1.0, 0.0, 5.0]))
        assert probe_loss("linear", own, [other], t([1.0, 1.0], [1.0, 0.0])).item() == 5

    def test_inputs_beyond_the_smaller_layer_are_zero(self):
        own, other = Weights(t([1.0, 2.0])), Weights(t([[3.0]]).view(1, 1))
        assert probe_loss("linear", own, [other], t([2.0, 100.0])).item() == 16

    def test_mean_over_the_uploads(self):
        own = Weights(t([0.0]), t(0.0))
        loss = probe_loss("linear", own, [Weights(t([1.0])), Weights(t([0.0]), t(3.0))], t([1.0]))
        assert loss.item() == (1 + 9) / 2

    def test_summed_over_outputs(self):
        assert probe_loss("linear", Weights(torch.zeros(3, 1)), [Weights(torch.ones(3, 1))], t([2.0])).item() == 12

    def test_convolutions_with_kernels_of_unequal_size(self):
        """1x1 kernel 2 in the middle of 3x3; the other is 1 in the middle and 3 right of it. Patch 0..8, its middle 4.

        2 * 4 + bias 1 = 9 against 1 * 4 + 3 * 5 = 19.
        """
        other = torch.zeros(1, 1, 3, 3)
        other[0, 0, 1, 1], other[0, 0, 1, 2] = 1, 3
        patch = torch.arange(9.0).view(1, 1, 3, 3)
        assert probe_loss("conv", Weights(torch.full((1, 1, 1, 1), 2.0), t(1.0)), [Weights(other)], patch).item() == 100

    def test_a_convolution_answers_as_torch_does(self):
        own, other = Weights(noise(4, 3, 3, 3), noise(4)), Weights(noise(2, 5, 5, 5, seed=1), noise(2, seed=2))
        x = noise(7, 3, 5, 5, seed=3)
        inner = F.conv2d(x[:, :, 1:4, 1:4], own.weight, own.bias)[:, :2]
        outer = F.conv2d(x, other.weight[:, :3], other.bias)
        expected = (inner - outer).square().sum((1, 2, 3)).mean()
        torch.testing.assert_close(probe_loss("conv", own, [other], x), expected)

    def test_depthwise_channels_see_themselves_alone(self):
        """Channels 2 and 3 against 1 (the other has one channel): patch 5 -> (10 - 5)^2; channel 1 is not compared."""
        own, other = Weights(t(2.0, 3.0).view(2, 1, 1, 1)), Weights(t(1.0).view(1, 1, 1, 1))
        assert probe_loss("dwconv", own, [other], t(5.0, 7.0).view(1, 2, 1, 1)).item() == 25
        wide = Weights(noise(4, 1, 3, 3), noise(4))
        x = noise(6, 4, 3, 3, seed=1)
        answer = F.conv2d(x, wide.weight, wide.bias, groups=4).flatten(1)
        zero = Weights(torch.zeros(4, 1, 1, 1))
        torch.testing.assert_close(probe_loss("dwconv", wide, [zero], x), answer.square().sum(1).mean())

    def test_norms_scale_and_shift(self):
        """(2 * 3 + 1 - 3)^2 + nothing for the second channel, which the other lacks."""
        assert probe_loss("norm", Weights(t(2.0, 9.0), t(1.0, 9.0)), [Weights(t(1.0))], t([3.0, 5.0])).item() == 16

    @pytest.mark.parametrize(
        ("kind", "own", "other"),
        [
            ("linear", (6, 40), (9, 30)),
            ("conv", (6, 5, 3, 3), (4, 7, 5, 5)),
            ("dwconv", (8, 1, 3, 3), (6, 1, 5, 5)),
            ("norm", (40,), (30,)),
        ],
    )
    def test_in_expectation_it_is_the_distance_of_the_weights(self, kind, own, other):
        """||Delta W||^2 + ||Delta b||^2 on what both have, kernels embedded in the larger one."""
        mine, theirs = (
            Weights(noise(*own), noise(own[0], seed=1)),
            Weights(noise(*other, seed=2), noise(other[0], seed=3)),
        )
        draw = torch.Generator().manual_seed(4)
        x = gaussian_probe(kind, mine, [theirs], 4096, draw)
        o, i = min(own[0], other[0]), min(own[1:2] + other[1:2] + (10**9,))
        a, b = (w.weight[:o] if len(own) == 1 else w.weight[:o, :i] for w in (mine, theirs))
        a = F.pad(a, (1, 1, 1, 1)) if len(own) == 4 else a
        expected = (a - b).square().sum() + (mine.bias[:o] - theirs.bias[:o]).square().sum()
        assert probe_loss(kind, mine, [theirs], x).item() == pytest.approx(expected.item(), rel=0.02)

    def test_patches_fit_the_largest_kernel(self):
        own, other = Weights(torch.zeros(8, 3, 1, 5)), Weights(torch.zeros(2, 9, 3, 3))
        x = gaussian_probe("conv", own, [other], 10, torch.Generator())
        assert x.shape == (10, 3, 3, 5)
        depthwise, norm, linear = (Weights(torch.zeros(shape)) for shape in ((8, 1, 3, 3), (8,), (8, 3)))
        assert gaussian_probe("dwconv", depthwise, [depthwise], 10, torch.Generator()).shape == (10, 8, 3, 3)
        assert gaussian_probe("norm", norm, [norm], 10, torch.Generator()).shape == (10, 8)
        x = gaussian_probe("linear", linear, [linear], 5000, torch.Generator().manual_seed(0))
        assert x.mean().item() == pytest.approx(0, abs=0.03)
        assert x.var().item() == pytest.approx(1, abs=0.03)


class TestServerStep:
    def test_by_hand(self):
        """x = 1, -1: dw = 2 (1 - 3) = -4, db = 2 (0 - 1) = -2; alpha 0.1. Again: dw = -3.2, db = -1.6."""
        own, other, x = Weights(t([1.0]), t(0.0)), Weights(t([3.0]), t(1.0)), t([1.0], [-1.0])
        once = imitate("linear", own, [other], x, 0.1, 1)
        assert once.flat().tolist() == pytest.approx([1.4, 0.2])
        twice = imitate("linear", own, [other], x, 0.1, 2)
        assert twice.flat().tolist() == pytest.approx([1.72, 0.36])
        assert own.flat().tolist() == [1, 0]

    def test_without_a_bias(self):
        """w = 1 against 3 at x = 1: dw = -4."""
        after = imitate("linear", Weights(t([1.0])), [Weights(t([3.0]))], t([1.0]), 0.25, 1)
        assert after.weight.tolist() == [[2]]
        assert after.bias is None

    @pytest.mark.parametrize("kind", ["linear", "conv", "dwconv", "norm"])
    def test_only_what_overlaps_moves(self, kind):
        shapes = {"linear": ((5, 6), (3, 4)), "conv": ((5, 6, 3, 3), (3, 4, 3, 3))}
        shapes |= {"dwconv": ((5, 1, 3, 3), (3, 1, 3, 3)), "norm": ((5,), (3,))}
        large, small = shapes[kind]
        own, other = Weights(noise(*large), noise(5)), Weights(noise(*small, seed=1), noise(3, seed=1))
        after = imitate(kind, own, [other], gaussian_probe(kind, own, [other], 64, torch.Generator()), 0.01, 3)
        moved = after.weight != own.weight
        assert overlap(moved, other.weight)[0].all()
        assert moved.sum() == other.weight.numel()
        assert (after.bias != own.bias).tolist() == [True, True, True, False, False]

    def test_equal_layers_do_not_move(self):
        for kind, shape in (("linear", (5, 6)), ("conv", (5, 6, 3, 3)), ("dwconv", (5, 1, 3, 3)), ("norm", (5,))):
            own = Weights(noise(*shape), noise(5))
            x = gaussian_probe(kind, own, [own], 64, torch.Generator())
            assert torch.equal(imitate(kind, own, [own, own], x, 0.5, 2).flat(), own.flat())

    def test_a_step_is_a_moving_average_of_rate_two_alpha(self):
        """alpha = 0.01 leaves 98 % of the distance; alpha = 1/2 is the mean of the uploads."""
        own = Weights(noise(4, 8), noise(4))
        others = [Weights(noise(4, 8, seed=s), noise(4, seed=s)) for s in (1, 2, 3)]
        mean = torch.stack([other.flat() for other in others]).mean(0)
        x = gaussian_probe("linear", own, others, 200_000, torch.Generator().manual_seed(0))
        slow = imitate("linear", own, others, x, 0.01, 1).flat()
        torch.testing.assert_close(slow, own.flat() + 0.02 * (mean - own.flat()), rtol=0, atol=1e-3)
        torch.testing.assert_close(imitate("linear", own, others, x, 0.5, 1).flat(), mean, rtol=0, atol=0.03)

    def test_layers_of_one_shape_are_answered_once(self):
        """Their mean pulls as they do: the step is that of the loss over all of them."""
        own = Weights(noise(4, 6), noise(4))
        others = [Weights(noise(4, 6, seed=s), noise(4, seed=s)) for s in (1, 2)]
        others += [Weights(noise(3, 5, seed=3), noise(3, seed=3)), Weights(noise(4, 6, seed=4))]
        x = gaussian_probe("linear", own, others, 50, torch.Generator().manual_seed(0))
        parts = [part.clone().requires_grad_() for part in own]
        grads = torch.autograd.grad(probe_loss("linear", Weights(*parts), others, x), parts)
        expected = torch.cat([(part - 0.1 * grad).flatten() for part, grad in zip(own, grads, strict=True)])
        torch.testing.assert_close(imitate("linear", own, others, x, 0.1, 1).flat(), expected)

    @pytest.mark.parametrize(("kind", "shape"), [("linear", (10, 400)), ("conv", (10, 16, 5, 5))])
    def test_a_step_of_the_defaults_converges(self, kind, shape):
        """With d inputs and 4 d probes, of the squared distance 1 - 4 a + 4 a^2 (1 + d / 4 d) = 0.2 is left."""
        own, other = Weights(noise(*shape)), Weights(noise(*shape, seed=1))
        x = gaussian_probe(kind, own, [other], None, torch.Generator().manual_seed(9))
        assert len(x) == 1600
        after = imitate(kind, own, [other], x, FedFree.server_lr, 1)
        left = (after.weight - other.weight).square().sum() / (own.weight - other.weight).square().sum()
        assert left.item() == pytest.approx(0.2, abs=0.02)

    @pytest.mark.parametrize(
        ("lr", "steps", "seen", "probes"), [(0.5, 1, 400, 256), (0.4, 9, 64, 64), (0.09, 9, 400, 64)]
    )
    def test_what_does_not_settle_grows(self, lr, steps, seen, probes):
        """One step in the mean over probes, several along the worst direction of one probe."""
        assert not layerwise.settles(lr, steps, seen, probes)
        assert layerwise.settles(lr / 4, steps, seen, probes)
        own, other = Weights(noise(1, seen)), Weights(torch.zeros(1, seen))
        growth = []
        for seed in range(9):
            x = gaussian_probe("linear", own, [other], probes, torch.Generator().manual_seed(seed))
            start = Weights(torch.linalg.svd(x).Vh[:1]) if steps > 1 else own
            after = [imitate("linear", start, [other], x, rate, steps) for rate in (lr, lr / 4)]
            growth.append([(one.weight.norm() / start.weight.norm()).square() for one in after])
        large, small = torch.tensor(growth).mean(0)
        assert large > 1 > small

    def test_average_by_hand(self):
        """Entries of both uploads, of one, of none."""
        own = Weights(t([0.0, 0.0], [7.0, 8.0]), t(0.0, 9.0))
        after = average(own, [Weights(t([2.0, 4.0]), t(6.0)), Weights(t([[4.0]]).view(1, 1))])
        assert after.weight.tolist() == [[3, 4], [7, 8]]
        assert after.bias.tolist() == [6, 9]

    def test_average_of_kernels_is_centred(self):
        own, small = Weights(torch.zeros(1, 1, 3, 3)), Weights(torch.full((1, 1, 1, 1), 5.0))
        after = average(own, [small]).weight
        assert after[0, 0].tolist() == [[0, 0, 0], [0, 5, 0], [0, 0, 0]]


# ---- Eq. 6 -----------------------------------------------------------------------------------------------------------


class TestEntropy:
    def test_by_hand(self):
        """p = 3/4, 1/4: -3/4 log2 3/4 + 1/2 = 0.8112781; 1 - 10/16; (1 - 28/64) / 2; -log2 10/16 = 0.6780719."""
        weight = t(0.0, 0.0, 0.0, 1.0)
        assert entropy(weight, "shannon") == pytest.approx(0.8112781)
        assert entropy(weight, "tsallis") == pytest.approx(0.375)
        assert entropy(weight, "tsallis", q=3.0) == pytest.approx(0.28125)
        assert entropy(weight, "collision") == pytest.approx(0.6780719)

    def test_equal_bins(self):
        weight = torch.arange(256.0).repeat(3).view(16, 48)
        assert entropy(weight) == 8
        assert entropy(weight, "collision") == 8
        assert entropy(weight, "tsallis") == pytest.approx(255 / 256)
        assert entropy(weight, bins=4) == 2

    @pytest.mark.parametrize("measure", ["shannon", "tsallis", "collision"])
    def test_a_constant_has_none(self, measure):
        for value in (0.0, 3.0, -2.5):
            assert math.copysign(1, found := entropy(torch.full((5, 5), value), measure)) == 1
            assert found == 0

    def test_bounds(self):
        for size in (2, 30, 5000):
            for seed in range(3):
                assert 0 <= entropy(noise(size, seed=seed)) <= math.log2(min(256, size)) + 1e-12

    def test_scale_and_place_do_not_matter(self):
        weight = noise(3000)
        assert entropy(weight * 4) == entropy(weight)
        assert entropy(-weight * 0.3 + 5) == pytest.approx(entropy(weight), abs=0.01)

    def test_an_untrained_layer_beats_a_peaked_one(self):
        """The uniform start of a layer has nearly 8 bits, a Gaussian about 7: entropy favors what was not trained."""
        draw = torch.Generator().manual_seed(0)
        assert entropy(torch.rand(50_000, generator=draw)) > 7.99
        assert entropy(torch.randn(50_000, generator=draw)) < 7.4

    def test_tsallis_of_order_two_and_collision_agree_on_every_sign(self):
        found = [noise(400, seed=s) ** (1 + s % 3) for s in range(8)]
        for a in found:
            for b in found:
                signs = [entropy(a, m) - entropy(b, m) > 0 for m in ("tsallis", "collision")]
                assert signs[0] == signs[1]


# ---- Eq. 7 -----------------------------------------------------------------------------------------------------------

TWO, THREE = layer("linear", 2, 2), layer("linear", 3, 3)
SMALL_ONE = Weights(t([1.0, 2.0], [3.0, 4.0]), t(5.0, 6.0))
LARGE_ONE = Weights(t([10.0, 20.0, 30.0], [40.0, 50.0, 60.0], [70.0, 80.0, 90.0]), t(1.5, 2.5, 3.5))


class TestProjection:
    @pytest.mark.parametrize(
        ("mode", "weight", "bias"),
        [
            ("block_retain", [[1, 2, 30], [3, 4, 60], [70, 80, 90]], [5, 6, 3.5]),
            ("flat_retain", [[1, 2, 3], [4, 50, 60], [70, 80, 90]], [5, 6, 3.5]),
            ("flat_zero", [[1, 2, 3], [4, 0, 0], [0, 0, 0]], [5, 6, 0]),
        ],
    )
    def test_a_small_layer_into_a_large_one(self, mode, weight, bias):
        found = project(LARGE_ONE, THREE, SMALL_ONE, TWO, mode)
        assert found.weight.tolist() == weight
        assert found.bias.tolist() == bias
        assert LARGE_ONE.weight[0, 0] == 10

    @pytest.mark.parametrize(
        ("mode", "weight"),
        [
            ("block_retain", [[10, 20], [40, 50]]),
            ("flat_retain", [[10, 20], [30, 40]]),
            ("flat_zero", [[10, 20], [30, 40]]),
        ],
    )
    def test_a_large_layer_into_a_small_one(self, mode, weight):
        found = project(SMALL_ONE, TWO, LARGE_ONE, THREE, mode)
        assert found.weight.tolist() == weight
        assert found.bias.tolist() == [1.5, 2.5]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("kind", ["linear", "conv", "dwconv", "norm"])
    def test_equal_shapes_are_replaced_wholly(self, mode, kind):
        shape = {"linear": (3, 4), "conv": (3, 4, 5, 5), "dwconv": (3, 1, 3, 3), "norm": (3,)}[kind]
        own, given = Weights(noise(*shape), noise(3)), Weights(noise(*shape, seed=1), noise(3, seed=1))
        found = project(own, layer(kind, *shape), given, layer(kind, *shape), mode)
        assert torch.equal(found.flat(), given.flat())

    def test_kernels_are_centred(self):
        """Of 5x5 the inner 3x3; 3x3 into the middle of 5x5, whose rim stays."""
        five, three = layer("conv", 1, 1, 5, 5), layer("conv", 1, 1, 3, 3)
        large, small = Weights(torch.arange(25.0).view(1, 1, 5, 5), t(0.0)), Weights(-torch.ones(1, 1, 3, 3), t(1.0))
        cut = project(small, three, large, five, "block_retain").weight
        assert cut[0, 0].tolist() == [[6, 7, 8], [11, 12, 13], [16, 17, 18]]
        put = project(large, five, small, three, "block_retain").weight[0, 0]
        assert (put[1:4, 1:4] == -1).all()
        rim = torch.ones(5, 5, dtype=torch.bool)
        rim[1:4, 1:4] = False
        assert torch.equal(put[rim], large.weight[0, 0][rim])

    @pytest.mark.parametrize("mode", ["block_retain", "flat_retain"])
    def test_what_is_outside_stays_to_the_bit(self, mode):
        own, given = Weights(noise(6, 7, 3, 3), noise(6)), Weights(noise(4, 9, 5, 5, seed=1), noise(4, seed=1))
        found = project(own, layer("conv", 6, 7, 3, 3), given, layer("conv", 4, 9, 5, 5), mode)
        kept = (6 * 7 - 4 * 7) * 9 if mode == "block_retain" else 0  # the global layer has more numbers in all
        assert (found.weight == own.weight).sum() == kept
        assert torch.equal(found.bias[4:], own.bias[4:])
        assert torch.equal(found.bias[:4], given.bias)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_bias_that_one_side_lacks(self, mode):
        bare = layer("linear", 2, 2, bias=False)
        assert project(SMALL_ONE, TWO, Weights(torch.zeros(2, 2)), bare, mode).bias.tolist() == [5, 6]
        assert project(Weights(torch.zeros(2, 2)), bare, SMALL_ONE, TWO, mode).bias is None

    def test_grouped_convolutions_as_dense_ones(self):
        """Two groups of one input each: the dense weight is diagonal, and only the diagonal is taken back."""
        grouped = layer("conv", 2, 1, 1, 1, groups=2)
        own = Weights(t(5.0, 6.0).view(2, 1, 1, 1), t(0.0, 0.0))
        as_dense = dense(own, grouped).weight
        assert as_dense.view(2, 2).tolist() == [[5, 0], [0, 6]]
        assert torch.equal(undense(as_dense, grouped), own.weight)
        x = noise(3, 4, 1, 1)
        module = nn.Conv2d(4, 6, 1, groups=2, bias=False)
        same = dense(Weights(module.weight), layer("conv", 6, 2, 1, 1, groups=2)).weight
        torch.testing.assert_close(F.conv2d(x, same), module(x))
        given = Weights(t([1.0, 2.0], [3.0, 4.0]).view(2, 2, 1, 1), t(7.0, 8.0))
        found = project(own, grouped, given, layer("conv", 2, 2, 1, 1), "block_retain")
        assert found.flat().tolist() == [1, 4, 7, 8]

    def test_norms_of_any_shape_are_vectors(self):
        own = Weights(torch.zeros(2, 2), torch.zeros(2, 2))
        wide = Layer("any", "norm", (2, 2), (2, 2), False)
        found = project(own, wide, Weights(t(1.0, 2.0, 3.0), t(4.0, 5.0, 6.0)), layer("norm", 3), "block_retain")
        assert found.weight.tolist() == [[1, 2], [3, 0]]
        assert found.bias.tolist() == [[4, 5], [6, 0]]


# ---- the server's round ----------------------------------------------------------------------------------------------


class TestConvolutionsOverTime:
    """Those of signals have kernels of one dimension, and everything holds for them too."""

    def test_they_go_with_each_other_only(self):
        flat, wave = layer("conv", 4, 2, 3, 3), layer("conv", 4, 2, 3)
        assert match([flat, wave], [wave, flat]) == {0: 1, 1: 0}
        assert match([wave], [flat]) == {}
        assert same_kind(wave, [flat, wave, layer("conv", 8, 1, 5)]) == [1, 2]

    def test_kernels_of_unequal_size_are_centered(self):
        """A kernel of one is the middle of one of three: on (1, 2, 3) they give 2 * 10 and 1 + 4 + 9."""
        small, large = Weights(t([[[10.0]]])), Weights(t([[[1.0, 2.0, 3.0]]]))
        x = t([[[1.0, 2.0, 3.0]]])
        assert float(probe_loss("conv", small, [large], x)) == (20 - 14) ** 2
        found = project(large, layer("conv", 1, 1, 3, bias=False), small, layer("conv", 1, 1, 1), "block_retain")
        assert found.weight.tolist() == [[[1.0, 10.0, 3.0]]]

    def test_an_answer_is_that_of_torch(self):
        own, other, x = Weights(noise(4, 3, 5), noise(4)), Weights(torch.zeros(4, 3, 5), torch.zeros(4)), noise(6, 3, 5)
        answers = F.conv1d(x, own.weight, own.bias)[:, :, 0]
        torch.testing.assert_close(probe_loss("conv", own, [other], x), answers.square().sum(1).mean())

    def test_grouped_ones_as_dense_ones(self):
        of, x = layer("conv", 4, 2, 3, groups=2), noise(1, 4, 9)
        own = Weights(noise(4, 2, 3), noise(4))
        torch.testing.assert_close(
            F.conv1d(x, dense(own, of).weight, own.bias), F.conv1d(x, own.weight, own.bias, groups=2)
        )
        assert torch.equal(undense(dense(own, of).weight, of), own.weight)

    def test_the_default_global_model_is_the_client_model_with_most_layers(self):
        here = "pluribus.conformance.kinds"
        models = [f"{here}.signal_cnn", "cnn1d-3"]
        parts = assemble_tiny(
            "fedfree", data=f"{here}.few_signals", clients=2, models=",".join(models), image_size=None
        )
        assert parts.method.global_model == "cnn1d-3"
        assert any("--global-model" in note and "cnn1d-3" in note for note in parts.warnings)
        assert assemble_tiny("fedfree").method.global_model == "fedfree-cnn"


def two_layers(shape) -> nn.Module:
    """Two numbers in, a hidden layer of two, two features out."""
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 2))


NET = "test_fedfree.two_layers"
QUARTERS, HALVES, ONES = t([0.0, 1.0], [2.0, 3.0]), t([0.0, 0.0], [1.0, 1.0]), torch.ones(2, 2)  # 2, 1 and 0 bits


def server_with(method: FedFree, hidden: torch.Tensor, output: torch.Tensor):
    """A server of two clients, whose global model has these weights and biases of zero."""
    server = server_of(task_of(2, 2), {0: 1, 1: 1}, NET)
    method.setup(server)
    server.begin(0, {})
    for one, weight in zip(layers(server.task, NET), (hidden, output), strict=True):
        weights_of(server.state.model, one).copy_(torch.cat([weight.flatten(), torch.zeros(2)]))
    return server


def still(**options) -> FedFree:
    """A method whose global model does not move: 1 - 1e-30 is 1 in single precision."""
    return FedFree(global_model=NET, server_lr=1e-30, **options)


def upload(**sent: torch.Tensor) -> Message:
    names = {"hidden": 0, "output": 1}
    return Message({f"{names[n]}.weight": w for n, w in sent.items()} | {f"{names[n]}.bias": t(0.0, 0.0) for n in sent})


def targets(server) -> dict[int, tuple[int, int]]:
    """Of each client that gains, which layer is replaced by which."""
    names = [one.name for one in layers(server.task, NET)]
    said = {int(k): one for k, one in server.notes["layers"].items() if one != "none"}
    return {k: (names.index(one["layer"]), names.index(one["global"])) for k, one in said.items()}


class TestDecision:
    def test_the_largest_gain_wins(self):
        """Client 0: hidden 2 - 1, output 1 - 0; a tie, so the first. Client 1: hidden 2 - 2, output 1 - 0."""
        method = still()
        server = server_with(method, QUARTERS + 1, HALVES + 1)
        method.aggregate(server, {0: upload(hidden=HALVES, output=ONES), 1: upload(hidden=QUARTERS, output=ONES)})
        assert targets(server) == {0: (0, 0), 1: (1, 1)}
        assert server.notes["layers"] == {
            "0": {"layer": "features.backbone.1", "global": "features.backbone.1", "gain": 1.0},
            "1": {"layer": "head", "global": "head", "gain": 1.0},
        }
        sent = method.targeted_layer(server, 1)
        assert sent.tensor("target").item() == 1
        assert torch.equal(sent.tensor("1.weight"), HALVES + 1)
        assert set(sent) == {"target", "1.weight", "1.bias"}

    def test_all_layers_of_the_kind_or_the_matched_one(self):
        """A hidden layer of 1 bit: its own counterpart has 0, the global output 2; an output takes only the output."""
        uploads = {0: upload(hidden=HALVES), 1: upload(output=HALVES)}
        for distribution, expected in (("any-depth", {0: (0, 1), 1: (1, 1)}), ("aligned", {1: (1, 1)})):
            method = still(distribution=distribution)
            server = server_with(method, ONES, QUARTERS + 1)
            method.aggregate(server, uploads)
            assert targets(server) == expected
        assert server.notes["layers"]["0"] == "none"

    def test_only_what_was_sent_is_replaced(self):
        method = still()
        server = server_with(method, QUARTERS + 1, QUARTERS + 1)
        method.aggregate(server, {0: upload(output=HALVES)})
        assert targets(server) == {0: (1, 1)}

    def test_no_gain_no_message(self):
        method = still()
        server = server_with(method, HALVES + 1, ONES)
        method.aggregate(server, {0: upload(hidden=HALVES, output=ONES), 1: upload(hidden=QUARTERS)})
        assert targets(server) == {}
        assert server.notes["layers"] == {"0": "none", "1": "none"}
        assert method.targeted_layer(server, 0) is None
        assert method.targeted_layer(server, 1) is None

    def test_decisions_are_of_the_round(self):
        method = still()
        server = server_with(method, QUARTERS + 1, ONES)
        method.aggregate(server, {0: upload(hidden=HALVES)})
        method.aggregate(server, {1: upload(hidden=HALVES)})
        assert targets(server).keys() == {1}
        assert method.targeted_layer(server, 0) is None
        assert method.targeted_layer(server, 1) is not None
        server.begin(1, {})
        assert method.targeted_layer(server, 1) is None

    def test_decisions_are_state_and_the_record_is_not_read(self):
        method = still()
        server = server_with(method, QUARTERS + 1, ONES)
        method.aggregate(server, {1: upload(hidden=HALVES)})
        server.notes.clear()
        assert method.targeted_layer(server, 0) is None
        sent = method.targeted_layer(server, 1)
        assert sent.tensor("target").item() == 0
        assert torch.equal(sent.tensor("0.weight"), QUARTERS + 1)

    @pytest.mark.parametrize(("measure", "gain"), [("shannon", 1.0), ("tsallis", 0.25), ("collision", 1.0)])
    def test_every_entropy(self, measure, gain):
        """Tsallis: 3/4 - 1/2."""
        method = still(entropy=measure)
        server = server_with(method, QUARTERS + 1, ONES)
        method.aggregate(server, {0: upload(hidden=HALVES)})
        assert server.notes["layers"]["0"]["gain"] == pytest.approx(gain)

    def test_bins_and_order_are_used(self):
        """Two bins: 2 | 2 of 0..3 and 3 | 1 of (0, 0, 0, 3); q = 3: (1 - 1/4) / 2 - (1 - 28/64) / 2 = 0.09375."""
        method = still(entropy="tsallis", tsallis_q=3.0, bins=2)
        server = server_with(method, QUARTERS + 1, ONES)
        method.aggregate(server, {0: upload(hidden=t([0.0, 0.0], [0.0, 3.0]))})
        assert server.notes["layers"]["0"]["gain"] == pytest.approx(0.09375)


def hidden_of(server) -> torch.Tensor:
    return weights_of(server.state.model, layers(server.task, NET)[0]).weight.detach().clone()


UPLOADS = {0: upload(hidden=ONES * 3), 1: upload(hidden=ONES * 5)}


class TestSharing:
    def test_the_step_is_that_of_equation_four_on_the_rounds_probe(self):
        """By the closed form: dW = 2/S sum (W x + b - mean target) x^T, over the S inputs of this round."""
        method = FedFree(global_model=NET, server_lr=0.1, probes=32)
        server = server_with(method, ONES, ONES)
        x = torch.randn(32, 2, generator=server.draw("probe", 0))
        method.aggregate(server, UPLOADS)
        gap = x @ (ONES - 4 * ONES).T  # the mean of both targets; biases are zero
        expected = ONES - 0.1 * 2 / 32 * gap.T @ x
        torch.testing.assert_close(hidden_of(server), expected)
        bias = weights_of(server.state.model, layers(server.task, NET)[0]).bias
        torch.testing.assert_close(bias.detach(), -0.1 * 2 * gap.mean(0))

    def test_a_layer_that_nobody_sent_stays(self):
        method = FedFree(global_model=NET, server_lr=0.1)
        server = server_with(method, ONES, HALVES)
        method.aggregate(server, UPLOADS)
        assert torch.equal(weights_of(server.state.model, layers(server.task, NET)[1]).weight, HALVES)
        assert server.state.begun.tolist() == [True, False]

    def test_averaging(self):
        method = FedFree(global_model=NET, merge="average")
        server = server_with(method, ONES, ONES)
        method.aggregate(server, UPLOADS)
        assert torch.equal(hidden_of(server), ONES * 4)
        method.aggregate(server, {0: upload(hidden=ONES * 2)})
        assert torch.equal(hidden_of(server), ONES * 2)

    def test_warm_start_averages_once(self):
        method = FedFree(global_model=NET, warm_start=True, server_lr=0.1)
        server = server_with(method, ONES, ONES)
        method.aggregate(server, UPLOADS)
        assert torch.equal(hidden_of(server), ONES * 4)
        method.aggregate(server, {0: upload(hidden=ONES * 2)})
        assert not torch.equal(hidden_of(server), ONES * 2)
        assert not torch.equal(hidden_of(server), ONES * 4)

    def test_more_steps_come_nearer(self):
        gaps = []
        for steps in (1, 5, 50):
            method = FedFree(global_model=NET, server_lr=0.05, server_steps=steps)
            server = server_with(method, ONES, ONES)
            method.aggregate(server, UPLOADS)
            gaps.append((hidden_of(server) - 4).abs().max().item())
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[2] < 0.1

    def test_the_start_is_that_of_clients(self):
        """Bit by bit: clients of one architecture have one start, which is G^0 where it is the global one."""
        parts = assemble_tiny("fedfree", models="cnn-16-32,mlp-64,cnn-16-32,mlp-64", global_model="cnn-16-32")
        host, server = make_host(parts), server_of(parts.task, {0: 1}, "cnn-16-32")
        parts.method.setup(server)
        start = {f"model.{name}": value for name, value in server.state.model.state_dict().items()}
        models = [{n: v for n, v in copies(host.client(k)).items() if n.startswith("model.")} for k in range(4)]
        assert equal(models[0], start)
        assert equal(models[0], models[2])
        assert equal(models[1], models[3])
        apart = make_host(assemble_tiny("fedfree", models="mlp-64", same_start=False))
        assert not equal(copies(apart.client(0)), copies(apart.client(1)))

    def test_a_new_probe_every_round(self):
        method = FedFree(global_model=NET)
        server = server_with(method, ONES, ONES)
        first = torch.randn(2, generator=server.draw("probe", 0))
        server.begin(1, {})
        assert not torch.equal(first, torch.randn(2, generator=server.draw("probe", 0)))


# ---- the client's round ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat(FedFree):
    """A global model without entropy: nobody ever gains."""

    global_model: str = "mlp-64"
    server_lr: float = 1e-30

    def setup(self, server):
        super().setup(server)
        with torch.no_grad():
            for p in server.state.model.parameters():
                p.fill_(1.0)


class TestClients:
    def test_without_gain_it_is_local_training_to_the_bit(self):
        alone = rough("local", rounds=2, image_size=16, same_init=True)
        shared = rough(Flat, rounds=2, image_size=16)
        assert shared.bytes["down"] == 0
        assert shared.bytes["up"] > 0
        assert [set(record["notes"]["layers"].values()) for record in shared.history] == [{"none"}, {"none"}]
        mine = {n: v for n, v in kept(shared).items() if n.startswith("client") and " model." in n}
        theirs = {n: v for n, v in kept(alone).items() if n.startswith("client")}
        assert differing(mine, theirs) == []
        assert [r["clients"][k]["after"] for r in shared.history for k in "0123"] == [
            r["clients"][k]["after"] for r in alone.history for k in "0123"
        ]
        assert all(views["before"] == views["after"] for r in shared.history for views in r["clients"].values())

    def work(self, k: int = 0, **options):
        parts = assemble_tiny("fedfree", batch_size=40, **options)
        host = make_host(parts)
        before = copies(host.client(k))
        up = host.answer(Work(k, 0)).up
        return parts, host.client(k), before, pluribus.message.decode(up, host.wires(k)[0].up, "up")

    @pytest.mark.parametrize("k", range(4))
    def test_the_layers_that_changed_most_go_up(self, k):
        parts, client, before, sent = self.work(k)
        mine = layers(parts.task, client.card.model)
        scores = {}
        for at in match(mine, layers(parts.task, "fedfree-cnn")):
            names = [f"model.{mine[at].name}.{part}" for part in ("weight", "bias")]
            now = copies(client)
            moved = sum((now[n] - before[n]).double().square().sum() for n in names)
            scores[at] = float(moved / sum(before[n].double().square().sum() for n in names))
        best = sorted(scores, key=lambda at: -scores[at])[:2]
        assert set(sent) == {f"{at}.{part}" for at in best for part in ("weight", "bias")}
        for at in best:
            assert torch.equal(sent.tensor(f"{at}.weight"), weights_of(client.model, mine[at]).weight)

    def test_norms_stay_at_home_when_the_global_model_has_none(self):
        *_, sent = self.work(3, top_k=9)
        assert {name.partition(".")[0] for name in sent} == {"0", "2", "4", "5"}

    def test_fewer_layers_than_k(self):
        *_, sent = self.work(0, top_k=9)
        assert len(sent) == 4

    def test_random_layers(self):
        """By the client's own draw, not by the change."""
        chosen = set()
        for seed in range(8):
            *_, sent = self.work(3, select="random", seed=seed, top_k=1)
            chosen |= {name.partition(".")[0] for name in sent}
        assert len(chosen) > 1

    def test_ties_go_to_the_lower_number(self, monkeypatch):
        monkeypatch.setattr(layerwise, "change", lambda now, before: torch.ones(()))
        *_, sent = self.work(3)
        assert {name.partition(".")[0] for name in sent} == {"0", "2"}

    @pytest.mark.parametrize("projection", MODES)
    def test_the_layer_is_in_its_place_when_the_next_training_starts(self, projection, monkeypatch):
        """Models like the global one: the whole layer, whatever the mode."""
        starts, fit = {}, Client.fit

        def watched(client, *args, **how):
            starts[client.t, client.card.id] = {n: p.detach().clone() for n, p in client.model.named_parameters()}
            return fit(client, *args, **how)

        monkeypatch.setattr(Client, "fit", watched)
        parts = assemble_tiny("fedfree", models="mlp-64", global_model="mlp-64", projection=projection, batch_size=40)
        federation = Federation(parts, RunFolder.create(new_folder()))
        first = federation._round(0)
        trained = {k: copies(federation.engine.host.client(k)) for k in range(4)}
        sent = {n: p.detach().clone() for n, p in federation.server.state.model.named_parameters()}
        federation._round(1)
        assert any(said != "none" for said in first["notes"]["layers"].values())
        for k in range(4):
            said = first["notes"]["layers"][str(k)]
            for name, start in starts[1, k].items():
                replaced = said != "none" and name.startswith(said["layer"])
                source = sent[name.replace(said["layer"], said["global"])] if replaced else trained[k][f"model.{name}"]
                if start.shape == source.shape:
                    assert torch.equal(start, source)
                else:
                    assert replaced

    def test_a_layer_waits_once(self):
        parts = assemble_tiny("fedfree", batch_size=40)
        host = make_host(parts)
        client = host.client(0)
        host.answer(Work(0, 0))
        after = copies(client)
        down = Message(
            {"target": torch.tensor(1, dtype=torch.int32), "4.weight": torch.zeros(10, 64), "4.bias": torch.ones(10)}
        )
        host.answer(Work(0, 0, 1, pluribus.message.encode(down, host.wires(0)[1].down, "down")))
        now = copies(client)
        assert client.state.target.item() == 1
        assert all(torch.equal(now[n], after[n]) for n in now if n.startswith("model."))
        with client.fork():
            parts.method.adapt(client, "before")
            assert not client.model.head.weight.any()
            assert (client.model.head.bias == 1).all()
        assert equal(copies(client), now)
        host.answer(Work(0, 1))
        assert client.state.target.item() == -1

    def test_both_models_are_measured(self):
        result = rough(rounds=2)
        assert result.views == ("after", "before")
        last = result.history[-1]
        replaced = [k for k, said in last["notes"]["layers"].items() if said != "none"]
        assert replaced
        assert any(last["clients"][k]["before"] != last["clients"][k]["after"] for k in replaced)
        assert result.bytes["evaluation"] == 0

    def test_who_is_late_gets_nothing(self):
        result = rough(rounds=3, straggler_rate=0.5, seed=3)
        down = {(e.round, e.client) for e in result.ledger.entries() if e.direction == "down"}
        decided = {
            (r["round"], int(k))
            for r in result.history
            for k, said in r["notes"].get("layers", {}).items()
            if said != "none"
        }
        assert down == decided
        assert any(r["answered"] < r["present"] for r in result.history)


# ---- traffic ---------------------------------------------------------------------------------------------------------


class TestTraffic:
    def test_bytes_are_the_layers_that_the_record_names(self):
        result = rough(rounds=2)
        parts = assemble_tiny("fedfree")
        theirs = {one.name: (j, one) for j, one in enumerate(layers(parts.task, "fedfree-cnn"))}
        entries = [e for e in result.ledger.entries() if e.tensor != "(header)"]
        for record in result.history:
            for k, said in record["notes"]["layers"].items():
                mine = layers(parts.task, parts.cards[int(k)].model)
                here = [e for e in entries if (e.round, e.client) == (record["round"], int(k))]
                up = {e.tensor: e.bytes for e in here if e.direction == "up"}
                sent = sorted({int(name.partition(".")[0]) for name in up})
                assert len(sent) == 2
                expected = {f"{at}.weight": 4 * math.prod(mine[at].weight) for at in sent}
                assert up == expected | {f"{at}.bias": 4 * mine[at].weight[0] for at in sent}
                down = {e.tensor: e.bytes for e in here if e.direction == "down"}
                if said == "none":
                    assert down == {}
                else:
                    assert said["layer"] in {mine[at].name for at in sent}
                    j, one = theirs[said["global"]]
                    assert down == {
                        "target": 4,
                        f"{j}.weight": 4 * math.prod(one.weight),
                        f"{j}.bias": 4 * one.weight[0],
                    }

    def test_decisions_are_in_the_records_on_disk(self):
        result = rough(rounds=1)
        (line,) = (result.folder / "metrics.jsonl").read_text().splitlines()
        notes = json.loads(line)["notes"]["layers"]
        assert notes == result.history[0]["notes"]["layers"]
        assert set(notes) == set("0123")

    def test_unlike_kinds_are_not_declared(self):
        """A perceptron neither sends nor receives convolutions."""
        parts = assemble_tiny("fedfree")
        up, down = parts.method.schema(parts.task, parts.cards[0])
        assert set(up.up) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert set(down.down) == {"target"} | {f"{j}.{part}" for j in (2, 3, 4) for part in ("weight", "bias")}


# ---- variants --------------------------------------------------------------------------------------------------------


class TestVariants:
    @pytest.mark.parametrize(
        "options",
        [
            {"select": "random"},
            {"merge": "average"},
            {"warm_start": True},
            {"entropy": "tsallis", "tsallis_q": 1.5},
            {"entropy": "collision"},
            {"distribution": "any-depth"},
            {"same_start": False},
            {"projection": "flat_retain"},
            {"projection": "flat_zero"},
            {"top_k": 1},
            {"top_k": 3},
            {"server_steps": 3},
            {"server_lr": 0.1, "probes": 64},
            {"global_model": "cnn-16-32"},
        ],
        ids=str,
    )
    def test_every_variant_runs_and_matters(self, options):
        plain, other = rough(rounds=2), rough(rounds=2, **options)
        assert all(math.isfinite(r["loss"]) for r in other.history)
        assert differing(kept(plain), kept(other)) or plain.history[-1]["notes"] != other.history[-1]["notes"]

    def test_one_architecture_for_all(self):
        """The paper's homogeneous setting: clients and server have one CNN."""
        result = rough(rounds=1, models="fedfree-cnn", clients=2)
        assert any(said != "none" for said in result.history[0]["notes"]["layers"].values())

    def test_norms_travel_where_the_global_model_has_them(self):
        parts = assemble_tiny("fedfree", global_model="cnn-16-32", models="cnn-16-32")
        assert "1.weight" in parts.method.schema(parts.task, parts.cards[0])[0].up

    def test_depthwise_and_deep_networks(self):
        """MobileNetV2 sends no depthwise convolution to the plain CNN, but all its layers to another MobileNetV2."""
        task = task_of(10, 64, shape=(3, 32, 32))
        mobile = layers(task, "mobilenet-v2")
        kinds = {mobile[at].kind for at in match(mobile, layers(task, "fedfree-cnn"))}
        assert kinds == {"conv", "linear"}
        assert match(mobile, mobile) == {at: at for at in range(len(mobile))}

    @pytest.mark.parametrize(
        "options", [{"warm_start": True}, {"select": "random", "distribution": "any-depth"}], ids=str
    )
    def test_a_stopped_run_resumes_to_the_same_bits(self, options):
        settings = {"rounds": 3, "participation": 0.5, "checkpoint_every": 1, **options}
        straight, folder = rough(**settings), new_folder()
        with pytest.raises(StoppedError):
            rough(out=folder, observers=[StopAfter(0)], **settings)
        assert_same(straight, pluribus.resume(folder, progress=False))


# ---- refusals --------------------------------------------------------------------------------------------------------


class NoLinear(nn.Module):
    """Logits out of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 1)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


def all_convolution(shape) -> pluribus.models.TwoPartModel:
    return pluribus.models.TwoPartModel(NoLinear(), nn.Identity(), 10)


class TestRefusals:
    def test_unknown_global_model(self):
        with refused(UnknownNameError, "--global-model", "'fedfree-cn'", "'fedfree-cnn'"):
            assemble_tiny("fedfree", global_model="fedfree-cn")

    def test_images_that_are_too_small_for_it(self):
        with refused(MismatchError, "--global-model", "'fedfree-cnn'", "1x8x8", "--image-size"):
            assemble_tiny("fedfree", image_size=8)

    def test_a_client_without_a_layer_that_the_global_model_has(self):
        facts = ("client 1", "test_fedfree.all_convolution", "conv", "mlp-64", "linear, output", "--global-model")
        with refused(MismatchError, *facts):
            assemble_tiny("fedfree", models="mlp-64,test_fedfree.all_convolution", global_model="mlp-64", width=10)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("top_k", 0), ("server_steps", 0), ("probes", 0), ("bins", 1), ("server_lr", 0.0), ("tsallis_q", 1.0)],
    )
    def test_numbers_that_mean_nothing(self, option, value):
        with refused(RangeError, f"--{option.replace('_', '-')}"):
            assemble_tiny("fedfree", **{option: value})

    @pytest.mark.parametrize("steps", [1, 5])
    def test_a_step_that_diverges(self, steps):
        """conv2 sees 32 channels of 5 x 5; with as many probes as the default has, the rate may be 0.5."""
        settings = {"models": "fedfree-cnn", "server_lr": 0.5, "server_steps": steps}
        with refused(RangeError, "--server-lr 0.5", "conv2", "800", "256", "--probes"):
            assemble_tiny("fedfree", probes=256, **settings)
        assemble_tiny("fedfree", **settings | {"server_lr": 0.4})
        assemble_tiny("fedfree", probes=256, merge="average", **settings)

    def test_the_former_name_of_a_choice(self):
        with refused(UnknownNameError, "--distribution", "'paper'", "'any-depth'"):
            assemble_tiny("fedfree", distribution="paper")

    def test_unknown_choices(self):
        with refused(UnknownNameError, "--projection", "block_retain", "flat_retain", "flat_zero", "'zero'"):
            assemble_tiny("fedfree", projection="zero")
