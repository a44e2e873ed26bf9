"""Runs the missing runs of a paper's table, saves a summary, and compares our results with the paper's numbers.

OUT/METHOD-SETTINGS-SEED/    one ordinary run folder per run; tables that share a row share its runs
OUT/NAME.json                the summary of a table's runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pluribus.assembly import assemble
from pluribus.data.datasets import load_once
from pluribus.experiment import Experiment
from pluribus.internal.views import AFTER, View, check_view
from pluribus.processes import check_guarded
from pluribus.storage.files import check_writable
from pluribus.study.bench import device_name
from pluribus.study.grid import check_counts, check_settings, finish_runs
from pluribus.study.reproduce import paper, summary
from pluribus.study.reproduce.beside import Beside, of_row
from pluribus.study.reproduce.measures import targets

OUT = "runs/reproduce"


@load_once()
def reproduce(
    table: str | paper.PaperTable,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: Sequence[str] = (),
    view: View = AFTER,
    out: str | Path = OUT,
    save: str | Path | None = None,
    jobs: int | None = None,
    device: str = "auto",
    progress: bool = True,
) -> Beside:
    """Run the missing runs of a table, and compare our results with the paper's numbers.

    Runs in `out`, or in a summary in the folder of `save` (default: OUT/NAME.json), are not repeated. Seeds are 0, 1
    and so on. With fewer `rounds` than the paper, the heading says so. Rows are tested against each other in one
    `view`: `after` local training, `before` it, or each method's `own`. A method that lacks the view shows its own. If
    a summary lacks results per client in that view, the run is read from `out`, or repeated if it is not there.
    """
    check_guarded()
    check_view(view)
    table = paper.find(table) if isinstance(table, str) else table
    rows = table.chosen(only)
    check_counts(seeds=seeds, jobs=jobs, rounds=rounds)
    folder, rounds = Path(out), rounds or table.rounds
    file = Path(save) if save else folder / f"{table.name}.json"
    if save:
        check_writable(file)
    settings = {"rounds": rounds, "device": device, "threads": 1, "workers": 1}
    grid = [table.experiment(row, **settings, seed=number) for number in range(seeds or table.seeds) for row in rows]
    reach = targets(table.figures.values())
    kept = summary.read(file.parent) if file.parent.is_dir() else {}
    # summaries of other tables may lack a target or a view
    known = {key: one for key, one in kept.items() if one.has(reach, view)}
    if missing := list({summary.key(one): one for one in grid if summary.key(one) not in known}.values()):
        known |= _run(missing, folder, jobs, progress, reach)
    mine = [one for row in table.rows for one in of_row(table, row, known.values())]
    summary.write(file, table.name, {one.key: one for one in mine}.values())
    return Beside.of(table, rows, [known[summary.key(one)] for one in grid], rounds, view)


def load_table(
    table: str | paper.PaperTable,
    path: str | Path,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: Sequence[str] = (),
    view: View = AFTER,
) -> Beside:
    """Compare the results in saved summaries with the paper's numbers, without running anything."""
    check_view(view)
    table = paper.find(table) if isinstance(table, str) else table
    found = [one for one in summary.read(Path(path)).values() if seeds is None or one.run.seed < seeds]
    return Beside.of(table, table.chosen(only), found, rounds, view)


def _run(
    missing: Sequence[Experiment], folder: Path, jobs: int | None, progress: bool, reach: Sequence[str]
) -> dict[summary.Key, summary.Finished]:
    grid = [replace(one, out=str(folder / summary.label(one))) for one in missing]
    for one in grid:
        check_settings(one)
    device = _check(grid)
    finish_runs(grid, folder, jobs, progress)
    return {summary.key(one): summary.collect(one, reach, device) for one in grid}


def _check(grid: Sequence[Experiment]) -> str:
    """Assemble one run of each row, so that mistakes show at once. Return the name of the device."""
    firsts = {summary.key(replace(one, seed=0)): one for one in reversed(grid)}
    for one in firsts.values():
        parts = assemble(one)
    return device_name(parts.device)
