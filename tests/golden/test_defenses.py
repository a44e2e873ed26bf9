"""Defenses on tiny tensors, by hand, and what holds for all values: order of clients, and less than half liars."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pluribus.internal.defenses import DEFENSES, Defense, Name, krum_scores
from pluribus.message import Message, Rows
from pluribus.ops import rows_mean, weighted_mean


def sent(*vectors: list[float]) -> dict[int, Message]:
    return {k: Message({"x": torch.tensor(vector)}) for k, vector in enumerate(vectors)}


def defended(defense: Defense, *vectors: list[float]) -> dict[int, list[float]]:
    return {k: one.tensor("x").tolist() for k, one in defense.of_messages(sent(*vectors)).items()}


def test_none_changes_nothing() -> None:
    messages = sent([1.0], [2.0])
    assert Defense("none").of_messages(messages) == messages


def test_the_median_is_taken_number_by_number() -> None:
    found = defended(Defense("median"), [1.0, 9.0], [3.0, -5.0], [1000.0, 4.0])
    assert found == {k: [3.0, 4.0] for k in range(3)}


def test_the_median_of_an_even_number_is_between_the_middle_two() -> None:
    assert defended(Defense("median"), [1.0], [2.0], [4.0], [-1000.0])[0] == [1.5]


def test_the_trimmed_mean_drops_the_same_number_on_both_sides() -> None:
    """A share of 0.2 of five is one: (2 + 3 + 7) / 3."""
    found = defended(Defense("trimmed-mean", 0.2), [100.0], [2.0], [3.0], [7.0], [-50.0])
    assert found == {k: [4.0] for k in range(5)}


@pytest.mark.parametrize(
    ("messages", "share", "liars"), [(5, 0.2, 1), (6, 0.2, 2), (3, 0.4, 1), (2, 0.4, 0), (1, 0.4, 0)]
)
def test_liars_are_rounded_up_and_less_than_half(messages: int, share: float, liars: int) -> None:
    assert Defense("krum", share).liars(messages) == liars


def test_clip_shortens_to_the_median_length() -> None:
    """Lengths 5, 10 and 50: the median is 10."""
    found = defended(Defense("clip"), [3.0, 4.0], [6.0, 8.0], [30.0, 40.0])
    assert found == {0: [3.0, 4.0], 1: [6.0, 8.0], 2: [6.0, 8.0]}


def test_clip_is_about_what_clients_started_from() -> None:
    """All started from 100: the moves have lengths 1, 2 and 10."""
    start = {k: {"x": torch.tensor([100.0])} for k in range(3)}
    found = Defense("clip").of_messages(sent([101.0], [98.0], [110.0]), start)
    assert {k: one.tensor("x").tolist() for k, one in found.items()} == {0: [101.0], 1: [98.0], 2: [102.0]}


def test_clip_takes_all_tensors_of_a_message_together() -> None:
    """(3, 4), (0, 10) and (30, 40) have the lengths 5, 10 and 50."""
    pairs = (3.0, 4.0), (0.0, 10.0), (30.0, 40.0)
    parts = {k: {"a": torch.tensor([a]), "b": torch.tensor([b])} for k, (a, b) in enumerate(pairs)}
    found = Defense("clip").of_tensors(parts)
    assert [float(found[2][name]) for name in "ab"] == [6.0, 8.0]


def test_clip_survives_the_largest_floats() -> None:
    most = torch.finfo(torch.float32).max
    found = defended(Defense("clip"), [3.0, 4.0], [5.0, 0.0], [most, -most])
    assert found[2] == pytest.approx([5 / math.sqrt(2), -5 / math.sqrt(2)])


def test_krum_scores_are_sums_of_squared_distances_to_the_nearest() -> None:
    """Points 0, 1, 2, 4 and 10 with one liar: each score has the two nearest neighbors.

    0: 1 + 4. 1: 1 + 1. 2: 1 + 4. 4: 4 + 9. 10: 36 + 64.
    """
    points = [{"x": torch.tensor([x])} for x in (0.0, 1.0, 2.0, 4.0, 10.0)]
    assert krum_scores(points, 1) == [5, 2, 5, 13, 100]


def test_krum_leaves_out_the_vectors_with_the_highest_scores() -> None:
    found = defended(Defense("krum", 0.2), [0.0], [1.0], [2.0], [4.0], [10.0])
    assert found == {0: [0.0], 1: [1.0], 2: [2.0], 3: [4.0]}


def test_krum_trusts_everyone_if_there_are_too_few_to_tell() -> None:
    assert defended(Defense("krum", 0.2), [0.0], [1.0], [1000.0], [2.0]).keys() == {0, 1, 2, 3}


def test_messages_are_compared_with_those_of_their_own_layout() -> None:
    narrow = {k: Message({"x": torch.tensor([float(k)])}) for k in range(3)}
    wide = {k: Message({"x": torch.tensor([float(k), 9.0])}) for k in range(3, 6)}
    found = Defense("median").of_messages({**narrow, **wide})
    assert [found[k].tensor("x").tolist() for k in (0, 3)] == [[1.0], [4.0, 9.0]]


def test_integers_stay_as_they_are() -> None:
    messages = {k: Message({"x": torch.tensor([float(k)]), "n": torch.tensor([k])}) for k in range(3)}
    assert [one.tensor("n").tolist() for one in Defense("median").of_messages(messages).values()] == [[0], [1], [2]]


def rows(values: list[float | None]) -> Rows:
    """One number per class. None: the class is not held."""
    held = torch.tensor([value is not None for value in values])
    return Rows(torch.tensor([[value or 0.0] for value in values]), held)


def test_each_class_is_defended_over_those_that_hold_it() -> None:
    """Class 0: 1, 3 and 50. Class 1: 4 and 6. Class 2: client 1 alone."""
    messages = {
        k: Message({"m": rows(v)}) for k, v in enumerate(([1.0, 4.0, None], [3.0, None, 7.0], [50.0, 6.0, None]))
    }
    found = {k: one.rows("m") for k, one in Defense("median").of_messages(messages).items()}
    assert {k: one.value.flatten().tolist() for k, one in found.items()} == {0: [3, 5, 0], 1: [3, 0, 7], 2: [3, 5, 0]}
    assert {k: one.held.tolist() for k, one in found.items()} == {
        k: m.rows("m").held.tolist() for k, m in messages.items()
    }


def test_krum_takes_a_class_from_a_client_that_it_does_not_trust() -> None:
    """The first class is that of the test above. The second one is its mirror image."""
    values = ([0.0, 10.0], [1.0, 4.0], [2.0, 2.0], [4.0, 1.0], [10.0, 0.0])
    messages = {k: Message({"m": rows(list(one))}) for k, one in enumerate(values)}
    found = Defense("krum", 0.2).of_messages(messages)
    assert [one.rows("m").held.tolist() for one in found.values()] == [[True, k > 0] for k in range(4)] + [
        [False, True]
    ]
    assert found[0].rows("m").value.flatten().tolist() == [0.0, 0.0]


def test_the_shared_means_of_defended_messages_are_the_defended_value() -> None:
    """So a method that averages gets the median itself, whatever its weights are."""
    center = Defense("median").of_messages(sent([1.0], [3.0], [1000.0]))
    mean = weighted_mean({k: one.part() for k, one in center.items()}, {0: 5, 1: 1, 2: 90})
    assert mean["x"].tolist() == pytest.approx([3.0])
    classes = {k: Message({"m": rows([one])}) for k, one in enumerate((1.0, 3.0, 1000.0))}
    reports = [one.rows("m") for one in Defense("median").of_messages(classes).values()]
    assert rows_mean(reports).value.tolist() == [[3.0]]


# ---- what holds for all values ---------------------------------------------------------------------------------------

floats = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(floats, min_size=3, max_size=9), st.randoms(use_true_random=False), st.sampled_from(DEFENSES))
def test_the_order_of_clients_does_not_matter(values: list[float], shuffler: object, name: Name) -> None:
    order = list(range(len(values)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    messages = {k: Message({"x": torch.tensor([values[k], 1.0])}) for k in order}
    there = Defense(name).of_messages(messages)
    here = Defense(name).of_messages(dict(sorted(messages.items())))
    assert there.keys() == here.keys()
    assert all(torch.equal(there[k].tensor("x"), here[k].tensor("x")) for k in here)


@given(st.lists(floats, min_size=1, max_size=6), st.data(), st.sampled_from(["median", "trimmed-mean"]))
def test_less_than_half_liars_cannot_leave_the_range_of_honest_values(
    honest: list[float], data: st.DataObject, name: Name
) -> None:
    lies = data.draw(st.lists(floats, max_size=len(honest) - 1))
    defense = Defense(name, 0.49)
    center = defended(defense, *([value] for value in honest), *([value] for value in lies))[0][0]
    near = 1e-5 * max(map(abs, honest)) if name == "trimmed-mean" else 0.0  # a mean rounds
    assert min(honest) - near <= center <= max(honest) + near


@given(st.lists(floats, min_size=3, max_size=9))
def test_no_clipped_vector_is_longer_than_the_median(values: list[float]) -> None:
    most = float(torch.tensor(values, dtype=torch.float64).abs().quantile(0.5))
    for vector in defended(Defense("clip"), *([value] for value in values)).values():
        assert abs(vector[0]) <= most * (1 + 1e-6)


def test_all_names_are_defenses() -> None:
    assert get_args(Name) == ("none", *DEFENSES)
