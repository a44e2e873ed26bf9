"""Folders of other people: what their files name by dotted paths is not imported, unless the user allows it."""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import pluribus
from conftest import new_folder, run_tiny
from kit import StopAfter, StoppedError
from pluribus.errors import FileAccessError, ForeignCodeError, UserCodeError
from pluribus.report import write_report
from pluribus.report.numbers import run_folders
from pluribus.report.watch import make_server
from pluribus.storage.code import Named, find_code, how_to_resume
from processes import Process, start
from refusals import assert_facts, refused
from terminal import Terminal

SETTINGS = ("method", "data", "partition", "models")
# It leaves a trace when it is imported, and one when it is called.
TRAP = """
from pathlib import Path
from torch import nn
from pluribus import Dataset
from pluribus.data import load

HERE = Path(__file__).parent
(HERE / "imported").touch()

def undeclared(*args, **named):
    (HERE / "called").touch()
    return load("digits")

def declared() -> Dataset:
    (HERE / "called").touch()
    return load("digits")

def net(shape) -> nn.Module:
    (HERE / "called").touch()
    return nn.Flatten()

def parts(labels, clients, rng):
    (HERE / "called").touch()
    return [range(client, len(labels), clients) for client in range(clients)]
"""
DECLARED = {"data": "declared", "models": "net", "partition": "parts"}


@cache
def honest() -> Path:
    """A finished run of the embedded data, which is copied and changed."""
    folder = Path(new_folder())
    run_tiny("local", clients=2, rounds=2, out=str(folder), models="mlp-64", device="cpu", workers=1)
    return folder


class Foreign:
    """A folder in which one setting names a trap."""

    def __init__(self, place: Path, module: str) -> None:
        self.place, self.module, self.path = place, module, place / "run"
        (place / f"{module}.py").write_text(TRAP)
        shutil.copytree(honest(), self.path)
        (self.path / "started.json").unlink()

    def names(self, setting: str, function: str = "undeclared") -> str:
        """Let the setting name a function of the trap. Returns its dotted path."""
        file, path = self.path / "config.toml", f"{self.module}.{function}"
        lines = [f'{setting} = "{path}"' if line.startswith(f"{setting} = ") else line for line in _lines(file)]
        file.write_text("\n".join(lines) + "\n")
        return path

    def stop(self) -> None:
        """It is no longer finished."""
        (self.path / "result.json").unlink()

    @property
    def traces(self) -> list[str]:
        return [name for name in ("imported", "called") if (self.place / name).exists()]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Foreign:
    """The module can be imported by everyone, so only a refusal keeps it out. Its name is new: Python keeps modules."""
    monkeypatch.syspath_prepend(tmp_path)
    return Foreign(tmp_path, f"trap_{time.monotonic_ns()}")


