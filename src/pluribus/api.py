"""The Python face of the library: run, resume, open what was run. Same names and defaults as the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pluribus.assembly import Assembly, assemble
from pluribus.engines.worker import check_guarded
from pluribus.errors import FileAccessError, HostLostError, NotFiniteError, OtherRunError, RangeError, WorkerError
from pluribus.experiment import SITES, Experiment, experiment, from_toml
from pluribus.federation import Federation, Observer
from pluribus.method import Method
from pluribus.result import RESULT, Result
from pluribus.storage.folder import RunFolder, check_unchanged
from pluribus.storage.toml import read_toml
from pluribus.terminal import Progress
from pluribus.track.tracker import trackers

MOST_LOSSES = 2  # of hosts, from one checkpoint to the next: more are no accident


def run(
    method: str | Method | type[Method] | Experiment | None = None,
    *,
    config: str | Path | None = None,
    progress: bool = True,
    observers: Sequence[Observer] = (),
    track: str | Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Run a federation and return its figures.

    `method` is a name, a dotted path, a Method class or instance, or a whole Experiment; without it, what `config`
    names, or FedGH. Settings are those of the command line (`pluribus run fedgh --help`), with underscores. `track`
    names trackers, such as `["tensorboard", "wandb"]`.

    >>> result = run("fedgh", data="digits", clients=8, rounds=20, seed=0)     # doctest: +SKIP
    >>> result.table()                                                         # doctest: +SKIP
    """
    check_guarded()
    watching = _watching(observers, track, progress)
    described = experiment(method, config, **settings)
    with _reproducible(described):
        parts = assemble(described)
        folder = RunFolder.create(described.out, _label(described))
        try:
            folder.write_partition(parts.manifest)
            folder.write_config(described.settings(), described.decisive())
            return _run(parts, folder, watching)
        finally:
            folder.close()


def resume(
    path: str | Path, *, progress: bool = True, observers: Sequence[Observer] = (), track: str | Sequence[str] = ()
) -> Result:
    """Go on with a run that was stopped, from its last checkpoint; a finished run gives its result back."""
    check_guarded()
    if (Path(path) / RESULT).exists():
        return load_result(path)
    watching = _watching(observers, track, progress)
    folder = RunFolder.open(path)
    try:
        described = _described(folder)
        _check_settings(folder, described)
        with _reproducible(described):
            parts = assemble(described)
            _check_partition(folder, parts)
            return _run(parts, folder, watching)
    finally:
        folder.close()


def load_result(path: str | Path) -> Result:
    """The result of a finished run. Neither its data nor the code of its method is needed."""
    folder, config = Path(path), Path(path) / "config.toml"
    if not (folder / RESULT).exists():
        raise FileAccessError(f"{path} holds no finished run: it has no {RESULT}. pluribus resume finishes a run.")
    if config.exists():
        written = read_toml(config)
        hyper = written.pop("hyper", {})
        check_unchanged(folder, written | hyper, config)
    return Result.read(folder)


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[Assembly, RunFolder]]:
    """A run as it lies on disk, to be read: its parts, on the CPU, and its folder."""
    folder = RunFolder.open(path, read_only=True)
    try:
        described = replace(_described(folder), device="cpu")
        _check_settings(folder, described)
        with _reproducible(described):
            parts = assemble(described)
            _check_partition(folder, parts)
            folder.look_again()  # that took a while, and the run may go on
            yield parts, folder
    finally:
        folder.close()


def check_client(path: str | Path, parts: Assembly, client: int) -> None:
    """Refuse a client that a run does not have."""
    if client not in parts.cards:
        raise RangeError(f"{path} has no client {client}: its clients are 0 to {len(parts.cards) - 1}.")


def _label(described: Experiment) -> str:
    """The name of a run's own folder: method, data and seed, of a path or dotted path the last part."""
    method = described.method.rpartition(".")[2]
    data = Path(described.data).name.removesuffix(".npz").rpartition(".")[2]
    return f"{method}-{data}-{described.seed}"


def _watching(observers: Sequence[Observer], track: str | Sequence[str], progress: bool) -> list[Observer]:
    """Everyone who watches; the bar last, because it shows what the others warn of."""
    return [*observers, *trackers(track), *([Progress()] if progress else [])]


def _run(parts: Assembly, folder: RunFolder, observers: Sequence[Observer]) -> Result:
    try:
        with ExitStack() as stack:
            for one in observers:
                if isinstance(one, AbstractContextManager):
                    stack.enter_context(one)
            return _run_on(parts, folder, observers)
    except NotFiniteError as error:
        raise NotFiniteError(f"{error} Lower --lr.") from error
    except WorkerError as error:
        raise type(error)(f"{error} Go on with: pluribus resume {folder.path}") from error


def _run_on(parts: Assembly, folder: RunFolder, observers: Sequence[Observer]) -> Result:
    """Run, and where clients were lost with their host, go on from the last checkpoint: the numbers stay the same."""
    lost: list[str] = []
    since = 0  # the last checkpoint
    while True:
        latest = folder.checkpoint.latest
        try:
            return Federation(replace(parts, warnings=[*parts.warnings, *lost]), folder, observers).run()
        except HostLostError as error:
            since = since + 1 if folder.checkpoint.latest == latest else 1
            if since > MOST_LOSSES:
                raise
            at = "the beginning" if folder.checkpoint.latest is None else f"round {folder.checkpoint.latest + 1}"
            lost.append(f"{error} Went on from {at}.")


def _described(folder: RunFolder) -> Experiment:
    described = Experiment(**from_toml(folder.path / "config.toml") | {"out": str(folder.path)})
    if described.data == SITES:
        raise OtherRunError(
            f"{folder.path} is a federation of real sites, whose data and models are theirs: pluribus serve goes on "
            f"with it, and pluribus predict works at a site."
        )
    return described


def _check_settings(folder: RunFolder, described: Experiment) -> None:
    """The same folder with other settings would be another experiment."""
    file = folder.path / "config.toml"
    check_unchanged(folder.path, {"method": described.method}, file)  # before its hyper-parameters, which are another's
    check_unchanged(folder.path, described.decisive(), file)


def _check_partition(folder: RunFolder, parts: Assembly) -> None:
    """The same experiment on other data would be another experiment."""
    if folder.read_partition().digest != parts.manifest.digest:
        raise OtherRunError(
            f"{folder.path} was run on other data: its partition.json does not match {parts.experiment.data}."
        )


@contextmanager
def _reproducible(described: Experiment) -> Iterator[None]:
    """So many CPU threads, and on a GPU only kernels that give the same bits every time; as it was, on exit."""
    cudnn = torch.backends.cudnn
    before, flags = torch.get_num_threads(), (cudnn.deterministic, cudnn.allow_tf32)
    # read when cuBLAS starts: with its other workspaces the order of summation depends on what runs beside it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn.deterministic, cudnn.allow_tf32 = True, described.precision != "float32"
    if (threads := described.threads_per_worker()) is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        cudnn.deterministic, cudnn.allow_tf32 = flags
