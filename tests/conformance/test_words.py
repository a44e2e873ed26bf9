"""Refusals in Python's words: every sentence that names a flag or a command reads well without them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import pluribus
from conftest import tiny
from pluribus.cli import main
from pluribus.data.reading import ROLES
from pluribus.errors import ConflictError, PluribusError, UnfinishedError, speaking_flags
from pluribus.experiment import Experiment
from pluribus.internal.words import NO_VALUE, in_python
from pluribus.method import methods
from pluribus.models import entries
from refusals import refused

ROOT = Path(pluribus.__file__).parent
FLAG = re.compile(r"(?<![^\s(])--(?:no-)?([a-z][a-z0-9-]*)(?: ([a-z][\w-]*))?")
FUNCTIONS = (pluribus.run, pluribus.compare, pluribus.tune, pluribus.bench, pluribus.predict, pluribus.write_report)
# of `pluribus watch`, of every command, of `compare`, and of every command that opens a folder
ON_THE_COMMAND_LINE = {"port", "help", "config", "set", "allow"}


# ---- all sentences of the library ------------------------------------------------------------------------------------


@cache
def sentences() -> dict[str, str]:
    """Every text in a function of the library that names a flag or a command, by its file and line."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in ("cli", "sites"):  # no part of the Python API
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for line, text in texts(function):
                    if (FLAG.search(text) or re.search(r"pluribus [a-z]+ ", text)) and "pluribus serve" not in text:
                        found[f"{path.relative_to(ROOT)}:{line}"] = text
    return found


def texts(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(function))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in skipped:
            yield node.lineno, fill(node)


