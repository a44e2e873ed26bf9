"""Draw the picture of each method's page: the method beside its baseline, on data that come with the package.

python docs/pictures/methods.py               redraw all pictures from the numbers in benchmarks/results
python docs/pictures/methods.py fedgh fd      run these methods again, then redraw
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

import pluribus
from pluribus.internal.views import AFTER
from pluribus.settings import flag_name
from pluribus.storage.files import write_text
from pluribus.study.figure import Line, curves, draw_lines
from pluribus.study.standings import Compared, Run, compare_with_baseline, selection_note

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "method-curves.json"
PICTURES = Path(__file__).parent / "methods"
SEEDS = 3
POINT_DIGITS, TEST_DIGITS = 4, 6  # that are kept
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pluribus", "font.family": "sans-serif", "axes.grid": True}
STYLE |= {"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True)
class Case:
    """Methods that are compared with one baseline on the same clients."""

    methods: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = "local"
    view: str = AFTER  # the view in which the method's page reports it
    row: tuple[str, Mapping[str, Any]] | None = None  # what the baseline is, if it is no method of that name

    def command(self, method: str) -> str:
        """The command that compares a method with the baseline."""
        named = [name for name in (self.baseline, method) if name == method or self.row is None]
        words = ["pluribus compare", *named]
        if self.row is not None:
            own = ",".join(f"{name}={_spell(value)}" for name, value in self.row[1].items())
            words.append(f"--row {self.baseline}={self.row[0]}:{own} --baseline {self.baseline}")
        words += [f"{flag_name(name)} {_spell(value)}" for name, value in self.settings.items()]
        words += [f"--view {self.view}"] if self.view != AFTER else []
        return " ".join([*words, f"--seeds {SEEDS}"])


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


ROTATED = {
    "data": "rotated-digits",
    "partition": "domain",
    "clients": 4,
    "val_fraction": 0.1,
    "test_fraction": 0.15,
    "public_fraction": 0.1,
    "rounds": 60,
    "batch_size": 32,
    "optimizer": "amsgrad",
    "lr": 0.001,
    "weight_decay": 0.0001,
    "evaluate_every": 5,
}
TINY = {"models": "tiny-vit-32", "image_size": 16, "batch_size": 16, "momentum": 0.9}
PROMPTS = {
    "models": "tiny",
    "image_size": 16,
    "partition": "fedhpl-noniid",
    "min_share": 0.1,
    "test": "common",
    "test_fraction": 0.2,
    "val_fraction": 0.0,
    "clients": 5,
    "rounds": 15,
    "batch_size": 16,
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.0001,
}
CASES = (
    Case(("fd", "fedgen", "fedgh", "fedhe", "fedproto", "fedtgp", "lg-fedavg")),
    Case(("ditto", "fedbabu", "fedpac", "fedrep", "per-fedavg", "pfedpt"), {"models": "cnn-16"}),
    Case(("fedavg", "fedprox", "pfedla", "scaffold"), {"models": "cnn-16"}, view="own"),
    Case(("fedbn",), {"models": "cnn-16-32"}),
    Case(("fedapen", "fedkd", "fedmrl", "fml"), {"lr": 0.05}),
    Case(("fedmd",), {"public_fraction": 0.1}),
    Case(("fccl", "kt-pfl"), {"public_fraction": 0.1, "lr": 0.05}),
    Case(("fedl2g-f", "fedl2g-l"), {"lr": 0.05}),
    Case(("fedfree",), {"image_size": 16, "lr": 0.05}),
    Case(("depthfl",), {"models": "cnn-16-32@depth2,cnn-16-32@depth1", "lr": 0.05}),
    Case(
        ("fedrolex", "fjord", "heterofl"),
        {"models": "cnn-16-32", "capacity": "1,0.5,0.25", "lr": 0.1},
    ),
    Case(
        ("flexlora", "flora", "hetlora"),
        TINY | {"capacity": "8,4,2", "lr": 0.05},
        baseline="alone",
        row=("flexlora", {"alone": True}),
    ),
    Case(("pfedpg",), TINY),
    Case(("fedhpl",), PROMPTS, baseline="alone", row=("fedhpl", {"upload": "none"})),
    Case(("agg", "fedh2l"), ROTATED, baseline="ind"),
    Case(("ind",), ROTATED, baseline="agg"),
    Case(("fedavg-matched", "fedprox-matched"), ROTATED | {"models": "mlp-64"}, baseline="ind", view="own"),
    Case(("feddf",), {"models": "cnn-16,mlp-64", "public_fraction": 0.1, "lr": 0.05}),
    Case(("local",), baseline="faster", row=("local", {"lr": 0.05})),
)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def run(case: Case, wanted: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run the methods of a case that are wanted, and return the numbers of each."""
    base = {case.baseline: case.row or case.baseline}
    rows = base | {name: name for name in wanted}
    compared = pluribus.compare(rows, **case.settings, seeds=SEEDS, baseline=case.baseline, progress=False)
    assert not compared.cautions, compared.cautions
    found = {}
    for name in wanted:
        pair = {
            label: [replace(one, wanted=case.view) for one in compared.runs[label]] for label in (name, case.baseline)
        }
        found[name] = numbers(case, name, pair)
    return found


