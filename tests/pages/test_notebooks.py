"""The notebooks of examples/ run, and their saved outputs are what they print."""

from __future__ import annotations

import copy
import json
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import notebooks  # noqa: E402

LARGEST = 300_000  # bytes
FEWER = {"privacy": 2}  # rounds: the longest, and what it shows is the same but for numbers
PATH = re.compile(r"(?<![\w.:/])/(?:root|home|tmp|work|usr|opt|var|Users)/|[A-Z]:\\\\")
MISSING = [name for name in ("nbclient", "ipykernel", "pandas", "matplotlib", "opacus") if find_spec(name) is None]
every_notebook = pytest.mark.parametrize("notebook", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


@cache
def saved(notebook: Path) -> dict[str, Any]:
    return json.loads(notebook.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in code_cells(notebook) for output in cell["outputs"]]


def shown_by(notebook: dict[str, Any], code: str) -> list[dict[str, Any]]:
    """The outputs of the first cell with this code."""
    return next(cell["outputs"] for cell in code_cells(notebook) if code in "".join(cell["source"]))


def test_there_are_five() -> None:
    names = ["compare-fairly", "first-steps", "my-data-and-models", "new-method", "privacy"]
    assert [path.stem for path in notebooks.NOTEBOOKS] == names


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")
@every_notebook
def test_a_notebook_runs_and_shows_what_is_saved(notebook: Path) -> None:
    executed = notebooks.execute(notebook, FEWER.get(notebook.stem))  # an error in a cell raises
    for cell, says, really in zip(
        code_cells(executed), notebooks.outputs_of(saved(notebook)), notebooks.outputs_of(executed), strict=True
    ):
        assert says == really, f"{''.join(cell['source'])}\npython docs/notebooks.py writes its outputs anew"
    assert not any(one.get("name") == "stderr" or one["output_type"] == "error" for one in outputs(executed))
    assert not PATH.search(json.dumps(executed))


@every_notebook
def test_saved_outputs_are_clean(notebook: Path) -> None:
    text, found = notebook.read_text(encoding="utf-8"), saved(notebook)
    assert len(text.encode()) < LARGEST
    assert notebooks.clean(copy.deepcopy(found)) == found
    assert [cell["execution_count"] for cell in code_cells(found)] == list(range(1, len(code_cells(found)) + 1))
    assert not any(one.get("name") == "stderr" or one["output_type"] == "error" for one in outputs(found))
    assert not PATH.search(text)
    assert "widget" not in text


@every_notebook
def test_progress_is_text(notebook: Path) -> None:
    bar, *_ = shown_by(saved(notebook), "result = pluribus.run(")
    assert (bar["output_type"], list(bar["data"])) == ("display_data", ["text/plain"])
    assert re.search(r"(\d+)/\1", "".join(bar["data"]["text/plain"]))


@every_notebook
def test_links_lead_to_files(notebook: Path) -> None:
    prose = "".join("".join(cell["source"]) for cell in saved(notebook)["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert links
    assert [link for link in links if not (notebook.parent / link).is_file()] == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("first-steps", "result.curve()"),
        ("new-method", "table.plot()"),
        ("new-method", "study.plot("),
        ("my-data-and-models", "axes.bar("),
        ("compare-fairly", "axes.scatter("),
        ("privacy", "axes.errorbar("),
        ("privacy", "imshow("),
    ],
)
def test_a_figure_is_shown_below_its_cell(name: str, code: str) -> None:
    found = saved(ROOT / "examples" / f"{name}.ipynb")
    assert [kind for one in shown_by(found, code) for kind in one["data"]].count("image/png") == 1


def test_the_ends_of_the_new_method_are_fedgh_and_local() -> None:
    (printed,) = shown_by(saved(ROOT / "examples" / "new-method.ipynb"), 'MixedHead(share=0.0), "local"')
    rows = [line.split() for line in "".join(printed["text"]).splitlines()]
    assert [name for name, _ in rows] == ["mixed-head", "fedgh", "mixed-head", "local"]
    assert rows[0][1] == rows[1][1] != rows[2][1] == rows[3][1]


def test_the_attack_of_the_private_notebook_beats_a_guess_without_privacy_alone() -> None:
    shown = shown_by(saved(ROOT / "examples" / "privacy.ipynb"), "pluribus.audit(")
    found = re.findall(r"inversion\): ([\d.]+) dB \(guess ([\d.]+)\)", "".join(shown[-1]["data"]["text/plain"]))
    assert [float(attack) > float(guess) for attack, guess in found] == [True, False]


# ---- how they are compared and cleaned -------------------------------------------------------------------------------


def one_cell(*shown: dict[str, Any]) -> dict[str, Any]:
    return {"cells": [{"cell_type": "code", "source": "1", "metadata": {"a": 1}, "outputs": list(shown)}]}


def stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text}


@pytest.mark.parametrize(
    ("says", "really", "same"),
    [
        ("mean 0.713", "mean 0.72", True),
        ("\x1b[32m0.9\x1b[0m up", "0.8 up", True),
        ("<td><b>0.9</b></td>", "<td>0.8</td>", True),
        ("p 0.04 worse", "p 0.06 no difference shown", True),
        ("mean 0.713", "worst 0.713", False),
        ("mean 0.713", "", False),
    ],
)
def test_outputs_are_compared_but_for_numbers(says: str, really: str, same: bool) -> None:
    a, b = (notebooks.outputs_of(one_cell(stream(text))) for text in (says, really))
    assert (a == b) is same


def test_a_table_or_figure_that_is_missing_is_noticed() -> None:
    figure = {"output_type": "display_data", "data": {"image/png": "abc", "text/plain": "<Figure>"}}
    other = {"output_type": "display_data", "data": {"image/png": "xyz", "text/plain": "<Figure>"}}
    assert notebooks.outputs_of(one_cell(figure)) == notebooks.outputs_of(one_cell(other))
    assert notebooks.outputs_of(one_cell(figure)) != notebooks.outputs_of(one_cell())


def test_times_are_left_out() -> None:
    bar = " fedgh 5/5 0.8 \x1b[33m01:07\x1b[0m"
    facts = "  rounds    5\n  seconds   67.8\n"
    data = {"text/plain": facts, "text/html": "seconds: 67.8<br>", "image/png": "seconds: 67.8"}
    cleaned = notebooks.clean(one_cell(stream(bar), {"output_type": "execute_result", "data": data}))
    assert cleaned["metadata"]["kernelspec"]["name"] == "python3"
    assert cleaned["cells"][0]["metadata"] == {}
    assert cleaned["cells"][0]["outputs"][0]["text"] == " fedgh 5/5 0.8 \x1b[33m--:--\x1b[0m"
    assert cleaned["cells"][0]["outputs"][1]["data"] == {
        "text/plain": "  rounds    5\n  seconds   -\n",
        "text/html": "seconds: -<br>",
        "image/png": "seconds: 67.8",
    }
