"""What one row is to a model: it survives a file, and nonsense from a file or another machine is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pluribus.inputs import KINDS, UNKNOWN, Input, as_input

INPUTS = [
    Input("image", (3, 32, 32)),
    Input("signal", (9, 128)),
    Input("tokens", (64,), vocabulary=8192),
    Input("table", (11,), categories=(4, 2)),
    Input("tensor", (5, 5, 2, 2)),
    Input("tensor", (7,), whole=True),
]


@pytest.mark.parametrize("row", INPUTS, ids=str)
def test_facts_in_a_file_give_the_same_input(row: Input) -> None:
    assert Input.of(json.loads(json.dumps(row.facts()))) == row


@pytest.mark.parametrize("row", INPUTS, ids=str)
def test_rows_of_zeros_are_what_a_model_takes(row: Input) -> None:
    zeros = row.zeros(3)
    assert zeros.shape == (3, *row.shape)
    assert zeros.dtype == (torch.int64 if row.kind == "tokens" or row.whole else torch.float32)
    filled = UNKNOWN if row.kind == "tokens" else 0
    assert zeros.unique().tolist() == [filled], "a row of tokens has a token"


def test_a_shape_alone_is_an_image_or_a_tensor() -> None:
    assert as_input((1, 8, 8)) == Input("image", (1, 8, 8))
    assert as_input((8,)) == Input("tensor", (8,))


GOOD: dict[str, Any] = {"kind": "tokens", "shape": [64], "vocabulary": 100, "categories": [], "whole": False}
FAULTS: dict[str, dict[str, Any]] = {
    "an unknown kind": {"kind": "video"},
    "a kind that is a list": {"kind": ["tokens"]},
    "no kind": {"kind": None},
    "no shape": {"shape": None},
    "an empty shape": {"shape": []},
    "a shape of text": {"shape": "64"},
    "too many dimensions": {"shape": [8, 8]},
    "a size of zero": {"shape": [0]},
    "a negative size": {"shape": [-64]},
    "a size that is no whole number": {"shape": [6.5]},
    "a size that is a truth value": {"shape": [True]},
    "a size beyond memory": {"shape": [2**31]},
    "sizes beyond memory together": {"kind": "image", "shape": [2**16, 2**16, 2**16], "vocabulary": 0},
    "tokens without a vocabulary": {"vocabulary": 0},
    "a vocabulary of padding and unknown alone": {"vocabulary": 1},
    "a vocabulary beyond memory": {"vocabulary": 2**40},
    "a vocabulary that is text": {"vocabulary": "100"},
    "a table with a vocabulary": {"kind": "table"},
    "categories of tokens": {"categories": [3]},
    "categories of images": {"kind": "image", "shape": [8, 8, 8], "vocabulary": 0, "categories": [3]},
    "more categories than columns": {"kind": "table", "shape": [1], "vocabulary": 0, "categories": [3, 3]},
    "a category without values": {"kind": "table", "shape": [2], "vocabulary": 0, "categories": [0]},
    "whole numbers of an image": {"kind": "image", "shape": [1, 8, 8], "vocabulary": 0, "whole": True},
    "neither whole nor not": {"whole": 1},
}


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    assert Input.of(GOOD).vocabulary == 100
    with pytest.raises(ValueError, match=r"input|fit|sizes"):
        Input.of(GOOD | change)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
nearly = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(KINDS) | anything,
        "shape": st.lists(st.integers(1, 9), max_size=4) | anything,
        "vocabulary": st.integers(0, 9) | anything,
        "categories": st.lists(st.integers(1, 9), max_size=3) | anything,
        "whole": st.booleans() | anything,
    },
)


@given(facts=nearly | anything)
def test_whatever_comes_it_is_an_input_or_a_value_error(facts: Any) -> None:
    try:
        row = Input.of(facts)
    except ValueError:
        return
    assert Input.of(row.facts()) == row
    assert row.zeros(1).numel() > 0