def fill(node: ast.AST) -> str:
    """A text whose placeholders are numbers, or nothing if one is a part of a word."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    text = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else ():
        if isinstance(part, ast.FormattedValue):
            text += "--lr" if "flag_name" in ast.unparse(part) else "7" if not text or text[-1] in " '(" else ""
        else:
            text += fill(part)
    return text


def choices(hint: Any) -> list[str]:
    """The words of a Literal, or of those in a union."""
    return [hint] if isinstance(hint, str) else [word for one in get_args(hint) for word in choices(one)]


@cache
def accepted() -> dict[str, list[str]]:
    """The words that each setting and argument takes; none if it takes any, or numbers."""
    found: dict[str, list[str]] = {}
    for cls in (Experiment, *methods().values()):
        hints: dict[str, Any] = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            found.setdefault(field.name, []).extend(choices(hints[field.name]))
    for function in FUNCTIONS:
        for name in inspect.signature(function).parameters:
            found.setdefault(name, [])
    found["device"] += ["cpu"]
    found["split"] += ["none"]
    found["columns"] += ROLES
    found["tokenizer"] += ["words"]
    found["models"] += list(entries())
    found["embeddings"] += ["pca", "tsne"]
    found["sampler"] += ["tpe", "random", "grid"]
    return found


def test_the_sentences_are_seen() -> None:
    assert len(sentences()) > 100
    assert any(text.startswith("--test common needs") for text in sentences().values())


def test_no_flag_is_left_in_python() -> None:
    for where, sentence in sentences().items():
        text = in_python(sentence)
        assert "--" not in text, (where, text)
        assert in_python(text) == text, (where, "twice is as good as once")


def test_every_flag_is_a_setting_and_the_next_word_is_one_of_its_values_or_none() -> None:
    for where, sentence in sentences().items():
        for flag, word in FLAG.findall(sentence):
            name = flag.replace("-", "_")
            assert name in accepted() or name in ON_THE_COMMAND_LINE, (where, flag)
            known = not word or word in NO_VALUE or word in accepted()[name]
            assert known, f"{where}: add '{word}' to NO_VALUE, if it is no value"


def test_no_value_is_taken_for_a_word_of_the_sentence() -> None:
    assert not {word for words in accepted().values() for word in words} & {*NO_VALUE}
    assert not [name for name in accepted() if name.startswith("no_")], "--no-x is x=False"


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Lower --lr.", "Lower lr=."),
        ("if you trust it, add --allow-code.", "if you trust it, add allow_code=True."),
        ("allow this path alone with --allow my.net.", 'allow this path alone with allow_code=["my.net"].'),
        ("use pluribus resume runs/a --allow-code.", 'use pluribus.resume("runs/a", allow_code=True).'),
        ("pluribus resume runs/a --allow a.b,c.d", "pluribus.resume(\"runs/a\", allow_code=['a.b', 'c.d'])"),
        ("fewer clients (--clients) or", "fewer clients (clients=) or"),
        ("--workers is for CPUs: add --device cpu.", 'workers= is for CPUs: add device="cpu".'),
        ("--test common needs test data: --test-fraction", 'test="common" needs test data: test_fraction='),
        ("use --rounds 30 or more", "use rounds=30 or more"),
        ("--server-lr 1e-05 diverges", "server_lr=1e-05 diverges"),
        ("use --optimizer sgd --momentum 0.", 'use optimizer="sgd", momentum=0.'),
        ("one model (--models mlp-64)", 'one model (models="mlp-64")'),
        ("--models my.net,cnn-16, not x", 'models="my.net,cnn-16", not x'),
        ("--models a-net is", 'models="a-net" is'),
        ("--models ['a', 'b'], not c", "models=['a', 'b'], not c"),
        ("was run with --alpha unset, not 1.0", "was run with alpha=None, not 1.0"),
        ("--weights /w/x has no file", 'weights="/w/x" has no file'),
        ("--no-kl and --labels none leave nothing", 'kl=False and labels="none" leave nothing'),
        ("leave out --share-prompts and --share-head.", "leave out share_prompts= and share_head=."),
        ("--aux-model: unknown model", "aux_model: unknown model"),
        ("unknown setting in --space 'x'.", "unknown setting in space= 'x'."),
        ("not '--lr 3'.", "not '--lr 3'."),
        ("a--b and 1 -- 2", "a--b and 1 -- 2"),
        ("pluribus list groups shows all", "pluribus.list_groups() shows all"),
        ("pluribus run fedgh --help shows all", "help(pluribus.Experiment) shows all"),
        ("pluribus compare --help shows all", "help(pluribus.compare) shows all"),
        ("Resume with: pluribus resume /r/a.b", 'Resume with: pluribus.resume("/r/a.b")'),
        ("Resume it (pluribus resume a) or", 'Resume it (pluribus.resume("a")) or'),
        ("pluribus resume finishes a run.", "pluribus.resume() finishes a run."),
        ("Start again: pluribus run --config r/config.toml", 'Start again: pluribus.run(config="r/config.toml")'),
        ("pluribus data check lists them all.", "pluribus.check_data() lists them all."),
        ("with pluribus serve fedgh --config f.toml.", "with pluribus serve fedgh --config f.toml."),
        ("Use the same command with --out /r to resume.", 'Use the same call with out="/r" to resume.'),
    ],
)
def test_words(written: str, shown: str) -> None:
    assert in_python(written) == shown
    assert in_python(shown) == shown


# ---- the two interfaces ----------------------------------------------------------------------------------------------


def test_python_says_arguments_and_the_command_line_says_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with refused(ConflictError, "--test common") as caught:
        pluribus.run("local", test="common", test_fraction=0)
    assert str(caught.value) == 'test="common" needs test data: test_fraction= must be above 0.'
    assert main(["run", "local", "--test", "common", "--test-fraction", "0"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value.sentence}\n"
    assert "test=" in str(caught.value), "the command has ended"


def test_a_sentence_of_another_process_is_shown_in_the_words_of_this_one() -> None:
    sent = pickle.dumps(PluribusError("Lower --lr."))
    assert str(pickle.loads(sent)) == "Lower lr=."
    with speaking_flags():
        assert str(pickle.loads(sent)) == "Lower --lr."


def test_a_sentence_of_another_sentence_is_converted_once(tmp_path: Path) -> None:
    settings = tiny(lr=1e30, models="mlp-64", out=str(tmp_path / "all"))
    with refused(UnfinishedError, "Lower --lr.", "--out") as caught:
        pluribus.compare(["fedgh"], seeds=1, jobs=1, progress=False, **settings)
    advice = f'Use the same call with out="{tmp_path}/all" to resume.'
    assert str(caught.value).endswith(f"Lower lr=. The other runs are kept. {advice}")
