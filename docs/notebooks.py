"""Runs the notebooks of examples/, so that none of them shows what does not run.

    python docs/notebooks.py [NAME...]        all notebooks, or those of these names, such as first-steps

Each runs in a folder and a kernel of its own, and is written anew with its outputs. What differs from run to run is
left out: times, and what Jupyter notes about itself. The tests compare outputs, except for numbers and figures.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from execute import lines_of, shortened

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
SECONDS = 300  # the longest that a cell may take, and the start of a kernel
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
COLOR = re.compile(r"\x1b\[[\d;]*m")
TIMES = (
    (re.compile(r"(?<=\x1b\[33m)[\d:]+(?=\x1b\[0m$)"), "--:--"),  # at the end of a bar
    (re.compile(r"(?<=seconds:)( +)[\d.]+|(?<=seconds )( +)[\d.]+"), r"\1\2-"),
)
BY_NUMBERS = re.compile(r"</?b>|\\textbf|[{}]|better|worse|no difference shown")  # what numbers decide


def execute(notebook: Path, rounds: int | None = None) -> dict[str, Any]:
    """Run a notebook with the pluribus of this checkout, and return it with its outputs.

    `rounds` is for runs that have many, as on pages. None: all cells run as they are.
    """
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.read(notebook, as_version=4)
    for cell in found.cells:
        cell.source = shortened(cell.source, rounds)
    with TemporaryDirectory(prefix="pluribus-notebook-") as folder:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
            "IPYTHONDIR": str(Path(folder) / ".ipython"),  # not the settings of the user
            "OMP_NUM_THREADS": "1",  # on a busy machine, threads wait for each other
        }
        client = NotebookClient(
            found,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=os.environ | own)
    return clean(json.loads(nbformat.writes(found)))


def clean(notebook: dict[str, Any]) -> dict[str, Any]:
    """Leave out what differs from run to run."""
    cells = [cell | {"metadata": {}} for cell in notebook["cells"]]
    for cell in cells:
        if "outputs" in cell:
            cell["outputs"] = [_without_times(output) for output in cell["outputs"]]
    return notebook | {"cells": cells, "metadata": METADATA}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: one if key == "image/png" else _without_times(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_times(one) for one in value]
    if isinstance(value, str):
        for pattern, instead in TIMES:
            value = pattern.sub(instead, value)
    return value


def outputs_of(notebook: dict[str, Any]) -> list[dict[str, list[str]]]:
    """The outputs of every cell by kind, without what may differ between two machines."""
    return [_outputs(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _outputs(cell: dict[str, Any]) -> dict[str, list[str]]:
    shown: dict[str, list[str]] = {}
    for output in cell["outputs"]:
        kinds = output.get("data") or {output.get("name", output["output_type"]): output.get("text", "")}
        for kind, text in kinds.items():
            plain = "" if kind == "image/png" else COLOR.sub("", "".join(text))
            shown.setdefault(kind, []).extend(lines_of(BY_NUMBERS.sub("", plain)))
    return shown


def main() -> None:
    """Write the outputs of notebooks anew."""
    for notebook in NOTEBOOKS:
        if not sys.argv[1:] or notebook.stem in sys.argv[1:]:
            text = json.dumps(execute(notebook), indent=1, ensure_ascii=False)
            notebook.write_text(f"{text}\n", encoding="utf-8")
            print(f"executed {notebook.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
