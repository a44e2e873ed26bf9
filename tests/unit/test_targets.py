"""Losses of classes, labels and numbers, by hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_host
from pluribus.assembly import assemble
from pluribus.experiment import experiment
from pluribus.request import Work
from pluribus.targets import Target

CLASSES, LABELS, NUMBERS, DISTANCES = Target(), Target("labels"), Target("numbers"), Target("numbers", "l1")


def sigmoid(value: float) -> float:
    return 1 / (1 + exp(-value))


def numbers(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


# ---- the loss --------------------------------------------------------------------------------------------------------


def test_classes():
    scores, y = numbers([0.0, log(3)], [0.0, 0.0]), torch.tensor([1, 0])
    rows = [-log(3 / 4), -log(1 / 2)]
    assert CLASSES.loss(scores, y, reduction="none").tolist() == pytest.approx(rows)
    assert float(CLASSES.loss(scores, y)) == pytest.approx(sum(rows) / 2)
    weight = torch.tensor([1.0, 3.0])
    assert float(CLASSES.loss(scores, y, weight=weight)) == pytest.approx((3 * rows[0] + rows[1]) / 4)


def test_labels():
    """Cross-entropy of each label, mean over labels; a weight counts where a row has the label."""
    scores, y = numbers([0.0, 2.0], [-1.0, 0.5]), numbers([1.0, 0.0], [0.0, 1.0])
    cells = [[-log(0.5), -log(1 - sigmoid(2))], [-log(1 - sigmoid(-1)), -log(sigmoid(0.5))]]
    rows = [sum(row) / 2 for row in cells]
    assert LABELS.loss(scores, y, reduction="none").tolist() == pytest.approx(rows)
    assert float(LABELS.loss(scores, y)) == pytest.approx(sum(rows) / 2)
    assert float(LABELS.loss(scores, y, reduction="sum")) == pytest.approx(sum(rows))
    weighted = [[3 * cells[0][0], cells[0][1]], [cells[1][0], 0.5 * cells[1][1]]]
    found = LABELS.loss(scores, y, weight=torch.tensor([3.0, 0.5]), reduction="none")
    assert found.tolist() == pytest.approx([sum(row) / 2 for row in weighted])


def test_numbers():
    scores, y = numbers([1.0, 2.0], [0.0, 0.0]), numbers([0.0, 4.0], [0.0, 3.0])
    assert NUMBERS.loss(scores, y, reduction="none").tolist() == [2.5, 4.5]
    assert float(NUMBERS.loss(scores, y)) == 3.5
    assert DISTANCES.loss(scores, y, reduction="none").tolist() == [1.5, 1.5]
    assert float(DISTANCES.loss(scores, y, reduction="sum")) == 3


# ---- what models learn from each other -------------------------------------------------------------------------------


def test_divergence_of_classes_is_kl():
    teacher, student = numbers([0.0, log(3)]), numbers([0.0, 0.0])
    expected = 0.25 * log(0.25 / 0.5) + 0.75 * log(0.75 / 0.5)
    assert CLASSES.divergence(teacher, student).tolist() == pytest.approx([expected])
    assert CLASSES.divergence_from(CLASSES.posterior(teacher), student).tolist() == pytest.approx([expected])


def test_divergence_of_labels_is_kl_of_each_mean_over_labels():
    teacher, student = numbers([log(3), 0.0]), numbers([0.0, 0.0])
    expected = (0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)) / 2
    assert LABELS.divergence(teacher, student).tolist() == pytest.approx([expected])
    assert LABELS.divergence_from(LABELS.posterior(teacher), student).tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("target", [NUMBERS, DISTANCES])
def test_divergence_of_numbers_is_their_squared_distance(target: Target):
    assert target.divergence(numbers([1.0, 2.0]), numbers([0.0, 0.0])).tolist() == [2.5]
    assert target.divergence_from(numbers([1.0, 2.0]), numbers([0.0, 0.0])).tolist() == [2.5]


@pytest.mark.parametrize("target", [CLASSES, LABELS, NUMBERS])
def test_nobody_diverges_from_himself(target: Target):
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.divergence(scores, scores), torch.zeros(5))
    torch.testing.assert_close(target.divergence_from(target.posterior(scores), scores), torch.zeros(5))


def test_a_certain_teacher_of_labels_gives_finite_numbers():
    certain = numbers([200.0, -200.0])
    assert LABELS.divergence(certain, -certain).isfinite().all()
    assert LABELS.divergence_from(LABELS.posterior(certain), certain).isfinite().all()


def test_predictions_and_confidence():
    scores = numbers([1.0, -1.0], [-2.0, 3.0])
    assert CLASSES.predict(scores).tolist() == [0, 1]
    assert LABELS.predict(scores).tolist() == [[True, False], [False, True]]
    assert torch.equal(NUMBERS.predict(scores), scores)
    right = numbers([1.0, 1.0], [0.0, 1.0])
    assert float(LABELS.confidence(LABELS.posterior(scores), right)) == 0.75
    assert float(CLASSES.confidence(CLASSES.posterior(scores), torch.tensor([0, 0]))) == 0.5
    assert float(NUMBERS.confidence(scores, right)) == 1, "all teachers count equally"


# ---- balanced classes ------------------------------------------------------------------------------------------------


def client_of(data: str, **settings: Any):
    described = experiment("local", data=data, clients=1, models=settings.pop("models"), device="cpu", **settings)
    host = make_host(assemble(described))
    return host, host.client(0)


TABLE = {"models": "pluribus.conformance.kinds.table_mlp", "partition": "iid", "test_fraction": 0.0}


def test_every_class_counts_equally_in_total():
    host, client = client_of("pluribus.conformance.kinds.few_table", class_weights="balanced", **TABLE)
    y = client.data["train"].labels()
    counts = torch.bincount(y, minlength=10)
    assert client.class_weight.tolist() == pytest.approx([len(y) / (10 * int(count)) for count in counts])
    assert float((client.class_weight * counts).sum()) == pytest.approx(len(y))
    scores = torch.randn(len(y), 10, generator=torch.Generator().manual_seed(0))
    by_class = [torch.nn.functional.cross_entropy(scores[y == c], y[y == c]) for c in range(10)]
    assert float(client.task_loss(scores, y)) == pytest.approx(float(torch.stack(by_class).mean()), rel=1e-5)
    assert host.answer(Work(0, 0)).loss > 0


def test_a_class_that_a_client_does_not_hold_has_weight_one():
    pathological = TABLE | {"partition": "pathological", "clients": 5, "classes_per_client": 2}
    described = experiment(
        "local", data="pluribus.conformance.kinds.few_table", device="cpu", class_weights="balanced", **pathological
    )
    client = make_host(assemble(described)).client(0)
    counts = torch.bincount(client.data["train"].labels(), minlength=10)
    assert int((counts > 0).sum()) == 2
    expected = [int(counts.sum()) / (2 * int(n)) if n else 1.0 for n in counts]
    assert client.class_weight.tolist() == pytest.approx(expected)


def test_the_two_sides_of_every_label_count_equally():
    _, client = client_of("pluribus.conformance.kinds.few_labels", class_weights="balanced", **TABLE)
    y = client.data["train"].labels()
    held = y.sum(0)
    torch.testing.assert_close(client.class_weight, (len(y) - held) / held)
    torch.testing.assert_close(client.class_weight * held, (1 - y).sum(0))


def test_without_the_setting_and_for_numbers_every_row_counts_equally():
    assert client_of("pluribus.conformance.kinds.few_table", **TABLE)[1].class_weight is None
    assert (
        client_of("pluribus.conformance.kinds.few_numbers", class_weights="balanced", **TABLE)[1].class_weight is None
    )


def test_a_client_that_takes_over_a_seat_brings_its_own_weights(monkeypatch: pytest.MonkeyPatch):
    described = experiment(
        "local", data="pluribus.conformance.kinds.few_table", clients=3, class_weights="balanced", device="cpu",
        models=TABLE["models"],
    )  # fmt: skip
    parts = assemble(described)
    expected = {k: make_host(parts).client(k).class_weight.clone() for k in range(3)}
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
    host = make_host(parts)
    first = host.client(0).class_weight
    for k in (1, 2, 0):
        assert torch.equal(host.client(k).class_weight, expected[k])
        assert host.client(k).class_weight is first, "recorded steps read it there"
