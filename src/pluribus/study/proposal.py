"""What Optuna decides in a search: the settings of the next trial, and whether a running trial is worth its rounds.

Nothing of a sampler or pruner is saved. Every trial has a study of its own in memory, with the trials that it may know,
and a key for its random draws. So the seed and the number of parallel trials determine all trials.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pluribus import errors
from pluribus.draws import number
from pluribus.experiment import Experiment
from pluribus.internal.metrics import Metric
from pluribus.study.space import Range

Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["none", "median", "hyperband"]
COMPLETE, PRUNED = "COMPLETE", "PRUNED"  # Optuna's words for states


def check_words(sampler: str, pruner: str) -> None:
    """Refuse a sampler or pruner that does not exist."""
    for kind, word, known in (("sampler", sampler, Sampler), ("pruner", pruner, Pruner)):
        if word not in get_args(known):
            raise errors.unknown(kind, word, get_args(known), "pluribus tune --help")


def count_trials(label: str, space: Mapping[str, Range], sampler: str, trials: int) -> int:
    """Number of trials of a row. A grid has as many as combinations, and they must not be more than the user allows."""
    if sampler != "grid":
        return trials
    for name, values in space.items():
        if math.isinf(values.size()):
            wanted = f"write choices, such as {name}={values.low:g}|{values.high:g}"
            raise errors.FormatError(f"--sampler grid cannot try every value of {name} in --space: {wanted}.")
    size = math.prod(int(values.size()) for values in space.values())
    if size > trials:
        raise errors.RangeError(f"the grid of {label} has {size} combinations: set --trials {size}, not {trials}.")
    return size


@dataclass(frozen=True)
class Proposals:
    """Proposes the trials of one row."""

    described: Experiment
    space: Mapping[str, Range]
    metric: Metric
    sampler: str
    pruner: str
    jobs: int

    def propose(self, tried: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Any:
        """The next trial, as Optuna's object in a study of its own.

        It knows the results of the trials in `tried`. Of `others`, which come after them, it knows the settings.
        """
        import optuna

        study = self._study()
        distributions = self.distributions()
        for one in tried:
            self._replay(study, one)
        for settings in others:
            study.add_trial(
                optuna.trial.create_trial(
                    params=dict(settings), distributions=distributions, state=optuna.trial.TrialState.RUNNING
                )
            )
        count = len(tried) + len(others)
        if self.sampler == "grid":
            study.enqueue_trial(self._combination(count))
        study.sampler = self._sampler(count)
        return study.ask(distributions)

    def distributions(self) -> dict[str, Any]:
        """The space as Optuna has it."""
        return {name: values.distribution() for name, values in self.space.items()}

    def _study(self) -> Any:
        import optuna

        pruners = {
            "none": optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(),
            "hyperband": optuna.pruners.HyperbandPruner(min_resource=1, max_resource=self.described.all_rounds()),
        }
        # Hyperband assigns trials to its brackets by the name of the study
        name = f"{self.described.method}-{self.described.seed}"
        return optuna.create_study(direction=direction(self.metric), pruner=pruners[self.pruner], study_name=name)

    def _sampler(self, count: int) -> Any:
        import optuna

        key = number(self.described.seed, "tune", self.described.method, count) % 2**32
        if self.sampler != "tpe":
            return optuna.samplers.RandomSampler(seed=key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=key, constant_liar=self.jobs > 1)

    def _replay(self, study: Any, one: Mapping[str, Any]) -> None:
        """Add a finished trial. Hyperband notes at every report what a trial has reached: it must see them again."""
        import optuna

        if self.pruner != "hyperband":
            study.add_trial(to_optuna(one, self.distributions()))
            return
        study.enqueue_trial(dict(one["settings"]))
        trial = study.ask(self.distributions())
        for done, value in one["values"].items():
            trial.report(value, int(done))
            trial.should_prune()
        state = optuna.trial.TrialState[one["state"]]
        study.tell(trial, one["score"] if one["state"] == COMPLETE else None, state)

    def _combination(self, count: int) -> dict[str, Any]:
        every = itertools.product(*(values.values() for values in self.space.values()))
        return dict(zip(self.space, next(itertools.islice(every, count, None)), strict=True))


def direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """Whether a study minimizes or maximizes."""
    return "minimize" if metric.smaller else "maximize"


def to_optuna(one: Mapping[str, Any], distributions: Mapping[str, Any], **attributes: Any) -> Any:
    """A finished trial as Optuna's object."""
    import optuna

    return optuna.trial.create_trial(
        state=optuna.trial.TrialState[one["state"]],
        value=one["score"],
        params=dict(one["settings"]),
        distributions=dict(distributions),
        intermediate_values={int(done): value for done, value in one["values"].items()},
        user_attrs=attributes,
    )
