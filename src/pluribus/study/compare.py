"""Compares methods on the same data, partition, models and initial weights, over several seeds.

OUT/LABEL-SEED/     one ordinary run folder per row and seed
OUT/compare.json    the results, written when all runs are finished
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from pluribus.data.datasets import load_once
from pluribus.errors import UnfinishedError
from pluribus.internal.keywords import StudySettings
from pluribus.internal.views import AFTER, View
from pluribus.processes import check_guarded
from pluribus.storage.files import write_json
from pluribus.storage.folder import RunFolder
from pluribus.study.grid import check_counts, check_trackers, finish_runs, folder_of_runs
from pluribus.study.plan import plan_comparison, read_rows
from pluribus.study.rows import AnyRows, to_rows
from pluribus.study.standings import Comparison


@load_once()
def compare(
    methods: AnyRows = (),
    *,
    seeds: int = 3,
    seed: int = 0,
    baseline: str | None = None,
    target: float | None = None,
    view: View = AFTER,
    equal_steps: bool = False,
    jobs: int | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
    track: str | Sequence[str] = (),
    **settings: Unpack[StudySettings],
) -> Comparison:
    """Run methods on the same clients, and test which differences are more than noise.

    `methods` are names, Method classes or instances. Their names are the labels of the rows. To compare settings of one
    method, give labels: `{"class": FedGH(), "client": ("fedgh", {"server_step": "client"}), "alone": "local"}`. More
    rows may be in the file `config`, as `[rows.LABEL]` with `method` and `settings`.

    Settings are those of `pluribus.run`. They hold for all rows and replace the defaults of a method. `own` sets the
    hyper-parameters and training settings of one row, for example `{"fedgh": {"server_lr": 0.02}}`. The seeds are
    `seed`, `seed` + 1 and so on. If the folder `out` holds runs of this comparison, finished runs are read and stopped
    runs are resumed. Without `out`, nothing is left on disk: the results are in memory.

    `view` is the model that is evaluated: `after` local training, `before` it, or each method's `own`. A method that
    lacks the view is evaluated in its own. Only rows of equal views are tested against each other. `equal_steps` gives
    every row enough rounds for the number of gradient steps per client that the row with the most takes in `rounds`.

    Every run has one process and one CPU thread unless `workers` and `threads` are set, so that results do not depend
    on `jobs`, the number of parallel runs. The default is one on a GPU, otherwise one per core. `track` names the
    trackers of each run.
    """
    check_guarded()
    check_counts(jobs=jobs)
    check_trackers(track, out)
    RunFolder.check_free(None if out is None else str(out))
    plan = plan_comparison(
        [*to_rows(methods), *read_rows(config)],
        seeds=seeds,
        seed=seed,
        baseline=baseline,
        target=target,
        view=view,
        equal_steps=equal_steps,
        config=config,
        own=own or {},
        settings=settings,
    )
    kept = None if out is None else Path(out)
    with folder_of_runs(out) as folder:
        grid = plan.grid(lambda label, number: folder / f"{label}-{number}")
        try:
            finish_runs([*grid.values()], folder, jobs, progress, track, kept=kept is not None)
        except UnfinishedError as error:
            error.partial = plan.read_finished(grid, kept)
            raise
        comparison = plan.read(grid, kept)
    if kept is not None:
        write_json(kept / "compare.json", comparison.to_json())
    return comparison
