"""A fair search for settings: all methods get the same number of trials and rounds, and validation data decides.

OUT/LABEL/trial-3/        one ordinary run folder per trial
OUT/LABEL/trials.jsonl    the settings and result of every trial
OUT/LABEL/best.toml       the best settings, for pluribus run --config
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pluribus import errors
from pluribus.assembly import assemble
from pluribus.data.datasets import load_once
from pluribus.draws import number
from pluribus.experiment import TRAINING, Experiment, repeat
from pluribus.internal.keywords import StudySettings
from pluribus.internal.metrics import METRICS, Metric
from pluribus.internal.views import AFTER, View, check_view, choose_view
from pluribus.method import hyperparameters
from pluribus.processes import check_guarded
from pluribus.settings import convert_fields
from pluribus.storage.checks import Check, first_wrong, is_count, is_number, read_checked_lines
from pluribus.storage.files import append_lines, read_json, write_json, write_text
from pluribus.storage.toml import to_toml
from pluribus.study.grid import check_counts, check_trackers, folder_of_runs, make_folder
from pluribus.study.parallel import run_or_resume
from pluribus.study.plan import describe_rows, find_overridden_defaults, read_rows
from pluribus.study.rows import AnyRows, to_rows
from pluribus.study.standings import FOR_ONE, note_defaults
from pluribus.track.tracker import Tracking

if TYPE_CHECKING:
    from optuna.trial import Trial

SPACE = "lr=1e-3:1e-1:log"
MOST_WHOLE = 2**53  # beyond, a float does not hold every whole number


@dataclass(frozen=True)
class Range:
    """Values to try: an interval, on a linear or logarithmic scale, or a choice of words."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, text: str) -> Range:
        """Parse `1e-3:1e-1:log`, `1:5` or `class|client`."""
        if "|" in text:
            return cls(choices=tuple(text.split("|")))
        low, _, rest = text.partition(":")
        high, _, scale = rest.partition(":")
        try:
            found = cls(float(low), float(high), scale == "log")
        except ValueError:
            found = cls()
        ordered = found.low < found.high and math.isfinite(found.high - found.low)
        if scale not in ("", "log") or not ordered or (found.log and found.low <= 0):
            raise errors.FormatError(f"--space takes LOW:HIGH, LOW:HIGH:log or ONE|OTHER for {name}, not '{text}'.")
        return found

    def suggest(self, trial: Trial, name: str, whole: bool) -> Any:
        if self.choices:
            return trial.suggest_categorical(name, self.choices)
        if whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def check_whole(self, name: str) -> None:
        """Refuse an interval of a setting that takes whole numbers, if its ends are none."""
        if any(not end.is_integer() or abs(end) >= MOST_WHOLE for end in (self.low, self.high)):
            raise errors.FormatError(
                f"--space takes whole numbers for {name}, such as 1:10, not {self.low:g}:{self.high:g}."
            )

    def holds(self, value: Any, whole: bool) -> bool:
        """Whether `suggest` may have returned this value."""
        if self.choices:
            return value in self.choices
        if whole:
            return is_number(value) and type(value) is int and int(self.low) <= value <= int(self.high)
        return is_number(value) and self.low <= value <= self.high


@dataclass(frozen=True)
class Tuned:
    """The best of a method's trials."""

    label: str
    method: str
    metric: str
    """The name of the headline metric, which the search optimizes."""
    score: float
    """Its value on validation data: the mean over clients, each in the round that it selects."""
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"file": None if self.file is None else str(self.file)}


def parse_space(text: str) -> dict[str, Range]:
    """Parse ranges by name from `lr=1e-3:1e-1:log,server_lr=0.01:1`.

    >>> parse_space("lr=0.1:1")["lr"].high
    1.0
    """
    space = {}
    for part in text.split(","):
        name, equals, values = part.strip().partition("=")
        if not equals:
            raise errors.FormatError(f"--space takes NAME=LOW:HIGH, with commas between several, not '{part}'.")
        space[name.replace("-", "_")] = Range.of(name, values)
    return space