def numbers(case: Case, name: str, pair: Mapping[str, list[Run]]) -> dict[str, Any]:
    """The curves of a method and its baseline, and what the paired test says."""
    (tested,) = compare_with_baseline(pair, case.baseline)
    found = curves(pair)
    rounds = min(line[-1][0] for line in found.values())
    warmup = {label: line[-1][0] - rounds for label, line in found.items()}  # rounds before the first that counts
    return {
        "command": case.command(name),
        "baseline": case.baseline,
        "clients": len(pair[name][0].result["clients"]),
        "views": {label: runs[0].view for label, runs in pair.items()},
        "selection": selection_note(run for runs in pair.values() for run in runs),
        "warmup": warmup,
        "lines": {label: _after(warmup[label], line) for label, line in found.items()},
        "steps": {label: runs[0].steps for label, runs in pair.items()},
        "tested": _tested(tested),
    }


def _after(warmup: int, line: Line) -> list[Any]:
    """The points of a line after a warm-up, counted from there."""
    return [[x - warmup, [round(y, POINT_DIGITS) for y in ys]] for x, ys in line if x > warmup]


def _tested(one: Compared) -> dict[str, Any]:
    if one.difference is None or one.p is None:
        return {"verdict": one.verdict}
    ends = {name: round(getattr(one.difference, name), TEST_DIGITS) for name in ("mean", "low", "high")}
    return {"verdict": one.verdict, "p": round(one.p, TEST_DIGITS), **ends}


def known() -> dict[str, Any]:
    """The numbers of all methods, as they were run."""
    return json.loads(FILE.read_text(encoding="utf-8"))["methods"] if FILE.exists() else {}


def write(found: Mapping[str, Any]) -> None:
    """Write the numbers, with one line per method."""
    about = {"command": "python docs/pictures/methods.py", "hardware": f"{os.cpu_count()} CPU cores"}
    about |= {"torch": torch.__version__, "python": platform.python_version()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    FILE.write_text(f'{json.dumps(about)[:-1]}, "methods": {{\n{lines}\n}}}}\n', encoding="utf-8")


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw(found: Mapping[str, Any]) -> str:
    """Draw a method and its baseline: means over seeds, with a band of one standard deviation. Return an SVG file."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        axes = draw_lines(found["lines"], "round", "test accuracy", Figure(figsize=(6, 3)).add_subplot())
        axes.locator_params(axis="x", integer=True)
        axes.get_figure().savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return file.getvalue()


def main() -> None:
    """Run the methods that are named, or nothing; draw all pictures."""
    found, wanted = known(), sys.argv[1:]
    for case in CASES:
        if some := tuple(name for name in case.methods if name in wanted):
            found |= run(case, some)
            write(found)
            print(*some, flush=True)
    for name, numbers_of in found.items():
        write_text(PICTURES / f"{name}.svg", draw(numbers_of))


if __name__ == "__main__":
    main()
