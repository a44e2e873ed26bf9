"""Scripts of `pluribus completion`, in the shells that read them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from conftest import new_folder
from pluribus.cli import COMMANDS, USAGE
from pluribus.cli.completion import SHELLS, WITHOUT_FORM, Words, find_words
from pluribus.errors import MissingSettingError, UnknownNameError
from pluribus.method import hyperparameters, methods
from pluribus.settings import flag_name
from terminal import Terminal

pytestmark = pytest.mark.xdist_group("completion")  # one process makes what tests share


@cache
def words() -> Words:
    return find_words(COMMANDS, USAGE)


@cache
def script(shell: str) -> Path:
    path = Path(new_folder()) / f"pluribus.{shell}"
    path.write_text(SHELLS[shell](words()))
    return path


def in_shell(shell: str, *code: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-c", "\n".join(code)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split("\n")


def complete_in_bash(*typed: str) -> list[str]:
    call = f"COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(typed) - 1}; _pluribus"
    found = in_shell("bash", f"source {script('bash')}", call, 'printf "%s\\n" "${COMPREPLY[@]}"')
    return [word for word in found if word]


def complete_in_zsh(*typed: str) -> list[str]:
    call = f"COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(typed) - 1}; _pluribus"
    body = f'emulate -L sh; {call}; print -l -- "${{COMPREPLY[@]}}"'  # as bashcompinit calls it
    found = in_shell("zsh", f"source {script('zsh')}", f"ask() {{ {body}; }}", "ask")
    return [word for word in found if word and word.startswith(typed[-1])]  # zsh itself keeps those that match


def complete_in_fish(*typed: str) -> list[str]:
    line = shlex.quote(shlex.join(typed[:-1]) + " " + typed[-1])
    lines = in_shell("fish", f"source {script('fish')}", f"complete -C {line}")
    return [line.partition("\t")[0] for line in lines if line]  # an explanation follows the word


ASK = pytest.mark.parametrize("ask", [complete_in_bash, complete_in_zsh, complete_in_fish])


@ASK
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["re"], {"resume", "reproduce", "report"}),
        (["run", "fedg"], {"fedgen", "fedgh"}),
        (["compare", "local", "fedgh", "fedpr"], {"fedproto", "fedprox", "fedprox-matched"}),
        (["run", "fedgh", "--server-"], {"--server-lr", "--server-step"}),
        (["run", "fedproto", "--server-"], set()),
        (["run", "fedgh", "--data", "fas"], {"fashion-mnist"}),
        (["run", "fedgh", "--json", "--models", "tiny-v"], {"tiny-vit-32", "tiny-vit-48"}),
        (["run", "fedgh", "--optimizer", "ada"], {"adam", "adamw"}),
        (["bench", "fedgh", "--no-b"], {"--no-bare"}),
        (["tune", "fedgh", "--tri"], {"--trials"}),
        (["resume", "--track", "ml"], {"mlflow"}),
        (["list", "par"], {"partitions"}),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_words_are_completed(ask, typed: list[str], found: set[str]) -> None:  # type: ignore[no-untyped-def]
    assert set(ask("pluribus", *typed)) == found


def test_a_value_behind_an_equals_sign_is_completed_in_bash() -> None:
    assert complete_in_bash("pluribus", "run", "fedgh", "--optimizer", "=", "ams") == ["amsgrad"]
    assert "sgd" in complete_in_bash("pluribus", "run", "fedgh", "--optimizer", "=")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_syntax_is_that_of_the_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script(shell))], check=True)


def test_every_command_and_every_hyper_parameter_is_there() -> None:
    assert words().flags.keys() == words().commands.keys() == COMMANDS.keys()
    for name, cls in methods().items():
        flags = {one.name for one in (*words().flags["run"], *words().of_methods[name])}
        for setting in hyperparameters(cls()):
            assert {flag_name(setting), flag_name(f"no_{setting}")} & flags, f"{name}: {setting}"


@pytest.mark.parametrize("command", [name for name in WITHOUT_FORM if name != "completion"])
def test_flags_that_a_command_reads_by_itself_are_those_of_its_help(command: str, terminal: Terminal) -> None:
    known = {one.name for one in words().flags[command]}
    named = set(re.findall(r"--[a-z-]+", terminal(command, "--help").out))
    assert "--json" in named
    assert named <= known


def test_the_command_prints_a_script(terminal: Terminal) -> None:
    answer = terminal("completion", "bash")
    assert answer.code == 0
    assert answer.out == script("bash").read_text()
    terminal.refused("completion").check(MissingSettingError, "bash,zsh,fish")
    terminal.refused("completion", "bsh").check(UnknownNameError, "'bsh'", "'bash'")