@load_once()
def tune(
    methods: AnyRows = (),
    *,
    space: str = SPACE,
    trials: int = 20,
    view: View = AFTER,
    seed: int = 0,
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
    for the methods that have it. The seed and the earlier trials determine the next trial, so a stopped search resumes
    with the same trials. `view` is the model that is evaluated: `after` local training, `before` it, or each method's
    `own`. A method that lacks the view is evaluated in its own. `track` names the trackers of each trial.
    """
    _need_optuna()
    check_guarded()
    check_trackers(track, out)
    check_counts(trials=trials)
    check_view(view)
    rows = [*to_rows(methods), *read_rows(config)]
    described = describe_rows(rows, config, own or {}, {**settings, "seed": seed})
    ranges = _ranges(parse_space(space), described)
    first = next(iter(described.values()))
    if not first.val_fraction:
        raise errors.RangeError("a search needs validation data: --val-fraction must be above 0.")
    # a mistake in a later method must show before the first search
    metrics = {label: METRICS[assemble(one).task.metrics[0]] for label, one in described.items()}
    overridden = find_overridden_defaults(rows, described, config, own or {}, [*settings, *parse_space(space)])
    with folder_of_runs(out) as folder:
        for label, one in described.items():
            _check_search(folder / label, one, space, view)
        found = [
            _search(
                folder / label,
                one,
                ranges[label],
                trials,
                view,
                metrics[label],
                overridden.get(label, {}),
                progress,
                Tracking(track, folder),
            )
            for label, one in described.items()
        ]
    return [replace(one, file=None) for one in found] if out is None else found


def _need_optuna() -> None:
    try:
        import optuna
    except ImportError:
        raise errors.PackageError("a search needs Optuna: pip install 'pluribus[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def _ranges(space: Mapping[str, Range], described: Mapping[str, Experiment]) -> dict[str, dict[str, Range]]:
    """By method, the ranges that concern it. Refuse a name that concerns none."""
    own = {method: hyperparameters(one.build_method()) for method, one in described.items()}
    known = [*TRAINING, *(name for names in own.values() for name in names)]
    for name in space:
        if name not in known:
            raise errors.unknown("setting in --space", name, known, f"pluribus run {next(iter(described))} --help")
    ranges = {method: {k: v for k, v in space.items() if k in (*TRAINING, *names)} for method, names in own.items()}
    for method, one in described.items():
        for name, whole in _are_whole(one, ranges[method]).items():
            if whole:
                ranges[method][name].check_whole(name)
    return ranges


def _check_search(folder: Path, described: Experiment, space: str, view: str) -> None:
    """Refuse an existing search that has other settings."""
    path = folder / "search.json"
    settings = {k: v for k, v in described.settings().items() if v is not None}
    wanted = {"space": space, "view": choose_view(described.build_method().views, view), "settings": settings}
    if path.exists():
        if read_json(path) != wanted:
            raise errors.OtherRunError(f"{folder} holds a search with other settings. Choose another --out.")
        return
    make_folder(folder)
    write_json(path, wanted)


def _search(
    folder: Path,
    described: Experiment,
    space: Mapping[str, Range],
    trials: int,
    view: str,
    metric: Metric,
    overridden: Mapping[str, Any],
    progress: bool,
    track: Tracking,
) -> Tuned:
    view = choose_view(described.build_method().views, view)
    tried = _read_trials(folder / "trials.jsonl", described, space)[:trials]
    for count in range(len(tried), trials):
        settings = _propose(described, space, metric, tried)
        path, wanted = folder / f"trial-{count}", _apply(described, settings)
        one = {"trial": count, "settings": settings, "score": _run_trial(path, wanted, view, metric, progress, track)}
        append_lines(folder / "trials.jsonl", [one])
        tried.append(one)
    best = (min if metric.smaller else max)(tried, key=lambda one: float(one["score"]))
    found = _apply(described, best["settings"])
    file = folder / "best.toml"
    write_text(file, to_toml(found.settings()))
    label = folder.name
    cautions = note_defaults({label: overridden}, {label: found}, FOR_ONE)
    command = repeat("run", found)
    about = label, found.method, metric.name, best["score"], view, best["settings"]
    return Tuned(*about, command, file, tried, cautions)


def _read_trials(path: Path, described: Experiment, space: Mapping[str, Range]) -> list[dict[str, Any]]:
    """The trials of a search that was stopped. Refuse one that is none of this search."""
    whole = _are_whole(described, space)

    def is_settings(settings: Any) -> bool:
        known = isinstance(settings, dict) and settings.keys() == space.keys()
        return known and all(space[name].holds(value, whole[name]) for name, value in settings.items())

    checks: dict[str, Check] = {"trial": is_count, "settings": is_settings, "score": is_number}
    remedy = "Delete this line and all after it: the search resumes with the trial of this line."
    return read_checked_lines(path, lambda line: first_wrong(line, checks), remedy)


def _propose(
    described: Experiment, space: Mapping[str, Range], metric: Metric, tried: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Settings of the next trial. Its random draws depend on a key, so no sampler must be saved."""
    import optuna

    key = number(described.seed, "tune", described.method, len(tried)) % 2**32
    direction = optuna.study.StudyDirection.MINIMIZE if metric.smaller else optuna.study.StudyDirection.MAXIMIZE
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=key))
    for one in tried:
        fixed, value = optuna.trial.FixedTrial(one["settings"]), float(one["score"])
        _suggest(described, space, fixed)  # fills fixed.distributions
        study.add_trial(optuna.trial.create_trial(params=fixed.params, distributions=fixed.distributions, value=value))
    return _suggest(described, space, study.ask())


def _suggest(described: Experiment, space: Mapping[str, Range], trial: Any) -> dict[str, Any]:
    whole = _are_whole(described, space)
    return {name: values.suggest(trial, name, whole[name]) for name, values in space.items()}


def _are_whole(described: Experiment, space: Iterable[str]) -> dict[str, bool]:
    """Whether a setting takes whole numbers, by name."""
    now = vars(described) | hyperparameters(described.build_method())
    return {name: isinstance(now[name], int) for name in space}


def _apply(described: Experiment, settings: Mapping[str, Any]) -> Experiment:
    training = {name: value for name, value in settings.items() if name in TRAINING}
    hyper = {name: value for name, value in settings.items() if name not in TRAINING}
    return replace(described, **convert_fields(Experiment, training), hyper={**described.hyper, **hyper})


def _run_trial(path: Path, described: Experiment, view: str, metric: Metric, progress: bool, track: Tracking) -> float:
    """Run or resume a trial. Return its validation metric, or the worst if training diverged. Test data is not used."""
    try:
        result = run_or_resume(replace(described, out=str(path)), progress=progress, track=track)
    except errors.NotFiniteError:
        return metric.worst
    value = result.summary[view]["selected"]["val"]["mean"]
    return metric.worst if value is None else float(value)
