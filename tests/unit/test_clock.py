"""Where time goes, on a clock that is moved by hand."""

from __future__ import annotations

import contextlib

import pytest

from pluribus.internal.clock import Clock


@pytest.fixture
def tick(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pluribus.internal.clock.time.perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_time_belongs_to_the_innermost_span(tick):
    clock = Clock()
    tick(1)
    with clock("evaluation"):
        tick(2)
        with clock("communication"):
            tick(4)
        tick(8)
        with clock("communication"):
            tick(16)
    with clock("server"):
        tick(32)
    tick(64)
    assert clock.spans() == {"compute": 0, "communication": 20, "server": 32, "evaluation": 10}
    assert clock.seconds() == 127


def test_shares_are_looked_at_when_the_span_ends(tick):
    clock = Clock()
    shares = {"compute": 0.0, "communication": 0.0}
    with clock.apportion(shares):
        tick(4)
        with clock("communication"):
            tick(10)
        shares["compute"], shares["communication"] = 6.0, 2.0
    assert clock.spans()["compute"] == 3
    assert clock.spans()["communication"] == 11


def test_nothing_to_share_out_is_everything_else(tick):
    clock = Clock()
    with clock.apportion({"compute": 0.0}):
        tick(5)
    assert sum(clock.spans().values()) == 0
    assert clock.seconds() == 5


def test_an_error_ends_its_span(tick):
    clock = Clock()
    with contextlib.suppress(ValueError), clock("server"):
        tick(3)
        raise ValueError
    assert clock.spans()["server"] == 3
