"""Runs what the documentation shows, so that no page shows what does not run.

    python docs/execute.py [PAGE...]        all pages, or those of these names, such as quickstart

Blocks of code whose fence says `bash run` or `python run` are executed, page by page, each page in a folder of its own;
the commands of `bash fails` must end with status 2. A block `text output` after one of them shows what it printed. This
script writes those blocks anew; the tests compare them, except for their numbers. A block with a line `...` leaves out
what stands there and is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from pluribus.cli import main as pluribus
from pluribus.data import datasets
from pluribus.data.partitions import PARTITIONS
from pluribus.method import hyperparameters, methods
from pluribus.models import zoo
from pluribus.settings import flag_name

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("*.md")])
FENCE = re.compile(
    r"^```(?P<kind>bash run|bash fails|python run|text output)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
COLUMNS = "100"
MANY = 8  # rounds, or steps of an attack
LARGE = 50  # rows in a batch: a fifth of the steps that most commands take by default
QUICK = {"warmup": 1, "matched_batch": 10**6}  # of methods that have them: one round, and a model in every round
REGISTRIES: tuple[dict[str, Any], ...] = (zoo._entries, datasets._entries, PARTITIONS)


@dataclass(frozen=True)
class Shown:
    """A block of output on a page, where its text stands, and what was really printed."""

    start: int
    end: int
    page_says: str
    really: str


def run_page(text: str, rounds: int | None = None) -> Iterator[Shown]:
    """Run all blocks of a page in the current folder, in order, and yield every output that the page shows.

    `rounds` is for commands that do not say how many, and for runs that have many. Commands that do not say otherwise
    then take large batches and a short warm-up, too. But for numbers they print the same.
    """
    script = ModuleType("__main__")  # a reader's own classes are found in it
    printed = ""
    for block in FENCE.finditer(text):
        if block["kind"] == "text output":
            yield Shown(block.start("text"), block.end("text"), block["text"], printed)
        else:
            with _as_main(script):
                printed = _printed_by(block["kind"], block["text"], vars(script), rounds)


@contextlib.contextmanager
def _as_main(script: ModuleType) -> Iterator[None]:
    before = sys.modules["__main__"]
    sys.modules["__main__"] = script
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _printed_by(kind: str, source: str, names: dict[str, Any], rounds: int | None) -> str:
    printed = io.StringIO()
    catch = contextlib.redirect_stderr if kind == "bash fails" else contextlib.redirect_stdout
    with catch(printed):
        if kind == "python run":
            exec(compile(shortened(source, rounds), "<documentation>", "exec"), names)
            return printed.getvalue()
        for command in commands(source):
            status = _status(command if rounds is None else _shortened(command, rounds))
            if status != (2 if kind == "bash fails" else 0):
                raise AssertionError(f"`{shlex.join(command)}` ended with status {status}")
    return printed.getvalue()


def commands(source: str) -> list[list[str]]:
    """The commands of a block of shell, one per line; a backslash joins lines."""
    lines = source.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _shortened(command: list[str], rounds: int) -> list[str]:
    if command[:2] != ["pluribus", "run"] or "--config" in command:
        return command
    command = [_fewer(word, rounds) if before == "--rounds" else word for before, word in pairwise(["", *command])]
    usual = {"rounds": rounds, "batch_size": LARGE}
    if command[2] in methods():
        own = hyperparameters(methods()[command[2]]())
        usual |= {name: value for name, value in QUICK.items() if name in own}
    flags = {flag_name(name): str(value) for name, value in usual.items()}
    return command + [word for flag, value in flags.items() if flag not in command for word in (flag, value)]


def shortened(source: str, rounds: int | None) -> str:
    """Python code with this many rounds, and steps of an attack, where it has many. None: the code as it is."""
    if rounds is None:
        return source
    places = r'(\brounds=|"rounds": |\bsteps=)(\d+)'
    return re.sub(places, lambda found: found[1] + _fewer(found[2], rounds), source)


def _fewer(number: str, rounds: int) -> str:
    return str(rounds) if int(number) > MANY else number


def _status(command: list[str]) -> int:
    if command[0] != "pluribus":
        raise AssertionError(f"only pluribus is run in the documentation, not `{shlex.join(command)}`")
    try:
        return pluribus(command[1:])
    except SystemExit as exit:  # `--help` and wrong flags leave this way
        return int(exit.code or 0)


def lines_of(output: str) -> list[str]:
    """Output without what may differ between two runs: numbers, units of bytes, and the width of columns."""
    plain = re.sub(r"\d+(\.\d+)?( [kMG]?B\b)?", "0", output.strip())
    lines = [re.sub(r"\s+", " ", line).strip() for line in plain.splitlines()]
    return [line for line in lines if line]


def agrees(page_says: str, really: str) -> bool:
    """Whether an output on a page is what was printed, but for numbers and for what `...` leaves out."""
    pattern = "".join(r"(?:[^\n]*\n)*" if line == "..." else re.escape(line) + "\n" for line in lines_of(page_says))
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines_of(really))) is not None


@contextlib.contextmanager
def reader() -> Iterator[Path]:
    """Where a reader stands who follows a page: a folder of its own, with `examples/` in it."""
    before, path, columns = Path.cwd(), sys.path[:], os.environ.get("COLUMNS")
    known = [(registry, set(registry)) for registry in REGISTRIES]
    with TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        os.chdir(folder)
        os.environ["COLUMNS"] = COLUMNS
        sys.path.insert(0, str(ROOT))
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            sys.path[:] = path
            for registry, names in known:
                for name in registry.keys() - names:
                    del registry[name]  # a page registered it
            for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
                del sys.modules[name]  # it was imported from a folder that is about to go
            os.environ.pop("COLUMNS")
            if columns is not None:
                os.environ["COLUMNS"] = columns


def main() -> None:
    """Write every shown output anew."""
    wanted = sys.argv[1:]
    for page in PAGES:
        if wanted and page.stem not in wanted:
            continue
        text = page.read_text(encoding="utf-8")
        if not FENCE.search(text):
            continue
        with reader():
            shown = [one for one in run_page(text) if "...\n" not in one.page_says]
        for one in reversed(shown):
            text = text[: one.start] + _tidy(one.really) + text[one.end :]
        if shown:
            page.write_text(text, encoding="utf-8")
        print(f"executed {page.relative_to(ROOT)}")


def _tidy(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.strip("\n").splitlines()) + "\n"


if __name__ == "__main__":
    main()
