"""The ledger: sums by hand, and a ledger read back from its lines is the same ledger."""

from __future__ import annotations

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import run_tiny
from pluribus.internal.ledger import Ledger
from pluribus.message import Field, Message, encode
from pluribus.storage.files import read_lines

HEADER = "(header)"


def message_bytes(**sizes: int) -> bytes:
    """A message with vectors of so many floats."""
    fields = {name: torch.zeros(size) for name, size in sizes.items()}
    return encode(Message(fields), {name: Field((size,)) for name, size in sizes.items()}, "me")


SMALL, LARGE = message_bytes(a=1), message_bytes(a=1, b=10)
SMALL_HEADER, LARGE_HEADER = len(SMALL) - 4, len(LARGE) - 44


def filled() -> Ledger:
    ledger = Ledger()
    ledger.add(0, 0, 0, "down", SMALL)
    ledger.add(0, 0, 0, "up", LARGE)
    ledger.add(0, 1, 7, "up", LARGE)
    ledger.add(1, 0, 7, "up", SMALL)
    ledger.add(1, 0, 7, "evaluation", LARGE)
    return ledger


def contents(ledger: Ledger) -> tuple:
    return list(ledger.entries()), ledger.layouts, ledger.total


class TestSums:
    def test_total_is_what_was_serialized(self):
        assert filled().total == {"down": len(SMALL), "up": 2 * len(LARGE) + len(SMALL), "evaluation": len(LARGE)}

    def test_by_direction(self):
        assert filled().by("direction") == filled().total

    def test_by_round(self):
        assert filled().by("round") == {0: len(SMALL) + 2 * len(LARGE), 1: len(SMALL) + len(LARGE)}
        assert filled().by("round", "up") == {0: 2 * len(LARGE), 1: len(SMALL)}

    def test_by_client(self):
        assert filled().by("client") == {0: len(SMALL) + len(LARGE), 7: 2 * len(LARGE) + len(SMALL)}
        assert filled().by("client", "down") == {0: len(SMALL)}

    def test_by_tensor(self):
        assert filled().by("tensor") == {"a": 5 * 4, "b": 3 * 40, HEADER: 2 * SMALL_HEADER + 3 * LARGE_HEADER}
        assert filled().by("tensor", "up") == {"a": 3 * 4, "b": 2 * 40, HEADER: SMALL_HEADER + 2 * LARGE_HEADER}

    def test_entries_in_the_order_of_transfer(self):
        entries = list(filled().entries())
        assert len(entries) == 2 * 2 + 3 * 3
        assert [e for e in entries if e.exchange == 1] == entries[5:8]
        assert {e.client for e in entries[5:8]} == {7}
        assert entries[0]._replace(tensor="", bytes=0) == (0, 0, 0, "down", "", 0)

    def test_equal_layouts_are_kept_once(self):
        ledger = filled()
        assert len(ledger.layouts) == 2
        ledger.add(2, 0, 3, "down", message_bytes(a=1, b=10))
        assert len(ledger.layouts) == 2
        ledger.add(2, 0, 3, "down", message_bytes(a=2, b=10))
        assert len(ledger.layouts) == 3


def through_a_file(lines: list[dict]) -> list[dict]:
    return [json.loads(json.dumps(line)) for line in lines]


class TestReplay:
    def test_an_equal_ledger_comes_back(self):
        ledger, again = filled(), Ledger()
        for line in through_a_file(ledger.flush()):
            again.replay(line)
        assert contents(again) == contents(ledger)

    def test_what_is_replayed_is_not_written_again(self):
        ledger, again = filled(), Ledger()
        for line in ledger.flush():
            again.replay(line)
        assert again.flush() == []

    def test_a_known_layout_stays_known_after_replay(self):
        ledger, again = filled(), Ledger()
        for line in through_a_file(ledger.flush()):
            again.replay(line)
        for one in (ledger, again):
            one.add(2, 0, 1, "up", SMALL)
        assert contents(again) == contents(ledger)
        assert again.flush() == ledger.flush()

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.integers(0, 1),
                st.integers(0, 4),
                st.sampled_from(["up", "down", "evaluation"]),
                st.sampled_from([SMALL, LARGE, message_bytes(b=3), message_bytes()]),
            )
        ),
        st.integers(1, 4),
    )
    def test_any_transfers_flushed_at_any_time(self, transfers, every):
        ledger, again, lines = Ledger(), Ledger(), []
        for count, transfer in enumerate(transfers):
            ledger.add(*transfer)
            if count % every == 0:
                lines += ledger.flush()
        for line in through_a_file(lines + ledger.flush()):
            again.replay(line)
        assert contents(again) == contents(ledger)
        for column in ("round", "client", "direction", "tensor"):
            assert sum(ledger.by(column).values()) == sum(ledger.total.values())

    def test_the_file_of_a_run(self):
        result = run_tiny("fedgh")
        again = Ledger()
        for line in read_lines(result.folder / "traffic.jsonl"):
            again.replay(line)
        assert contents(again) == contents(result.ledger)
        assert again.by("round", "up") == {r["round"]: r["bytes"]["up"] for r in result.history}
        assert len(result.ledger.layouts) < len(list(result.ledger.entries()))
