"""The engine of comparisons, studies, searches and tables of papers: it finishes a grid of runs.

Every run has a folder of its own. A finished run is not repeated, and a stopped run is resumed. Runs that nobody wants
to keep have a temporary folder.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pluribus import errors
from pluribus.data.datasets import short_name
from pluribus.experiment import Experiment, why_not_portable
from pluribus.internal.paths import check_path
from pluribus.settings import flag_name
from pluribus.storage.folder import free
from pluribus.storage.toml import read_toml, to_toml
from pluribus.study.board import Board
from pluribus.study.parallel import run_all, traceback_path
from pluribus.track.tracker import Tracking, make_trackers


@contextmanager
def folder_of_runs(out: str | Path | None) -> Iterator[Path]:
    """The folder of several runs. None: a temporary one, which is deleted at the end."""
    if out is not None:
        yield Path(out)
        return
    with TemporaryDirectory(prefix="pluribus-") as folder:
        yield Path(folder)


def new_folder(command: str, label: str) -> Path:
    """A new folder under runs/ for a command."""
    return free(Path("runs") / f"{date.today().isoformat()}-{command}-{label}")


def data_label(data: Any) -> str:
    """A data set in the name of a folder: its name, or the last part of its path."""
    name = data if isinstance(data, str | Path) else getattr(data, "name", getattr(data, "__name__", "data"))
    return short_name(str(name))


def check_counts(**counts: int | None) -> None:
    """Refuse a number of seeds, jobs and so on below 1. None: the default."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise errors.RangeError(f"{flag_name(name)} must be at least 1, not {value}.")


def check_trackers(track: str | Sequence[str], out: str | Path | None) -> None:
    """Refuse trackers that do not exist, or that would write into a temporary folder."""
    if make_trackers(track) and out is None:
        raise errors.MissingSettingError("trackers write to the folders of the runs: name a folder with --out.")


def check_settings(described: Experiment) -> None:
    """Refuse an existing run that has other settings."""
    path = Path(described.out or "") / "config.toml"
    if not path.exists():
        return
    before, wanted = _flatten(read_toml(path)), _flatten(tomllib.loads(to_toml(described.settings())))
    for name in {**before, **wanted}:
        if before.get(name) != wanted.get(name):
            was, now = (settings.get(name, "unset") for settings in (before, wanted))
            what = f"{flag_name(name)} {was}, not {now}"
            raise errors.OtherRunError(f"{described.out} was run with {what}. Choose another --out.")


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in settings.items() if k != "hyper"}, **settings.get("hyper", {})}


def finish_runs(
    grid: Sequence[Experiment],
    folder: Path,
    jobs: int | None = None,
    progress: bool = True,
    track: str | Sequence[str] = (),
    kept: bool = True,
) -> None:
    """Run or resume all unfinished experiments, each in its folder. A failed run does not stop the others.

    `kept` says whether the folder stays. If not, no sentence names it.
    """
    for one in grid:
        check_settings(one)
    make_folder(folder)
    todo = [one for one in grid if not is_finished(one)]
    with saying_how_to_resume(folder, kept), Board(grid, folder, shown=progress) as board:
        failed = run_all(todo, min(jobs or default_jobs(grid), len(todo)), board, Tracking(track, folder))
    refuse_unfinished(failed, folder, kept)


@contextmanager
def saying_how_to_resume(folder: Path, kept: bool) -> Iterator[None]:
    """If Ctrl-C stops runs in this block, say how to resume them."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not kept:
            raise
        raise KeyboardInterrupt(f"Resume with the same command and --out {folder}") from stop


def refuse_unfinished(failed: Mapping[str, str], folder: Path, kept: bool) -> None:
    """Raise an error if runs failed. It has their reasons, by run folder."""
    if failed:
        told = {out: _with_traceback(out, reason) if kept else reason for out, reason in failed.items()}
        rest = f"The other runs are kept. Use the same command with --out {folder} to resume."
        if not kept:
            rest = "No run is kept: name a folder with --out to keep and resume the others."
        raise errors.UnfinishedError(f"{_explain(told, folder)} {rest}", told)


def make_folder(folder: Path) -> None:
    """Create a folder for runs."""
    check_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.FileAccessError(f"cannot write to {folder}: {error.strerror}. Choose another --out.") from error


def is_finished(one: Experiment) -> bool:
    """Whether the folder of an experiment holds a finished run."""
    return (Path(one.out or "") / "result.json").exists()


def default_jobs(grid: Sequence[Experiment]) -> int:
    """Number of parallel runs: one on a GPU or a cluster, otherwise as many as the cores allow.

    Objects that other processes cannot get, such as those of a notebook's cell, also run one after the other.
    """
    described = grid[0]
    if why_not_portable(grid):
        return 1
    if described.on_gpu() or described.engine == "ray":
        return 1
    return max(1, (os.cpu_count() or 1) // (described.processes() * (described.threads or 1)))


def _with_traceback(out: str, reason: str) -> str:
    path = traceback_path(out)
    return f"{reason} The traceback is in {path}." if path.exists() else reason


def _explain(failed: Mapping[str, str], folder: Path) -> str:
    """Say which runs failed, and why. Runs with the same reason share a sentence."""
    by_reason: dict[str, list[str]] = {}
    for run, reason in failed.items():
        by_reason.setdefault(reason, []).append(str(Path(run).relative_to(folder)))
    return " ".join(
        f"{first} failed: {reason}" + (f" {', '.join(others)} failed for the same reason." if others else "")
        for reason, (first, *others) in by_reason.items()
    )
