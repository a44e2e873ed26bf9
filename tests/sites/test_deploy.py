"""The image, the compose file and the systemd units: what they name exists, and nothing runs as root."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pluribus.cli import main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def instructions(name: str) -> list[str]:
    """What stands after this word in the Dockerfile."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8")))


def unit(file: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(file)
    return parser["Service"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """The words after `pluribus`, wherever it is started."""
    for name, service in compose()["services"].items():
        yield name, service["command"]
    for file in UNITS:
        program, *words = shlex.split(unit(file)["ExecStart"])
        assert Path(program).name == "pluribus"
        yield file.name, words


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_commands_and_their_flags_exist(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in ("serve", "join")
    with pytest.raises(SystemExit) as end:
        main([words[0], "--help"])
    assert not end.value.code
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    given = {word for word in words if word.startswith("--")}
    assert "--config" in given
    assert given <= known


def test_the_image_is_made_of_what_is_there() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = [source for words in instructions("COPY") for source in words.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src"} <= set(copied)  # to build the package
    extras = re.search(r'/tmp/source\[(.*)\]"', DOCKERFILE)
    assert extras is not None
    assert {"flower", *extras[1].split(",")} <= declared["optional-dependencies"].keys()
    assert [tuple(yaml.safe_load(words)) for words in instructions("ENTRYPOINT")] == [("pluribus",)]
    assert "pluribus" in declared["scripts"]


def test_containers_run_as_a_user_without_rights_and_read_only() -> None:
    (user,) = instructions("USER")
    for name, service in compose()["services"].items():
        assert service["user"] == user
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        mounts = [volume for volume in service["volumes"] if volume != f"{name}:/state"]
        assert all(mount["read_only"] for mount in mounts)
        assert not any(mount["bind"]["create_host_path"] for mount in mounts), "a folder that is missing is an error"
        assert {"/config"} <= {mount["target"] for mount in mounts} <= {"/config", "/data"}
        assert any(mount.startswith("/tmp:exec") for mount in service["tmpfs"]), "the fork server has scripts there"


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_units_run_as_a_user_without_rights(file: Path) -> None:
    service = unit(file)
    assert service["User"] == "pluribus"
    assert (service["ProtectSystem"], service["NoNewPrivileges"], service["CapabilityBoundingSet"]) == (
        "strict",
        "yes",
        "",
    )
    assert service["RestartPreventExitStatus"] == "2", "the status of a mistake in the settings"
    assert {file.stem for file in UNITS} == {"pluribus-serve", "pluribus-join"}
