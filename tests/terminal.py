"""The command line in this process: what it prints, and how it refuses.

from terminal import Terminal
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from pluribus import cli
from refusals import Refusal


@dataclasses.dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON object by the letter of the standard and nothing else."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is not JSON")

        assert self.out.endswith("}\n")
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=refuse)


class Terminal:
    """Calls `main` and keeps what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._kinds: list[str] = []

        def fail(sentence: str, kind: str, as_json: bool) -> None:
            self._kinds.append(kind)
            cli_fail(sentence, kind, as_json)

        cli_fail = cli.failures.fail
        monkeypatch.setattr(cli.failures, "fail", fail)

    def __call__(self, *argv: object) -> Answer:
        self._capsys.readouterr()
        try:
            code = cli.main([str(word) for word in argv])
        except SystemExit as leave:
            code = int(leave.code or 0)
        return Answer(code, *self._capsys.readouterr())

    def refused(self, *argv: object) -> Refusal:
        """The one sentence that bad input gets."""
        answer = self(*argv)
        assert answer.code == 2
        assert "Traceback" not in answer.err
        sentences = [line for line in answer.err.splitlines() if line.startswith("error: ")]
        assert answer.err.splitlines()[-1:] == sentences
        return Refusal.of(sentences[0].removeprefix("error: "), self._kinds[-1])


def python(*argv: object) -> Answer:
    """Python in a process of its own."""
    command = [sys.executable, *(str(word) for word in argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)
