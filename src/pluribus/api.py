"""The Python interface: run, resume, load results. It has the names and defaults of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from pluribus.assembly import Assembly, assemble
from pluribus.errors import (
    DamagedFileError,
    FileAccessError,
    HostLostError,
    MissingSettingError,
    NotFiniteError,
    WorkerError,
)
from pluribus.experiment import Experiment, experiment
from pluribus.federation import Federation, Observer, check_observers
from pluribus.internal.arithmetic import reproducible
from pluribus.internal.keywords import Settings
from pluribus.internal.paths import check_path
from pluribus.internal.system import total_memory
from pluribus.method import Method
from pluribus.processes import check_guarded
from pluribus.result import Result
from pluribus.storage.code import Allow, how_to_resume, remember_code
from pluribus.storage.folder import RESULT, RunFolder, check_unchanged
from pluribus.storage.memory import MemoryRun
from pluribus.storage.reopen import check_partition, check_settings, read_experiment
from pluribus.storage.store import RunStore
from pluribus.storage.toml import read_toml
from pluribus.track.lines import show_progress
from pluribus.track.tracker import make_trackers

MOST_MEMORY = 0.5  # share of this machine's memory that a run without a folder may take unsaid
MOST_LOSSES = 2  # hosts that may be lost between two checkpoints; more are no accident


def run(
    method: str | Method | type[Method] | Experiment | None = None,
    *,
    config: str | Path | None = None,
    progress: bool = True,
    observers: Sequence[Observer] = (),
    track: str | Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Result:
    """Run a federation and return its result.

    `method` is a name, a dotted path, a Method class or instance, or a whole Experiment. Default: the method in
    `config`, or FedGH. Settings are the fields of `pluribus.Experiment` and the hyper-parameters of the method: those
    of the command line (`pluribus run fedgh --help`), with underscores.

    Some settings also take objects. `data`: a `Dataset`, arrays `(x, y)`, a torch Dataset, or a function that returns
    one of them. `models`: functions and modules beside names, also in a list or a mapping from client to model.
    `partition`: a function, one client number per row, or one list of rows per client. `device`: a torch device.

    The run is kept in memory unless `out` names a folder. `track` names trackers, which need a folder: tensorboard,
    mlflow, wandb.

    >>> result = run("fedgh", data="digits", clients=8, rounds=20, seed=0)     # doctest: +SKIP
    >>> result.table()                                                         # doctest: +SKIP
    """
    check_guarded()
    watchers = _collect_observers(observers, track, progress)
    described = experiment(method, config, **settings)
    remember_code(vars(described))
    if track and described.out is None:
        raise MissingSettingError("trackers write to the run folder: name one with --out.")
    with reproducible(described.threads_per_worker(), described.precision):
        parts = assemble(described)
        if described.out is None:
            return _run(replace(parts, warnings=[*parts.warnings, *_note_memory(parts)]), MemoryRun(), watchers)
        with closing(RunFolder.create(described.out)) as folder:
            folder.write_partition(parts.manifest)
            folder.write_normalization(parts.normalization())
            folder.write_config(described.settings(), described.decisive())
            return _run(parts, folder, watchers)


def resume(
    path: str | Path,
    *,
    data: Any = None,
    models: Any = None,
    partition: Any = None,
    public_data: Any = None,
    allow_code: Allow = False,
    progress: bool = True,
    observers: Sequence[Observer] = (),
    track: str | Sequence[str] = (),
) -> Result:
    """Continue a stopped run from its last checkpoint. For a finished run, return its result.

    A run that was started with objects needs the same `data`, `models`, `partition` and `public_data` again.
    `allow_code` lets the folder name your own code: all of it, or a list of dotted paths.
    """
    check_guarded()
    if (check_path(path) / RESULT).exists():
        return load_result(path, allow_code=allow_code)
    watchers = _collect_observers(observers, track, progress)
    with closing(RunFolder.open(path)) as folder:
        objects = {"data": data, "models": models, "partition": partition, "public_data": public_data}
        again = f"use pluribus resume {path} --allow-code"
        described = read_experiment(folder, allow_code, again, objects)
        check_settings(folder, described)
        with reproducible(described.threads_per_worker(), described.precision):
            parts = assemble(described)
            check_partition(folder, parts)
            return _run(parts, folder, watchers)


def load_result(path: str | Path, *, allow_code: Allow = False) -> Result:
    """Load the result of a finished run. This needs neither its data nor the code of its method.

    Its models need them. `allow_code` lets the folder name your own code for that: all of it, or a list of dotted
    paths.
    """
    folder = check_path(path)
    config = folder / "config.toml"
    if not (folder / RESULT).exists():
        raise FileAccessError(f"{path} holds no finished run: it has no {RESULT}. pluribus resume finishes a run.")
    if config.exists():
        written = read_toml(config)
        hyper = written.pop("hyper", {})
        if not isinstance(hyper, dict):
            raise DamagedFileError(f"{config} is damaged: hyper must be a table, not {hyper!r:.40}.")
        check_unchanged(folder, written | hyper, config)
    return Result.read(folder, allow_code)


def _note_memory(parts: Assembly) -> list[str]:
    """Warn if the state of all clients takes a large share of the memory: a current and a selected model of each."""
    needed = 2 * sum(parts.cards.nbytes(k) for k in parts.cards)
    if (memory := total_memory()) is None or needed < MOST_MEMORY * memory:
        return []
    return [f"the models of all clients may take {needed / 2**30:.1f} GiB of memory: --out keeps them on disk."]


def _collect_observers(observers: Sequence[Observer], track: str | Sequence[str], progress: bool) -> list[Observer]:
    """All observers. The progress bar is last, because it shows the warnings of the others."""
    check_observers(observers)
    return [*observers, *make_trackers(track), *([show_progress()] if progress else [])]


def _run(parts: Assembly, folder: RunStore, observers: Sequence[Observer]) -> Result:
    try:
        with ExitStack() as stack:
            for one in observers:
                if isinstance(one, AbstractContextManager):
                    stack.enter_context(one)
            return _run_despite_losses(parts, folder, observers)
    except NotFiniteError as error:
        raise NotFiniteError(f"{error.sentence} Lower --lr.") from error
    except WorkerError as error:
        if folder.path is None:
            raise
        again = how_to_resume(folder.path, vars(parts.experiment))
        raise type(error)(f"{error.sentence} Resume with: {again}") from error


def _run_despite_losses(parts: Assembly, folder: RunStore, observers: Sequence[Observer]) -> Result:
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
            lost.append(f"{error.sentence} Resumed from {at}.")
