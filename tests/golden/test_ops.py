"""The verbs that papers share, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from parties import client_of, data_of, equal, flat_split, noise, server_of, signs, task_of
from pluribus.data.federated import Data
from pluribus.message import Message, Rows
from pluribus.ops import (
    Tally,
    average_uploads,
    class_means,
    client_weights,
    distance_to_rows,
    kl,
    nearest,
    onehot,
    rows_mean,
    sgd_step,
    turn_into_gradients,
    weighted_mean,
)

PIXELS = [[1, 1], [1, -1], [-1, -1], [1, 1], [-1, 1]]
LABELS = [0, 2, 2, 0, 2]


def means_of(pixels, labels, classes: int = 4):
    return class_means(client_of(flat_split(2, classes), data_of(signs(pixels), labels), classes=classes))


class TestClassMeans:
    def test_by_hand(self):
        rows = means_of(PIXELS, LABELS)
        assert rows.held.tolist() == [True, False, True, False]
        third = 1 / 3
        assert rows.value.tolist() == [[1, 1], [0, 0], pytest.approx([-third, -third]), [0, 0]]

    @settings(deadline=None, max_examples=50)
    @given(st.data())
    def test_bit_equal_for_any_batch_size_and_order(self, data):
        """Pixels of -1 and 1 have sums without rounding, so not even the last bit may differ."""
        samples = data.draw(st.integers(1, 12))
        pair = st.lists(st.sampled_from([-1, 1]), min_size=2, max_size=2)
        pixels = data.draw(st.lists(pair, min_size=samples, max_size=samples))
        labels = data.draw(st.lists(st.integers(0, 3), min_size=samples, max_size=samples))
        order = data.draw(st.permutations(range(samples)))
        whole = means_of(pixels, labels)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pluribus.internal.steps.SWEEP_BATCH", data.draw(st.integers(1, 13)))
            again = means_of([pixels[i] for i in order], [labels[i] for i in order])
        assert torch.equal(again.value, whole.value)
        assert torch.equal(again.held, whole.held)

    def test_groupwise_mean_of_real_features_in_eval_mode(self, monkeypatch):
        labels = [i % 3 for i in range(50)]
        model = flat_split(16, 5, 0, nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Dropout(0.5))
        client = client_of(model, data_of(noise(50), labels), classes=5)
        x, y = client.data["train"].take(torch.arange(50))
        model.eval()
        expected = torch.stack([model.features(x)[y == c].mean(0) for c in range(3)]).detach()
        model.train()
        for size in (256, 7, 1):
            monkeypatch.setattr("pluribus.internal.steps.SWEEP_BATCH", size)
            rows = class_means(client)
            torch.testing.assert_close(rows.value[:3], expected)
            assert rows.held.tolist() == [True] * 3 + [False] * 2
            assert not rows.value.requires_grad

    def test_another_set_and_an_empty_one(self):
        store = data_of(signs(PIXELS), LABELS).store
        sets = {
            "train": Data(store, torch.arange(3)),
            "val": Data(store, torch.tensor([4])),
            "none": Data(store, torch.arange(0)),
        }
        client = client_of(flat_split(2, 4), sets, classes=4)
        assert class_means(client, "val").value[2].tolist() == [-1, 1]
        assert not class_means(client, "none").held.any()
        assert not class_means(client, "none").value.any()


class TestOnehot:
    @given(st.lists(st.integers(0, 4), max_size=6))
    def test_equals_torchs(self, labels):
        y = torch.tensor(labels, dtype=torch.long)
        assert torch.equal(onehot(y, 5), nn.functional.one_hot(y, 5).float())

    def test_by_hand(self):
        assert onehot(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]


class TestWeightedMean:
    def test_by_hand(self):
        parts = {3: {"w": torch.tensor([0.0, 4.0])}, 8: {"w": torch.tensor([4.0, 8.0])}}
        assert weighted_mean(parts, {3: 1, 8: 3})["w"].tolist() == [3.0, 7.0]

    def test_weights_of_those_who_are_not_there_do_not_count(self):
        parts = {3: {"w": torch.tensor([2.0])}}
        assert weighted_mean(parts, {3: 5, 8: 1000})["w"].tolist() == [2.0]

    def test_whole_numbers_take_the_largest(self):
        parts = {0: {"n": torch.tensor(3)}, 1: {"n": torch.tensor(7)}, 2: {"n": torch.tensor(5)}}
        mean = weighted_mean(parts, {0: 100, 1: 1, 2: 1})["n"]
        assert mean.item() == 7
        assert mean.dtype == torch.int64

    def test_names_shapes_and_dtypes_stay(self):
        part = {"a": torch.ones(2, 3), "b": torch.tensor(1.0), "c": torch.ones(2, dtype=torch.float64)}
        mean = weighted_mean({0: part, 1: part}, {0: 1, 1: 1})
        assert {n: (v.shape, v.dtype) for n, v in mean.items()} == {n: (v.shape, v.dtype) for n, v in part.items()}

    def test_the_parts_are_not_changed(self):
        parts = {0: {"w": torch.tensor([1.0])}, 1: {"w": torch.tensor([3.0])}}
        weighted_mean(parts, {0: 1, 1: 1})["w"].add_(5)
        assert [parts[k]["w"].item() for k in (0, 1)] == [1, 3]
        alone = weighted_mean({0: parts[0]}, {0: 1})["w"].add_(5)
        assert parts[0]["w"].item() == 1
        assert alone.item() == 6


class TestSgdStep:
    def test_by_hand(self):
        """loss = (w x + b)^2 at w = 2, b = 1, x = 3: dw = 2 * 7 * 3 = 42, db = 14."""
        line = nn.Linear(1, 1)
        with torch.no_grad():
            line.weight.fill_(2)
            line.bias.fill_(1)
        sgd_step(line, line(torch.tensor([[3.0]])).square().sum(), lr=0.5)
        assert (line.weight.item(), line.bias.item()) == (2 - 21, 1 - 7)
        assert line.weight.grad is None

    def test_step_after_step(self):
        line = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            line.weight.fill_(1)
        for expected in (0.5, 0.25, 0.125):  # w - 0.25 * 2 w
            sgd_step(line, line(torch.ones(1, 1)).square().sum(), lr=0.25)
            assert line.weight.item() == expected


class TestTurnIntoGradients:
    def test_by_hand(self):
        """f = a^2 b: df/da = 2ab, df/db = a^2."""
        variables = {"a": torch.tensor([3.0]), "b": torch.tensor([5.0]), "unused": torch.tensor([7.0])}
        places = {name: value.data_ptr() for name, value in variables.items()}
        turn_into_gradients(lambda: (variables["a"] ** 2 * variables["b"]).sum(), variables)
        assert {name: value.tolist() for name, value in variables.items()} == {"a": [30], "b": [9], "unused": [0]}
        assert {name: value.data_ptr() for name, value in variables.items()} == places
        assert not any(value.requires_grad for value in variables.values())

    def test_of_a_network_with_a_weight_used_twice(self):
        generator = torch.Generator().manual_seed(0)
        x, w, v = (torch.randn(size, generator=generator) for size in ((4, 3), (3, 3), (2, 3)))

        def loss(w, v):
            return ((x @ w.T).tanh() @ w.T @ v.T).square().mean()

        variables = {"w": w.clone(), "v": v.clone()}
        expected = torch.func.grad(lambda t: loss(t["w"], t["v"]))({"w": w, "v": v})
        turn_into_gradients(lambda: loss(**variables), variables)
        for name, value in expected.items():
            torch.testing.assert_close(variables[name], value)

    @pytest.mark.parametrize("use", ["once", "twice", "beside a product", "as an embedding", "of one row"])
    def test_of_linear_layers(self, use):
        """Their weights are overwritten in the backward pass, unless something else still needs them."""
        generator = torch.Generator().manual_seed(0)
        x, w, b = (torch.randn(size, generator=generator) for size in ((2, 4, 3), (3, 3), (3,)))

        def loss(w, b):
            if use == "as an embedding":
                rows = F.embedding(torch.tensor([[0, 2], [1, 1]]), w)
                return F.linear(rows, w, b).square().mean()
            if use == "of one row":
                return F.linear(x[0, 0], w, b).square().mean()
            once = F.linear(x, w, b).tanh()
            others = {"once": once, "twice": F.linear(once, w), "beside a product": once @ w}
            return others[use].square().mean()

        variables = {"w": w.clone(), "b": b.clone(), "unused": torch.ones(2)}
        places = {name: value.data_ptr() for name, value in variables.items()}
        expected = torch.func.grad(lambda t: loss(t["w"], t["b"]))({"w": w, "b": b})
        turn_into_gradients(lambda: loss(variables["w"], variables["b"]), variables)
        for name, value in expected.items():
            torch.testing.assert_close(variables[name], value)
        assert not variables["unused"].any()
        assert {name: value.data_ptr() for name, value in variables.items()} == places


class TestTally:
    def test_adds_up_over_batches_and_forgets(self):
        tally = Tally(3, 2)
        tally.add(torch.tensor([0, 2]), torch.tensor([[1.0, 2.0], [4.0, 4.0]]))
        tally.add(torch.tensor([0]), torch.tensor([[3.0, 6.0]], requires_grad=True))
        assert tally.means().value.tolist() == [[2, 4], [0, 0], [4, 4]]
        assert tally.means().held.tolist() == [True, False, True]
        assert not tally.sums.requires_grad
        tally.reset()
        assert not tally.means().held.any()
        assert not tally.sums.any()


A = Rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]), torch.tensor([True, True, False]))
B = Rows(torch.tensor([[5.0, 6.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False, False]))


class TestRowsMean:
    def test_over_those_who_report(self):
        mean = rows_mean([A, B])
        assert mean.value.tolist() == [[3, 4], [3, 4], [0, 0]]
        assert mean.held.tolist() == [True, True, False]

    def test_weighted_per_class(self):
        """(1 * 1 + 3 * 5) / 4 = 4 and (1 * 2 + 3 * 6) / 4 = 5; a weight of a class that is not held says nothing."""
        mean = rows_mean([A, B], [torch.tensor([1, 7, 9]), torch.tensor([3, 9, 9])])
        assert mean.value.tolist() == [[4, 5], [3, 4], [0, 0]]

    def test_equal_weights_are_none(self):
        twos = torch.full((3,), 2)
        assert torch.equal(rows_mean([A, B], [twos, twos]).value, rows_mean([A, B]).value)


def test_distance_to_rows_skips_classes_without_one():
    """((2 - 1)^2 + (2 - 2)^2 + 0 + 0) / 4: the second sample has no goal, but counts."""
    values = torch.tensor([[2.0, 2.0], [9.0, 9.0]], requires_grad=True)
    distance = distance_to_rows(values, A, torch.tensor([0, 2]))
    assert distance.item() == 0.25
    assert torch.autograd.grad(distance, values)[0].tolist() == [[0.5, 0.0], [0.0, 0.0]]


def test_nearest_leaves_out_classes_without_a_vector():
    scores = nearest(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), A)
    assert scores.tolist() == [[-5.0, -25.0, -torch.inf], [-8.0, 0.0, -torch.inf]]


class TestKL:
    def test_by_hand(self):
        """Teacher (1/4, 3/4), student (1/2, 1/2): 1/4 ln(1/2) + 3/4 ln(3/2)."""
        teacher, student = torch.tensor([[1.0, 3.0]]).log(), torch.zeros(1, 2)
        expected = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
        torch.testing.assert_close(kl(teacher, student), expected[None])

    def test_of_oneself_is_zero_and_temperature_divides_logits(self):
        logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 4.0, 1.0]])
        assert kl(logits, logits).tolist() == [0, 0]
        torch.testing.assert_close(kl(logits, logits.flip(1), 2.0), kl(logits / 2, logits.flip(1) / 2))


def test_averaged_by_samples_or_uniformly_under_a_prefix():
    server = server_of(task_of(2, 2), {0: 1, 1: 3})
    uploads = {k: Message({"head.w": torch.tensor([4.0 * k]), "other": torch.ones(1)}) for k in range(2)}
    assert equal(average_uploads(server, uploads, "head."), {"w": torch.tensor([3.0])})
    assert equal(average_uploads(server, uploads, "head.", "samples"), {"w": torch.tensor([3.0])})
    assert equal(average_uploads(server, uploads, "head.", "uniform"), {"w": torch.tensor([2.0])})


def test_how_much_a_client_counts():
    """Clients that did not answer are not counted."""
    server = server_of(task_of(2, 2), {0: 1, 1: 3, 2: 100})
    assert client_weights(server, (0, 1), "samples") == {0: 1, 1: 3}
    assert client_weights(server, (0, 1), "uniform") == {0: 1, 1: 1}
