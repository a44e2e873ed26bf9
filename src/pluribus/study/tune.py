"""A fair search for settings: all methods get the same number of trials and rounds, and validation data decides.

OUT/LABEL/trial-3/seed-0/  one ordinary run folder per trial and seed
OUT/LABEL/trials.jsonl     the settings and result of every trial
OUT/LABEL/search.json      what was searched
OUT/LABEL/best.toml        the best settings, for pluribus run --config
OUT/study.db               an Optuna study per label, a copy of the trials
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Unpack

from pluribus import errors
from pluribus.assembly import assemble
from pluribus.data.datasets import load_once
from pluribus.experiment import Experiment, repeat
from pluribus.internal.frames import make_frame
from pluribus.internal.keywords import StudySettings
from pluribus.internal.metrics import METRICS, Metric
from pluribus.internal.views import AFTER, View, check_view, choose_view
from pluribus.processes import check_guarded
from pluribus.storage.files import read_json, to_json, write_json, write_text
from pluribus.storage.toml import to_toml
from pluribus.study.grid import (
    check_counts,
    check_trackers,
    folder_of_runs,
    make_folder,
    refuse_unfinished,
    saying_how_to_resume,
)
from pluribus.study.parallel import make_portable, run_queue
from pluribus.study.plan import describe_rows, find_overridden_defaults, read_rows
from pluribus.study.proposal import Proposals, Pruner, Sampler, check_words, count_trials
from pluribus.study.rows import AnyRows, to_rows
from pluribus.study.search import Search
from pluribus.study.space import SPACE, parse_space, set_all, spaces_of
from pluribus.study.standings import FOR_ONE, note_defaults
from pluribus.study.stored_study import StoredStudy, hide_password, load_study, open_storage, own_storage
from pluribus.study.trial_board import TrialBoard
from pluribus.track.tracker import Tracking

FORMERLY = {"seeds": 1, "jobs": 1, "sampler": "tpe", "pruner": "none"}  # version 0.1 did not write them


@dataclass(frozen=True)
class Tuned:
    """The best of a method's trials."""

    label: str
    method: str
    metric: str
    """The name of the headline metric, which the search optimizes."""
    score: float
    """Its value on validation data: the mean over clients, each in the round that it selects, and over seeds."""
    view: str
    """The view that was evaluated."""
    settings: dict[str, Any]
    """The best value of every setting that was searched."""
    command: str
    file: Path | None
    """The best settings, for pluribus run --config. None: the search was not kept."""
    trials: list[dict[str, Any]]
    cautions: list[str]
    """Defaults of the method that were replaced and not searched."""
    best_trial: int = 0
    """The number of the best trial."""
    storage: str | None = field(default=None, repr=False)
    """The Optuna storage: a URL, or the path of a journal file. None: the search was not kept."""
    study_name: str = ""
    """The name of the study in the storage."""
    _study: Any = field(default=None, repr=False, compare=False)

    def study(self) -> Any:
        """The `optuna.Study`, for the plots and importances of Optuna."""
        return self._study if self.storage is None else load_study(self.storage, self.study_name)

    def frame(self) -> Any:
        """One row per trial: `trial`, `state`, `score`, `rounds`, its settings, and its score of each seed.

        A pandas DataFrame if pandas is installed, otherwise a list of dicts.
        """
        seeds = list(dict.fromkeys(seed for one in self.trials for seed in one["scores"]))
        return make_frame(
            [
                {name: one[name] for name in ("trial", "state", "score", "rounds")}
                | one["settings"]
                | {f"seed {seed}": one["scores"].get(seed) for seed in seeds}
                for one in self.trials
            ]
        )

    def to_json(self) -> dict[str, Any]:
        found = {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("_")}
        storage = None if self.storage is None else hide_password(self.storage)
        return found | {"file": None if self.file is None else str(self.file), "storage": storage}


@load_once()
def tune(
    methods: AnyRows = (),
    *,
    space: str = SPACE,
    trials: int = 20,
    view: View = AFTER,
    seed: int = 0,
    seeds: int = 1,
    jobs: int = 1,
    sampler: Sampler = "tpe",
    pruner: Pruner = "none",
    storage: str | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
    track: str | Sequence[str] = (),
    **settings: Unpack[StudySettings],
) -> list[Tuned]:
    """Search for the best settings of each method on validation data, with `trials` trials per method.

    `methods` are names, classes or instances, or labels with methods and settings as in `pluribus.compare`. Without
    `out`, nothing is left on disk.

    A name in `space` is a training setting, which is searched for every method, or a hyper-parameter, which is searched
    for the methods that have it. `view` is the model that is evaluated: `after` local training, `before` it, or each
    method's `own`. A method that lacks the view is evaluated in its own.

    The score of a trial is the mean over `seeds` seeds, `seed` and those after it. `sampler` and `pruner` are Optuna's:
    `tpe`, `random` or `grid`, and `none`, `median` or `hyperband`. `jobs` trials run at a time. The seed and `jobs`
    determine all trials, so a stopped search resumes with the same trials.

    The trials are also in an Optuna study, by default in the file `study.db` in `out`. `storage` is another Optuna
    storage: a URL, or the path of a journal file. `track` names the trackers of each run.
    """
    _need_optuna()
    check_guarded()
    check_trackers(track, out)
    check_counts(trials=trials, seeds=seeds, jobs=jobs)
    check_view(view)
    check_words(sampler, pruner)
    if storage is not None and out is None:
        raise errors.MissingSettingError("--storage needs --out: by its folder, a search is resumed.")
    rows = [*to_rows(methods), *read_rows(config)]
    described = describe_rows(rows, config, own or {}, {**settings, "seed": seed})
    spaces = spaces_of(parse_space(space), described)
    counts = {label: count_trials(label, spaces[label], sampler, trials) for label in described}
    metrics = _assemble_all(described, seeds)
    overridden = find_overridden_defaults(rows, described, config, own or {}, [*settings, *parse_space(space)])
    if jobs > 1:
        described = dict(zip(described, make_portable([*described.values()]), strict=True))
    with folder_of_runs(out) as folder, saying_how_to_resume(folder, kept=out is not None):
        plans = [
            _Plan(
                folder / label,
                Proposals(one, spaces[label], metrics[label], sampler, pruner, jobs),
                counts[label],
                range(seed, seed + seeds),
                choose_view(one.build_method().views, view),
                space,
            )
            for label, one in described.items()
        ]
        for plan in plans:
            plan.check()
        where = storage or (None if out is None else own_storage(folder))
        studies = _open_studies(plans, where, named_by_folder=storage is not None)
        with TrialBoard({plan.label: plan.rounds() for plan in plans}, seeds, shown=progress) as board:
            searches = [plan.search(studies[plan.label], board) for plan in plans]
            found = [_search(*one, overridden, Tracking(track, folder)) for one in zip(plans, searches, strict=True)]
    return [replace(one, file=None) for one in found] if out is None else found


