"""Runs a study: a comparison at every point of its axes, and one table over all of them.

OUT/POINT/LABEL-SEED/    one ordinary run folder per row and seed; without axes OUT/LABEL-SEED/
OUT/study.json           the results, written when all runs are finished
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from pluribus.data.datasets import load_once
from pluribus.errors import UnfinishedError
from pluribus.internal.keywords import StudySettings
from pluribus.internal.views import View
from pluribus.processes import check_guarded
from pluribus.storage.files import write_json
from pluribus.storage.folder import RunFolder
from pluribus.study.definition import Point, Study, to_study
from pluribus.study.grid import check_counts, check_trackers, finish_runs, folder_of_runs
from pluribus.study.merged import StudyResult
from pluribus.study.plan import Grid, Plan, plan_comparison
from pluribus.study.rows import AnyRows
from pluribus.study.standings import Comparison


@load_once()
def study(
    source: str | Path | Study | AnyRows | Mapping[str, Any],
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    baseline: str | None = None,
    view: View | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    track: str | Sequence[str] = (),
    **settings: Unpack[StudySettings],
) -> StudyResult:
    """Compare rows at every point of some axes, and put the results into one table.

    `source` is a TOML file, a dict of the same shape, a `Study`, or rows as in `pluribus.compare`. The other arguments
    replace what it says: `axes` are settings with several values each, `only` names rows, and `settings` hold for all
    rows. Seeds, folders, jobs and views are those of `pluribus.compare`. Without `out`, nothing is left on disk.

    >>> found = study("my.toml", out="runs/my")                                                    # doctest: +SKIP
    >>> found = study({"a": "local", "b": "fedgh"}, axes={"alpha": [0.1, 1.0]}, clients=10)        # doctest: +SKIP
    >>> found.table(), found.frame(), found.plot("figure.png")                                     # doctest: +SKIP
    """
    check_guarded()
    check_counts(jobs=jobs)
    check_trackers(track, out)
    RunFolder.check_free(None if out is None else str(out))
    changes = {"axes": axes, "seeds": seeds, "seed": seed, "baseline": baseline, "view": view, "settings": settings}
    described = to_study(source, **changes).choose(only)
    points = described.points
    plans = [_plan(described, point) for point in points]
    kept = None if out is None else Path(out)
    with folder_of_runs(out) as folder:
        grids = _place(described, plans, folder)
        runs = {one.out: one for grid in grids for one in grid.values()}
        try:
            finish_runs([*runs.values()], folder, jobs, progress, track, kept=kept is not None)
        except UnfinishedError as error:
            some = [plan.read_finished(grid, kept) for plan, grid in zip(plans, grids, strict=True)]
            error.partial = _merge(described, points, some, kept)
            raise
        every = [plan.read(grid, kept) for plan, grid in zip(plans, grids, strict=True)]
    found = StudyResult(described, tuple(points), tuple(every), kept)
    if kept is not None:
        write_json(kept / "study.json", found.to_json())
    return found


def _plan(described: Study, point: Point) -> Plan:
    rows, settings = described.at(point)
    return plan_comparison(
        rows,
        seeds=described.seeds,
        seed=described.seed,
        baseline=described.baseline or None,
        target=None,
        view=described.view,
        equal_steps=False,
        config=None,
        own={},
        settings=settings,
    )


def _place(described: Study, plans: Sequence[Plan], folder: Path) -> list[Grid]:
    """The runs of every point. A row that an axis does not change has one run for all values of the axis."""
    axes = {row.label: described.axes_of(row) for row in described.rows}
    places: dict[tuple[Any, ...], Path] = {}
    grids = []
    for point, plan in zip(described.points, plans, strict=True):
        base = folder / point.folder

        def place(label: str, number: int, point: Point = point, base: Path = base) -> Path:
            values = tuple(point.texts[name] for name in axes[label])
            return places.setdefault((label, number, values), base / f"{label}-{number}")

        grids.append(plan.grid(place))
    return grids


def _merge(
    described: Study, points: Sequence[Point], some: Sequence[Comparison | None], kept: Path | None
) -> StudyResult | None:
    """The result of the points that have one. None if no point has."""
    known = [(point, one) for point, one in zip(points, some, strict=True) if one is not None]
    return StudyResult(described, tuple(p for p, _ in known), tuple(one for _, one in known), kept) if known else None
