"""Errors of somebody's own code: they keep their type, and say in which round, at which client and on which line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pluribus
from conftest import few_digits, run_tiny
from pluribus import Message, Method
from pluribus.errors import MismatchError
from pluribus.internal.blame import at, blame_of, own_line, sentence_of
from pluribus.message import Field, Wire
from processes import start
from refusals import refused


@dataclass(frozen=True)
class Failing(Method):
    """Divides by zero in one of its functions; at a client, in round 1 and at client 2 alone."""

    where: str = ""

    def schema(self, task: Any, card: Any) -> Wire:
        return 1 / 0 if self.where == "schema" else Wire(down={"x": Field((1,))}, up={"x": Field((1,))})  # type: ignore[return-value]

    def setup(self, server: Any) -> None:
        assert self.where != "setup" or 1 / 0

    def download(self, server: Any, client: int) -> Message:
        assert self.where != "download" or 1 / 0
        return Message({"x": torch.ones(1)})

    def local_update(self, client: Any) -> Message:
        assert self.where != "local_update" or (client.t, client.card.id) != (1, 2) or 1 / 0
        return Message({"x": torch.ones(1)})

    def aggregate(self, server: Any, uploads: Any) -> None:
        assert self.where != "aggregate" or 1 / 0


def failing_model(shape: Any) -> Any:
    raise KeyError("no such layer")


def unfitting_model(shape: Any) -> Any:
    return torch.nn.Sequential(torch.nn.Flatten(), Unfitting())


class Unfitting(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 4)


def failing_data() -> Any:
    return [][1]


PLACES = {
    "schema": ("round 0", "client 0"),
    "setup": ("server",),
    "download": ("round 0", "server", "download for client 0"),
    "local_update": ("round 1", "client 2"),
    "aggregate": ("round 0", "server"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", PLACES)
def test_a_method_that_raises_says_where(where: str, workers: int) -> None:
    if workers == 2 and where != "local_update":
        pytest.skip("the others run in this process anyway")
    with pytest.raises(ZeroDivisionError) as caught:
        run_tiny(Failing(where), models="mlp-64", workers=workers)
    known = blame_of(caught.value)
    assert known is not None
    assert known.where == PLACES[where]
    assert re.match(rf"test_blame\.py, line \d+, in {where}: `.*1 / 0", known.line)
    assert known.frames.count("File ") == 1
    assert caught.value.__notes__[0] == known.note()
    assert all(word in known.note() for word in PLACES[where])


def test_a_builder_that_raises_says_for_which_client() -> None:
    with pytest.raises(KeyError) as caught:
        run_tiny("local", models="mlp-64,test_blame.failing_model")
    assert sentence_of(caught.value).startswith("client 1, model test_blame.failing_model: KeyError: 'no such layer' (")


def test_a_model_that_does_not_fit_names_the_line() -> None:
    with refused(MismatchError, "'test_blame.unfitting_model'", "1x8x8", "(test_blame.py, line ", ", in forward: `"):
        run_tiny("local", models="test_blame.unfitting_model")


def test_a_data_function_that_raises_is_named() -> None:
    with pytest.raises(IndexError) as caught:
        run_tiny("local", data="test_blame.failing_data")
    assert sentence_of(caught.value).startswith("data test_blame.failing_data: IndexError: list index out of range (")


def test_an_error_without_words_and_without_a_place() -> None:
    assert sentence_of(ValueError()) == "ValueError"
    assert sentence_of(ValueError("one\ntwo")) == "ValueError: one"
    assert own_line(ValueError()) == ""


def test_places_go_from_the_outside_inwards_and_none_is_told_twice() -> None:
    with pytest.raises(ValueError, match="x") as caught, at("round 1"), at("round 1", "client 2"), at("model a"):
        raise ValueError("x")
    known = blame_of(caught.value)
    assert known is not None
    assert known.where == ("round 1", "client 2", "model a")
    assert caught.value.__notes__ == [known.note()]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_line_says_it_first_and_shows_the_users_lines_alone(tmp_path: Path, workers: str) -> None:
    (tmp_path / "mine.py").write_text(
        "from pluribus import Method\n"
        "class Mine(Method):\n"
        "    def local_update(self, client):\n"
        "        return client.card.id / (client.t - client.card.id)\n"
    )
    words = ["run", "mine.Mine", "--data", few_digits(), "--clients", "2", "--models", "mlp-64", "--device", "cpu"]
    process = start(*words, "--workers", workers, "--json", cwd=tmp_path)
    assert process.wait() == 1
    heading, _, told = process.err.partition("error: ")
    assert "Traceback" not in heading
    first, *lines = told.splitlines()
    line = "mine.py, line 4, in local_update: `return client.card.id / (client.t - client.card.id)`"
    assert first == f"round 0, client 0: ZeroDivisionError: division by zero ({line})"
    assert json.loads(process.out) == {"error": first, "kind": "exception"}
    assert lines[0] == f'  File "{tmp_path / "mine.py"}", line 4, in local_update'
    assert "Traceback" not in told
    assert str(Path(pluribus.__file__).parent) not in told
