"""The search of one row: it starts the runs of trials, and records what they found.

OUT/LABEL/trial-3/seed-0/   one ordinary run folder per trial and seed
OUT/LABEL/trials.jsonl      the settings and result of every trial that has ended, in their order
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pluribus.api import load_result
from pluribus.errors import DamagedFileError, NotFiniteError
from pluribus.experiment import Experiment
from pluribus.internal.metrics import Metric
from pluribus.storage.checks import (
    Check,
    first_wrong,
    is_client,
    is_count,
    is_number,
    is_table,
    read_checked_lines,
)
from pluribus.storage.files import append_lines
from pluribus.study.grid import check_settings, is_finished
from pluribus.study.parallel import Failure, Follow, Progress, score_of
from pluribus.study.proposal import COMPLETE, PRUNED, Proposals
from pluribus.study.space import Range, set_all
from pluribus.study.stored_study import StoredStudy
from pluribus.study.trial_board import TrialBoard

RECORD = "trials.jsonl"
REMEDY = "Delete this line and all after it: the search resumes with the trial of this line."


@dataclass
class Attempt:
    """A trial that has begun."""

    number: int
    settings: dict[str, Any]
    optuna: Any
    """Optuna's object, in a study with what the trial knows."""
    runs: list[Experiment]
    """Those that have not ended, one per seed."""
    started: datetime
    is_running: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    """By seed."""
    values: dict[str, float] = field(default_factory=dict)
    """Validation metric of the first seed, by the number of rounds done."""
    rounds: int = 0
    """Rounds done by the first seed."""
    diverged: bool = False
    state: str | None = None
    """None: not decided yet. The process of a pruned trial may still run."""


class Search:
    """Hands out the runs of one row's trials, and watches them.

    With several jobs, trial k knows the results of the trials up to k - jobs, whichever have ended, and the settings of
    those between. It starts when these are known. So the trials do not depend on how long each of them takes.
    """

    def __init__(
        self,
        folder: Path,
        proposals: Proposals,
        trials: int,
        seeds: Sequence[int],
        view: str,
        stored: StoredStudy,
        board: TrialBoard,
    ) -> None:
        self.tried = read_trials(folder / RECORD, proposals.described, proposals.space, seeds)[:trials]
        self.failed: dict[str, str] = {}
        """Reasons of runs that failed, by folder."""
        self._folder = folder
        self._proposals = proposals
        self._metric = proposals.metric
        self._trials = trials
        self._seeds = seeds
        self._view = view
        self.stored = stored
        self._board = board
        self._open: list[Attempt] = []  # begun and not recorded, in their order
        self._first = str(seeds[0])

    def begin(self) -> None:
        """Bring the study up to date, and show the search."""
        for one in self.tried:
            self._store(one, datetime.now())
        best = self.best() if self.tried else None
        names = list(self._proposals.space)
        self._board.begin(self._folder.name, self._metric, names, self._trials, len(self.tried), best)

    @property
    def follow(self) -> Follow:
        """What the search must learn of its runs."""
        return Follow("val", self._view, past=True, may_stop=self._proposals.pruner != "none")

    def best(self) -> dict[str, Any]:
        """The best trial that was not pruned."""
        return best_of(self.tried, self._metric)

    def take(self) -> Experiment | None:
        """The next run. None: another one must end first, or all have ended."""
        while not self.failed:
            for one in self._open:
                if one.state is None and not one.is_running:
                    one.is_running = True
                    return one.runs[0]
            count = len(self.tried) + len(self._open)
            if count == self._trials or len(self._open) == self._proposals.jobs:
                return None
            self._open.append(self._start(count))
            self._record()
        return None

    def _start(self, count: int) -> Attempt:
        known = max(0, count - self._proposals.jobs + 1)
        every = [*(one["settings"] for one in self.tried), *(one.settings for one in self._open)]
        trial = self._proposals.propose(self.tried[:known], every[known:])
        wanted, path = set_all(self._proposals.described, trial.params), self._folder / f"trial-{count}"
        runs = [replace(wanted, seed=seed, out=str(path / f"seed-{seed}")) for seed in self._seeds]
        for run in runs:
            check_settings(run)
        attempt = Attempt(count, dict(trial.params), trial, runs, datetime.now())
        self._board.start(count, attempt.settings)
        self._skip_finished(attempt)
        return attempt

    def update(self, out: str, progress: Progress) -> bool:
        """Show a round. True: the pruner stops the trial. It decides by the rounds of the first seed."""
        one = self._attempt(out)
        self._board.update(one.number, len(one.scores), progress)
        if one.scores:  # a later seed
            return False
        one.rounds = progress.done
        if progress.score is None or str(progress.done) in one.values:
            return False
        one.values[str(progress.done)] = progress.score
        if not self.follow.may_stop:
            return False
        one.optuna.report(progress.score, progress.done)
        if progress.done == one.runs[0].all_rounds() or not one.optuna.should_prune():
            return False  # after the last round there is nothing to save
        one.state = PRUNED
        return True

    def finish(self, out: str, failure: Failure | None) -> None:
        """Note that a run has ended."""
        one = self._attempt(out)
        one.is_running = False
        if failure is not None and failure.kind == NotFiniteError.kind:
            self._note_score(one, one.runs.pop(0), None)
        elif failure is not None:
            self.failed[out] = failure.reason
        else:
            self._skip_finished(one)
        self._record()

    def _attempt(self, out: str) -> Attempt:
        return next(one for one in self._open if one.runs and one.runs[0].out == out)

    def _skip_finished(self, one: Attempt) -> None:
        """Take the scores of finished runs. Test data is not used."""
        while one.state is None and one.runs and is_finished(one.runs[0]):
            run = one.runs.pop(0)
            result = load_result(run.out or "")
            value = result.summary[self._view]["selected"]["val"]["mean"]
            if not one.scores:
                scores = {str(of["round"] + 1): score_of(of, self._view, "val") for of in result.history}
                one.values = {done: score for done, score in scores.items() if score is not None}
                one.rounds = len(result.history)
            self._note_score(one, run, value)

    def _note_score(self, one: Attempt, run: Experiment, value: float | None) -> None:
        """Note the score of a seed. If training has diverged, other seeds cannot mend the trial."""
        one.diverged = value is None
        one.scores[str(run.seed)] = self._metric.worst if value is None else float(value)
        if one.diverged or not one.runs:
            one.state = COMPLETE

    def _record(self) -> None:
        """Write the trials that have ended, in their order."""
        while self._open and (one := self._open[0]).state is not None and not one.is_running:
            line = {
                "trial": one.number,
                "settings": one.settings,
                "score": self._score(one),
                "state": one.state,
                "rounds": one.rounds,
                "scores": one.scores,
                "values": one.values,
            }
            append_lines(self._folder / RECORD, [line])
            self.tried.append(line)
            self._store(line, one.started)
            del self._open[0]
            self._board.end(line, self.best())

    def _score(self, one: Attempt) -> float:
        """Mean over seeds. A pruned trial has its last value, and one that diverged the worst."""
        if one.state == PRUNED:
            return list(one.values.values())[-1]
        return self._metric.worst if one.diverged else statistics.fmean(one.scores.values())

    def _store(self, one: Mapping[str, Any], started: datetime) -> None:
        path = self._folder / f"trial-{one['trial']}"
        about = {"folders": [str(path / f"seed-{seed}") for seed in one["scores"] or [self._first]]}
        about |= {"scores": one["scores"], "rounds": one["rounds"]}
        self.stored.add(one, self._proposals.distributions(), started, **about)


