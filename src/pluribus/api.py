"""The Python interface: run, resume, load results. It has the names and defaults of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pluribus.assembly import Assembly, assemble
from pluribus.errors import FileAccessError, HostLostError, NotFiniteError, WorkerError
from pluribus.experiment import Experiment, experiment
from pluribus.federation import Federation, Observer
from pluribus.internal.arithmetic import reproducible
from pluribus.method import Method
from pluribus.processes import check_guarded
from pluribus.result import Result
from pluribus.storage.folder import RESULT, RunFolder, check_unchanged
from pluribus.storage.reopen import check_partition, check_settings, read_experiment
from pluribus.storage.toml import read_toml
from pluribus.terminal import Progress
from pluribus.track.tracker import make_trackers

MOST_LOSSES = 2  # hosts that may be lost between two checkpoints; more are no accident


def run(
    method: str | Method | type[Method] | Experiment | None = None,
    *,
    config: str | Path | None = None,
    progress: bool = True,
    observers: Sequence[Observer] = (),
    track: str | Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Run a federation and return its result.

    `method` is a name, a dotted path, a Method class or instance, or a whole Experiment. Default: the method in
    `config`, or FedGH. Settings are those of the command line (`pluribus run fedgh --help`), with underscores. `track`
    names trackers, such as `["tensorboard", "wandb"]`.

    >>> result = run("fedgh", data="digits", clients=8, rounds=20, seed=0)     # doctest: +SKIP
    >>> result.table()                                                         # doctest: +SKIP
    """
    check_guarded()
    watchers = _collect_observers(observers, track, progress)
    described = experiment(method, config, **settings)
    with reproducible(described.threads_per_worker(), described.precision):
        parts = assemble(described)
        with closing(RunFolder.create(described.out, _label(described))) as folder:
            folder.write_partition(parts.manifest)
            folder.write_config(described.settings(), described.decisive())
            return _run(parts, folder, watchers)


def resume(
    path: str | Path, *, progress: bool = True, observers: Sequence[Observer] = (), track: str | Sequence[str] = ()
) -> Result:
    """Continue a stopped run from its last checkpoint. For a finished run, return its result."""
    check_guarded()
    if (Path(path) / RESULT).exists():
        return load_result(path)
    watchers = _collect_observers(observers, track, progress)
    with closing(RunFolder.open(path)) as folder:
        described = read_experiment(folder)
        check_settings(folder, described)
        with reproducible(described.threads_per_worker(), described.precision):
            parts = assemble(described)
            check_partition(folder, parts)
            return _run(parts, folder, watchers)


def load_result(path: str | Path) -> Result:
    """Load the result of a finished run. This needs neither its data nor the code of its method."""
    folder, config = Path(path), Path(path) / "config.toml"
    if not (folder / RESULT).exists():
        raise FileAccessError(f"{path} holds no finished run: it has no {RESULT}. pluribus resume finishes a run.")
    if config.exists():
        written = read_toml(config)
        hyper = written.pop("hyper", {})
        check_unchanged(folder, written | hyper, config)
    return Result.read(folder)


def _label(described: Experiment) -> str:
    """Name of a new run folder: method, data and seed. Of a path or dotted path, only the last part is used."""
    method = described.method.rpartition(".")[2]
    data = Path(described.data).name.removesuffix(".npz").rpartition(".")[2]
    return f"{method}-{data}-{described.seed}"


def _collect_observers(observers: Sequence[Observer], track: str | Sequence[str], progress: bool) -> list[Observer]:
    """All observers. The progress bar is last, because it shows the warnings of the others."""
    return [*observers, *make_trackers(track), *([Progress()] if progress else [])]


def _run(parts: Assembly, folder: RunFolder, observers: Sequence[Observer]) -> Result:
    try:
        with ExitStack() as stack:
            for one in observers:
                if isinstance(one, AbstractContextManager):
                    stack.enter_context(one)
            return _run_despite_losses(parts, folder, observers)
    except NotFiniteError as error:
        raise NotFiniteError(f"{error} Lower --lr.") from error
    except WorkerError as error:
        raise type(error)(f"{error} Resume with: pluribus resume {folder.path}") from error


def _run_despite_losses(parts: Assembly, folder: RunFolder, observers: Sequence[Observer]) -> Result:
    """Run. If clients are lost with their host, resume from the last checkpoint: the results are the same."""
    lost: list[str] = []
    losses = 0  # since the last checkpoint
    while True:
        latest = folder.checkpoint.latest
        try:
            return Federation(replace(parts, warnings=[*parts.warnings, *lost]), folder, observers).run()
        except HostLostError as error:
            losses = losses + 1 if folder.checkpoint.latest == latest else 1
            if losses > MOST_LOSSES:
                raise
            at = "the beginning" if folder.checkpoint.latest is None else f"round {folder.checkpoint.latest + 1}"
            lost.append(f"{error} Resumed from {at}.")
