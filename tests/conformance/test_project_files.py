"""Files for people and services around the repository: they agree with the code and call what exists."""

from __future__ import annotations

import re
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists(file: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    jobs = read(file)["jobs"]
    commands = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    for program, *words in commands:
        if program == "make":
            assert set(words) <= set(targets)
        elif "/" in program:
            assert shutil.which(ROOT / program)
    assert {needed for job in jobs.values() for needed in [job.get("needs")] if needed} <= set(jobs)


def test_the_workflows_are_seen() -> None:
    assert {file.stem for file in WORKFLOWS} == {"docs", "release", "tests"}


def test_commits_are_checked_as_make_lint_does() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    wanted = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()[1:]]
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == wanted


@pytest.fixture(scope="module")
def packaging() -> Any:
    """What setup.py defines."""
    return runpy.run_path(str(ROOT / "setup.py"))


READMES = {
    "a link": (
        "[Data and\npartitions](docs/data.md#all)",
        "[Data and\npartitions](https://a.b/blob/v1.2/docs/data.md#all)",
    ),
    "a picture": ("![A `run`](docs/run.svg)", "![A `run`](https://a.b/raw/v1.2/docs/run.svg)"),
    "elsewhere": ("[PyPI](https://pypi.org)", "[PyPI](https://pypi.org)"),
}


@pytest.mark.parametrize(("text", "resolved"), READMES.values(), ids=READMES)
def test_links_of_the_readme_are_absolute_on_pypi(packaging: Any, text: str, resolved: str) -> None:
    assert packaging["resolve_links"](text, "https://a.b", "1.2") == resolved


def test_a_package_without_a_url_has_no_relative_links(packaging: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = packaging["resolve_links"](readme, None, "1.2")
    assert packaging["LINK"].search(readme)
    assert not packaging["LINK"].search(plain)
    assert "Your own data, models and methods are Python objects." in plain
    assert packaging["list_urls"](None, "1.2") == {}


def test_the_urls_of_the_project_are_files_of_ours(packaging: Any) -> None:
    assert packaging["list_urls"]("https://a.b", "1.2")["Changelog"] == "https://a.b/blob/v1.2/CHANGELOG.md"
    assert [path for path in packaging["PAGES"].values() if not (ROOT / path).exists()] == []


def test_a_release_knows_its_url() -> None:
    build = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["build"]
    assert "PLURIBUS_URL" in build["env"]
