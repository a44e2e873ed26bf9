"""What a state holds, what it is saved as, and that its tensors stay where they are."""

from __future__ import annotations

import copy

import pytest
import torch

from pluribus.internal.state import State, restore
from pluribus.message import Rows


def rows(value: float, held: list[bool]) -> Rows:
    return Rows(torch.full((2, 3), value), torch.tensor(held))


def addresses(state: State) -> list[int]:
    return [value.data_ptr() for value in state.state_dict().values()]


class TestRows:
    def test_saved_by_name_and_read_as_rows(self):
        state = State()
        state.prototypes = rows(1.0, [True, False])
        assert set(state.state_dict()) == {"prototypes.value", "prototypes.held"}
        assert isinstance(state.prototypes, Rows)
        assert state.prototypes.held.tolist() == [True, False]

    def test_set_again_they_are_written_in_place(self):
        state = State()
        state.prototypes = rows(1.0, [True, False])
        state.fix()
        before = addresses(state)
        state.prototypes = rows(2.0, [True, True])
        assert addresses(state) == before
        assert state.prototypes.value.tolist() == [[2] * 3] * 2
        state.prototypes.held[0] = False
        assert state.prototypes.held.tolist() == [False, True]

    def test_of_another_shape_they_are_refused(self):
        state = State()
        state.prototypes = rows(1.0, [True, False])
        with pytest.raises(ValueError, match="shape"):
            state.prototypes = Rows(torch.zeros(3, 3), torch.zeros(3, dtype=torch.bool))


class TestDicts:
    def state(self) -> State:
        state = State()
        state.means = {"body.0.weight": torch.zeros(2), "head/bias": torch.ones(3)}
        state.fix()
        return state

    def test_dots_are_slashes_where_a_name_is_saved(self):
        assert list(self.state().state_dict()) == ["means.body/0/weight", "means.head/bias"]

    def test_read_by_the_names_they_were_set_by(self):
        assert list(self.state().means) == ["body.0.weight", "head/bias"]

    def test_written_in_place_whole_or_one_by_one(self):
        state = self.state()
        before = addresses(state)
        state.means["body.0.weight"] = torch.ones(2)
        state.means["body.0.weight"] += 1
        assert state.means["body.0.weight"].tolist() == [2, 2]
        state.means = {"body.0.weight": torch.full((2,), 5.0), "head/bias": torch.zeros(3)}
        assert state.state_dict()["means.body/0/weight"].tolist() == [5, 5]
        assert addresses(state) == before

    def test_names_stay_as_they_are(self):
        state = self.state()
        with pytest.raises(KeyError):
            state.means["new"] = torch.zeros(2)
        with pytest.raises(KeyError, match="head/bias"):
            state.means = {"body.0.weight": torch.zeros(2)}
        with pytest.raises(ValueError, match="shape"):
            state.means["head/bias"] = torch.zeros(1)
        with pytest.raises(AttributeError, match="others"):
            state.others = {"a": torch.zeros(1)}

    def test_names_that_would_be_saved_as_one_are_refused(self):
        with pytest.raises(ValueError, match="a/b"):
            State().means = {"a.b": torch.zeros(1), "a/b": torch.zeros(1)}

    def test_restored_and_copied_with_the_rest(self):
        state = self.state()
        twin = copy.deepcopy(state)
        twin.means["head/bias"] += 1
        assert state.means["head/bias"].tolist() == [1, 1, 1]
        before = addresses(state)
        restore(state.state_dict(), twin.state_dict(), "state")
        assert state.means["head/bias"].tolist() == [2, 2, 2]
        assert addresses(state) == before

    def test_an_empty_one(self):
        state = State()
        state.means = {}
        assert len(state.means) == 0
        assert state.state_dict() == {}