ROWS = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
OPENED: dict[str, Callable[[Path], Any]] = {
    "resume": lambda path: pluribus.resume(path, progress=False),
    "load_model": lambda path: pluribus.load_model(path, client=0),
    "predict": lambda path: pluribus.predict(path, ROWS, client=0),
    "audit": lambda path: pluribus.audit(path, clients=1, steps=1),
    "result.model": lambda path: pluribus.load_result(path).model(0),
    "result.evaluate": lambda path: pluribus.load_result(path).evaluate(ROWS, [0], client=0),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("opened", OPENED)
def test_what_a_folder_names_is_not_imported(foreign: Foreign, opened: str, setting: str) -> None:
    path = foreign.names(setting)
    if opened == "resume":
        foreign.stop()
    with refused(ForeignCodeError, foreign.path / "config.toml", path, "allow"):
        OPENED[opened](foreign.path)
    assert foreign.traces == []


def test_hyper_parameters_name_models_too(foreign: Foreign) -> None:
    file = foreign.path / "config.toml"
    text = file.read_text().replace('method = "local"', 'method = "fedfree"').split("[hyper]")[0]
    file.write_text(f'{text}\n[hyper]\nglobal_model = "{foreign.module}.net"\n')
    with refused(ForeignCodeError, f"{foreign.module}.net"):
        pluribus.load_model(foreign.path, client=0)
    assert foreign.traces == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_result_a_report_and_a_live_page_are_shown_without_the_code(foreign: Foreign, setting: str) -> None:
    path = foreign.names(setting)
    assert pluribus.load_result(foreign.path).rounds == 2
    page, *_ = write_report([foreign.path], foreign.place / "page.html")
    assert_facts(page.read_text(), path, "--allow-code")
    with make_server(foreign.path) as server:
        _, make = server.served.find("/data.json") or pytest.fail("there is no data.json")
        assert_facts(make(), path, "--allow-code")
    assert foreign.traces == []


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_report_compares_nothing_whose_code_is_not_allowed(foreign: Foreign, setting: str) -> None:
    path, twin = foreign.names(setting), foreign.place / "twin"
    shutil.copytree(foreign.path, twin)
    config = (twin / "config.toml").read_text()
    (twin / "config.toml").write_text(re.sub("^lr = .*", "lr = 0.123", config, flags=re.MULTILINE))
    page, *_ = write_report([foreign.path, twin], foreign.place / "page.html", embeddings="none")
    assert_facts(page.read_text(), "not tested against each other", path)
    assert foreign.traces == []


def test_another_name_than_one_that_is_allowed_is_refused(foreign: Foreign) -> None:
    path = foreign.names("data")
    with refused(ForeignCodeError, path):
        pluribus.load_model(foreign.path, client=0, allow_code=["another.name"])
    assert foreign.traces == []


def test_a_model_file_names_no_code_either(foreign: Foreign, tmp_path: Path) -> None:
    out = Path(new_folder())
    builder = f"{foreign.module}.net"
    other_process = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        f"import pluribus\nr = pluribus.run('local', models='{builder}', clients=2, rounds=1, out={str(out)!r}, "
        f"device='cpu', workers=1, progress=False)\nr.save_model(0, {str(tmp_path / 'net.safetensors')!r})\n"
    )
    made = start(program=other_process)
    assert made.wait() == 0, made.err
    assert foreign.traces == ["imported", "called"]
    for name in foreign.traces:
        (tmp_path / name).unlink()
    with refused(ForeignCodeError, "net.safetensors", builder, "--allow-code"):
        pluribus.load_model(tmp_path / "net.safetensors")
    assert foreign.traces == []
    pluribus.load_model(tmp_path / "net.safetensors", allow_code=True)
    assert foreign.traces == ["imported", "called"]