def best_of(tried: Sequence[Mapping[str, Any]], metric: Metric) -> dict[str, Any]:
    """The best trial that was not pruned. The first trial never is."""
    complete = [one for one in tried if one["state"] == COMPLETE]
    return dict((min if metric.smaller else max)(complete, key=lambda one: float(one["score"])))


def read_trials(
    path: Path, described: Experiment, space: Mapping[str, Range], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """The trials of a search that was stopped. Refuse one that is none of this search."""

    def is_settings(settings: Any) -> bool:
        known = isinstance(settings, dict) and settings.keys() == space.keys()
        return known and all(space[name].holds(value) for name, value in settings.items())

    def complete(line: Any) -> Any:
        """Lines of version 0.1 lack what was always the same."""
        if not isinstance(line, dict):
            return line
        usual = {"state": COMPLETE, "rounds": described.all_rounds(), "values": {}}
        return usual | {"scores": {str(seeds[0]): line.get("score")}} | line

    checks: dict[str, Check] = {
        "trial": is_count,
        "settings": is_settings,
        "score": is_number,
        "state": lambda state: state in (COMPLETE, PRUNED),
        "rounds": is_count,
        "scores": is_table(lambda seed: seed in map(str, seeds), is_number),
        "values": is_table(is_client, is_number),
    }
    lines = read_checked_lines(path, lambda line: first_wrong(complete(line), checks), REMEDY)
    for count, line in enumerate(lines):
        if line["trial"] != count:
            raise DamagedFileError(f"{path} is damaged in line {count + 1}: it is trial {line['trial']}. {REMEDY}")
    found = list(map(complete, lines))
    if found and found[0]["state"] == PRUNED:
        raise DamagedFileError(f"{path} is damaged in line 1: the first trial cannot be {PRUNED}. {REMEDY}")
    return found