@dataclass(frozen=True)
class _Plan:
    """The search of one row."""

    folder: Path
    proposals: Proposals
    trials: int
    seeds: range
    view: str
    space: str

    @property
    def label(self) -> str:
        return self.folder.name

    def search(self, stored: StoredStudy, board: TrialBoard) -> Search:
        return Search(self.folder, self.proposals, self.trials, self.seeds, self.view, stored, board)

    def rounds(self) -> int:
        """Rounds of all trials with one seed."""
        return self.trials * self.proposals.described.all_rounds()

    def to_json(self) -> Any:
        """What determines the trials, as JSON has it."""
        described, how = self.proposals.described, self.proposals
        settings = {k: v for k, v in described.settings().items() if v is not None}
        words = {"seeds": len(self.seeds), "jobs": how.jobs, "sampler": how.sampler, "pruner": how.pruner}
        about = {"space": self.space, "view": self.view, "metric": how.metric.name, **words, "settings": settings}
        return json.loads(to_json(about))

    def check(self) -> None:
        """Make the folder of the search. Refuse an existing search that has other settings."""
        path, wanted = self.folder / "search.json", self.to_json()
        if not path.exists():
            make_folder(self.folder)
            write_json(path, wanted)
            return
        found = read_json(path)
        before = {**FORMERLY, "metric": wanted["metric"], **found} if isinstance(found, dict) else {}
        if before == wanted:
            return
        for name in FORMERLY:  # flags of the search itself, for which a sentence can say more
            if before | {name: wanted[name]} == wanted:
                was = f"--{name} {before[name]}, not {wanted[name]}"
                raise errors.OtherRunError(f"{self.folder} holds a search with {was}. Choose another --out.")
        raise errors.OtherRunError(f"{self.folder} holds a search with other settings. Choose another --out.")


def _need_optuna() -> None:
    try:
        import optuna
    except ImportError:
        raise errors.PackageError("a search needs Optuna: pip install 'pluribus[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _assemble_all(described: Mapping[str, Experiment], seeds: int) -> dict[str, Metric]:
    """The metric of every row. A mistake in a later method or seed must show before the first search."""
    first = next(iter(described.values()))
    if not first.val_fraction:
        raise errors.RangeError("a search needs validation data: --val-fraction must be above 0.")
    metrics = {label: METRICS[assemble(one).task.metrics[0]] for label, one in described.items()}
    for more in range(1, seeds):
        assemble(replace(first, seed=first.seed + more))
    return metrics


def _open_studies(plans: Sequence[_Plan], where: str | None, named_by_folder: bool) -> dict[str, StoredStudy]:
    """The Optuna studies of all rows, by label. In a storage with other searches, their names have the folder's."""
    storage = None if where is None else open_storage(where)
    found = {}
    for plan in plans:
        prefix = f"{plan.folder.resolve().parent.name}-" if named_by_folder else ""
        found[plan.label] = StoredStudy(storage, where, prefix + plan.label, plan.to_json(), plan.proposals.metric)
    return found


def _search(plan: _Plan, search: Search, overridden: Mapping[str, Mapping[str, Any]], track: Tracking) -> Tuned:
    how, label, stored = plan.proposals, plan.label, search.stored
    search.begin()
    run_queue(search.take, how.jobs, search, track, follow=search.follow)
    refuse_unfinished(search.failed, plan.folder.parent, kept=stored.where is not None)
    best = search.best()
    found, file = set_all(how.described, best["settings"]), plan.folder / "best.toml"
    write_text(file, to_toml(found.settings()))
    return Tuned(
        label=label,
        method=found.method,
        metric=how.metric.name,
        score=best["score"],
        view=plan.view,
        settings=best["settings"],
        command=repeat("run", found),
        file=file,
        trials=search.tried,
        cautions=note_defaults({label: overridden.get(label, {})}, {label: found}, FOR_ONE),
        best_trial=best["trial"],
        storage=stored.where,
        study_name=stored.name,
        _study=stored.study,
    )