# ---- permission ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", DECLARED)
def test_code_that_is_allowed_is_called_if_it_says_what_it_is(foreign: Foreign, setting: str) -> None:
    foreign.names(setting, DECLARED[setting])
    (foreign.path / "result.json").rename(foreign.place / "kept.json")
    with pytest.raises(pluribus.PluribusError):  # other data, rows or tensors than those of the run
        pluribus.load_model(foreign.path, client=0, round="last", allow_code=True)
    assert foreign.traces == ["imported", "called"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_code_that_is_allowed_is_not_called_if_it_does_not_say_what_it_is(foreign: Foreign, setting: str) -> None:
    path = foreign.names(setting)
    with refused(UserCodeError, path):
        pluribus.load_model(foreign.path, client=0, allow_code=True)
    assert foreign.traces == ["imported"]


def test_a_server_of_the_standard_library_is_no_data_set(foreign: Foreign) -> None:
    file = foreign.path / "config.toml"
    file.write_text(
        file.read_text().replace(next(x for x in _lines(file) if x.startswith("data")), 'data = "http.server.test"')
    )
    with refused(UserCodeError, "http.server.test", "-> Dataset"):
        pluribus.load_model(foreign.path, client=0, allow_code=True)


def test_a_path_that_is_given_again_is_called_as_it_is(foreign: Foreign) -> None:
    path = foreign.names("data")
    with pytest.raises(pluribus.PluribusError):  # more digits than the run had
        pluribus.load_model(foreign.path, client=0, allow_code=[path])
    assert foreign.traces == ["imported", "called"]


def test_the_code_that_this_process_was_given_is_no_other(foreign: Foreign) -> None:
    out, given = new_folder(), {"data": f"{foreign.module}.undeclared", "clients": 2, "rounds": 2, "device": "cpu"}
    with pytest.raises(StoppedError):
        pluribus.run("local", **given, checkpoint_every=1, out=out, observers=[StopAfter(0)], progress=False)
    assert pluribus.resume(out, progress=False).rounds == 2


# ---- the command line ------------------------------------------------------------------------------------------------


def command(place: Path, *argv: object) -> Process:
    """A command in a process of its own, whose working folder Python itself does not search. It has ended."""
    process = start(*argv, cwd=place)
    process.wait()
    return process


@pytest.mark.parametrize("argv", [["resume", "run"], ["predict", "run", "run", "--client", "0"]], ids=lambda a: a[0])
def test_a_command_refuses_code_in_one_sentence(foreign: Foreign, argv: list[str]) -> None:
    path = foreign.names("data")
    foreign.stop()
    done = command(foreign.place, *argv)
    assert done.wait() == 2
    assert_facts(done.err, path, "--allow-code")
    assert "Traceback" not in done.err
    assert foreign.traces == []
    if argv[0] == "resume":
        assert "pluribus resume run --allow-code" in done.err


def test_resume_with_permission_finds_code_in_the_working_folder(foreign: Foreign) -> None:
    path, run = foreign.names("data", "declared"), ["run", "local", "--clients", "2", "--rounds", "1", "--out", "own"]
    ran = command(foreign.place, *run, "--data", path, "--device", "cpu", "--workers", "1")
    assert ran.wait() == 0, ran.err
    (foreign.place / "own" / "result.json").unlink()
    for permission in (["--allow-code"], ["--allow", path]):
        done = command(foreign.place, "resume", "own", *permission)
        assert done.wait() == 0, done.err
        (foreign.place / "own" / "result.json").unlink()


def test_a_report_searches_no_library_in_the_working_folder(foreign: Foreign) -> None:
    path = foreign.names("data")
    (foreign.place / "jinja2.py").write_text("open('taken', 'w')")
    program = """
import sys
from pluribus.cli import main
assert "jinja2" not in sys.modules
sys.exit(main(sys.argv[1:]))
"""
    done = start("report", "run", "--out", "page.html", program=program, cwd=foreign.place)
    assert done.wait() == 0, done.err
    assert_facts((foreign.place / "page.html").read_text(), path, "--allow-code")
    assert foreign.traces == []
    assert not (foreign.place / "taken").exists()


def test_watch_imports_nothing(foreign: Foreign) -> None:
    foreign.names("method")
    page = start("watch", "run", cwd=foreign.place)
    while "\n" not in page.out:
        assert page.poll() is None, page.err
        time.sleep(0.01)
    page.kill()
    assert page.out.startswith("http://")  # its page was made once
    assert foreign.traces == []


@pytest.mark.parametrize("name", [".", "..", ".x", "x.", "a..b", "./x"])
def test_a_name_of_dots_is_no_dotted_path(terminal: Terminal, name: str) -> None:
    terminal.refused("bench", name).check(UserCodeError, name)


def test_a_folder_that_cannot_be_searched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(Path, "glob", fail)
    with refused(FileAccessError, tmp_path, "Invalid argument"):
        run_folders(tmp_path)


# ---- which settings are code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"method": "fedgh", "data": "digits", "partition": "iid", "models": "small"}, []),
        ({"data": "rows.csv", "public_data": "folder/a.npz", "models": "timm:vit.augreg,hf:a/b.c"}, []),
        ({"hyper": {"mu": 0.1, "steps": "0.1,0.2", "text": "a.b"}}, [Named("model", "a.b")]),
        ({"models": "mlp-64, my.net"}, [Named("model", "my.net")]),
        (
            {"models": {0: "my.net", 1: "mlp-64"}, "public_data": "my.rows"},
            [Named("data", "my.rows"), Named("model", "my.net")],
        ),
        ({"models": ["my.net"], "partition": "my.parts"}, [Named("partition", "my.parts"), Named("model", "my.net")]),
        ({"method": "my-file.Own"}, [Named("method", "my-file.Own")]),
        ({"data": "given:a.b", "partition": "given:a.b", "models": ["given:a.b"]}, []),
    ],
)
def test_dotted_paths_are_code(settings: dict[str, Any], found: list[Named]) -> None:
    assert list(find_code(settings)) == found


def test_the_command_that_resumes_names_the_code_again() -> None:
    assert how_to_resume(Path("runs/a"), {"method": "fedgh"}) == "pluribus resume runs/a"
    settings = {"method": "my.Own", "data": "my.rows"}
    assert how_to_resume(Path("runs/a"), settings) == "pluribus resume runs/a --allow my.Own,my.rows"
