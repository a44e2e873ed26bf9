"""What a run says of its progress where there is no terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import select
from itertools import accumulate
from pathlib import Path

import pytest
from rich.console import Console

from conftest import few_digits, run_tiny
from pluribus.cli.log import lines_on_stderr
from pluribus.track.lines import Lines, Pace
from processes import start
from terminal import python

RUN = ["run", "fedgh", "--data", few_digits(), "--clients", "2", "--models", "mlp-64", "--rounds", "3"]
LINE = re.compile(
    r"^\d\d:\d\d:\d\d fedgh (\d) of 3 rounds: test accuracy 0\.\d{3}, loss \d+\.\d{3}, "
    r"up [\d.]+ k?B, down [\d.]+ k?B, \d+\.\d\d s per round(, \d+:\d\d:\d\d left)?$"
)


def test_a_pipe_gets_the_first_and_the_last_round(tmp_path: Path) -> None:
    answer = python("-m", "pluribus", *RUN, "--out", tmp_path / "run")
    assert answer.code == 0
    found = [LINE.match(line) for line in answer.err.splitlines()]
    assert all(found), answer.err
    assert [one and (one[1], one[2] is None) for one in found] == [("1", False), ("3", True)]
    assert "━" not in answer.err + answer.out


def test_quiet_leaves_the_result_alone(tmp_path: Path) -> None:
    process = start(*RUN, "--out", tmp_path / "run", "--quiet")
    assert (process.wait(), process.err) == (0, "")
    assert process.out.split()[:2] == ["client", "model"]
    assert "Saved" in process.out
    again = start("resume", tmp_path / "run", "--quiet")
    assert (again.wait(), again.err, again.out) == (0, "", process.out)


def test_python_prints_nothing_unless_logging_is_configured() -> None:
    call = f"pluribus.run('fedgh', data={few_digits()!r}, clients=2, models='mlp-64', rounds=2, device='cpu')"
    configured = "print('-', file=sys.stderr)\nlogging.basicConfig(level='INFO')"
    told = python("-c", f"import logging, sys\nimport pluribus\n{call}\n{configured}\n{call}")
    assert (told.code, told.out) == (0, "")
    silent, *lines = told.err.splitlines()
    assert silent == "-"
    assert [line.split()[0] for line in lines] == ["INFO:pluribus:fedgh"] * 2


def test_a_terminal_gets_a_bar_and_no_lines(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    where = {"terminal": os.ttyname(theirs), "env": {"TERM": "xterm", "COLUMNS": "100"}}
    process = start(*RUN, "--out", tmp_path / "run", **where)
    shown = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    assert process.wait() == 0
    assert "━" in shown.decode()
    assert "of 3 rounds" not in shown.decode()


def test_compare_logs_the_end_of_each_run(tmp_path: Path) -> None:
    flags = ["--data", few_digits(), "--clients", "2", "--models", "mlp-64", "--rounds", "1", "--seeds", "1"]
    words = ["compare", "fedgh", "local", *flags, "--jobs", "1", "--out"]
    told = start(*words, tmp_path / "a")
    assert told.wait() == 0
    done = [line for line in told.err.splitlines() if "1 of 1 rounds, done" in line]
    assert [line.split()[1] for line in done] == ["fedgh-0:", "local-0:"]
    assert done[-1].endswith("2 of 2 runs have ended")
    assert "━" not in told.err
    quiet = start(*words, tmp_path / "b", "--quiet")
    assert (quiet.wait(), quiet.err) == (0, "")


def test_a_line_is_due_first_and_ten_seconds_after_the_last() -> None:
    times = iter([0.0, 9.9, 10.0, 19.9, 19.9, 25.0, 29.9])
    pace = Pace(lambda: next(times))
    assert [pace.is_due() for _ in range(4)] == [True, False, True, False]
    assert pace.is_due(certainly=True)
    assert [pace.is_due() for _ in range(2)] == [False, True]


def test_seconds_per_round_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """The clock is asked at the start, then twice per round. A round takes four seconds, and a run has five of them."""
    times = accumulate([0.0, *[4.0, 0.0] * 5])
    lines = Lines(Console(file=io.StringIO()), clock=lambda: next(times))
    with caplog.at_level(logging.INFO, "pluribus"):
        run_tiny("fedgh", rounds=5, observers=[lines])
    ends = [record.getMessage().rpartition("B, ")[2] for record in caplog.records if record.name == "pluribus"]
    assert ends == ["4.00 s per round, 0:00:16 left", "4.00 s per round, 0:00:04 left", "4.00 s per round"]


def test_the_command_line_leaves_the_logger_as_it_was() -> None:
    logger = logging.getLogger("pluribus")
    before = logger.level, logger.propagate, list(logger.handlers)
    with lines_on_stderr():
        assert logger.isEnabledFor(logging.INFO)
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
