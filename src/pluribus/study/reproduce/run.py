"""Runs what is missing of a paper's table, keeps a summary, and puts ours beside the paper's figures.

OUT/METHOD-SETTINGS-SEED/    an ordinary run folder each; tables that share a row share its runs
OUT/NAME.json                what stays of a table's runs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pluribus.assembly import assemble
from pluribus.data.datasets import loaded_once
from pluribus.errors import RangeError
from pluribus.experiment import Experiment
from pluribus.internal.views import AFTER, View, check_view
from pluribus.processes import check_guarded
from pluribus.settings import flag_name
from pluribus.storage.files import check_place
from pluribus.study.bench import device_name
from pluribus.study.compare import check_settings, default_jobs, finish
from pluribus.study.reproduce import paper, summary
from pluribus.study.reproduce.beside import Beside, of_row
from pluribus.study.reproduce.measures import targets
from pluribus.study.reproduce.paper import PaperTable
from pluribus.study.reproduce.summary import Finished, Key

OUT = "runs/reproduce"


@loaded_once()
def reproduce(
    table: str | PaperTable,
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
    """Run what is missing of a table, and put ours beside the paper's figures.

    What lies in `out` or in a summary beside `save` (OUT/NAME.json) is not run again. Seeds are 0, 1 and so on; fewer
    `rounds` than the paper has make another table, which says so. Rows are tested against each other in one `view`:
    `after` local training or `before` it, where a method has that view, or each method's `own`. A run whose summary
    lacks figures per client in that view is looked for in `out`, and run again if it is not there.
    """
    check_guarded()
    check_view(view)
    table = paper.find(table) if isinstance(table, str) else table
    rows = table.chosen(only)
    for given, value in (("seeds", seeds), ("jobs", jobs), ("rounds", rounds)):
        if value is not None and value < 1:
            raise RangeError(f"{flag_name(given)} must be at least 1, not {value}.")
    folder, rounds = Path(out), rounds or table.rounds
    file = Path(save) if save else folder / f"{table.name}.json"
    if save:
        check_place(file)
    settings = {"rounds": rounds, "device": device, "threads": 1}
    grid = [table.experiment(row, **settings, seed=number) for number in range(seeds or table.seeds) for row in rows]
    reach = targets(table.figures.values())
    kept = summary.read(file.parent) if file.parent.is_dir() else {}
    known = {key: one for key, one in kept.items() if one.has(reach, view)}  # other tables ask for less
    if missing := list({summary.key(one): one for one in grid if summary.key(one) not in known}.values()):
        known |= _run(missing, folder, jobs, progress, reach)
    mine = [one for row in table.rows for one in of_row(table, row, known.values())]
    summary.write(file, table.name, {one.key: one for one in mine}.values())
    return Beside.of(table, rows, [known[summary.key(one)] for one in grid], rounds, view)


def shown(
    table: str | PaperTable,
    place: str | Path,
    *,
    seeds: int | None = None,
    rounds: int | None = None,
    only: Sequence[str] = (),
    view: View = AFTER,
) -> Beside:
    """The same from summaries, without running anything."""
    check_view(view)
    table = paper.find(table) if isinstance(table, str) else table
    found = [one for one in summary.read(Path(place)).values() if seeds is None or one.run.seed < seeds]
    return Beside.of(table, table.chosen(only), found, rounds, view)


def _run(
    missing: Sequence[Experiment], folder: Path, jobs: int | None, progress: bool, reach: Sequence[str]
) -> dict[Key, Finished]:
    grid = [dataclasses.replace(one, out=str(folder / summary.label(one))) for one in missing]
    for one in grid:
        check_settings(one)
    device = _checked(grid)
    finish(grid, folder, jobs or default_jobs(grid[0]), progress)
    return {summary.key(one): summary.collected(one, reach, device) for one in grid}


def _checked(grid: Sequence[Experiment]) -> str:
    """Put one run of each kind together, so that what is wrong shows at once; says what they will run on."""
    firsts = {summary.key(dataclasses.replace(one, seed=0)): one for one in reversed(grid)}
    for one in firsts.values():
        parts = assemble(one)
    return device_name(parts.device)
