"""A run folder: everything about one run, readable without this library.

config.toml       the settings, to run it again
started.json      the settings that decide the results, as they were at the start
partition.json    the classes of each client, and a hash of all row numbers
metrics.jsonl     a line per round
traffic.jsonl     every transfer, by tensor
state/            the full state, for resume; state/selected/ has the models of the rounds that validation selects
result.json       the summary, once the run is finished
"""

from __future__ import annotations

import json
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from pluribus.data import Manifest
from pluribus.errors import CheckpointError, DamagedFileError, DataError, FileAccessError, OtherRunError
from pluribus.internal.paths import check_path
from pluribus.internal.system import lock_file, sync
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import append_lines, read_json, to_json, write_json, write_text
from pluribus.storage.history import read_metrics, read_traffic
from pluribus.storage.toml import to_toml

RESULT = "result.json"  # of a finished run
DIGEST, PUBLIC_DIGEST = "data_digest", "public_data_digest"  # of data that were given as objects
PATHS = ("data", "weights")  # may have moved to another folder; partition.json shows whether the data are the same


class RunFolder:
    """One run on disk. While it is open, no other process can write to it, but any number of them can read it."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self._lock = None if read_only else self._acquire_lock()
        try:
            self.checkpoint = Checkpoint(path / "state", read_only)
        except CheckpointError:
            self.close()
            raise

    @classmethod
    def create(cls, out: str) -> RunFolder:
        """Create a run folder."""
        cls.check_free(out)
        path = check_path(out)
        try:
            (path / "state").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileAccessError(
                f"cannot write to {path}: {error.strerror}. Choose another folder with --out."
            ) from error
        return cls(path)

    @staticmethod
    def check_free(out: str | None) -> None:
        if out and (check_path(out) / "config.toml").exists():
            raise OtherRunError(
                f"{out} already holds a run. Resume it (pluribus resume {out}) or choose another --out."
            )

    @classmethod
    def open(cls, path: str | Path, read_only: bool = False) -> RunFolder:
        """Open an existing run folder. `read_only` takes no lock: another process may write to the folder."""
        folder = check_path(path)
        if not (folder / "config.toml").exists():
            raise FileAccessError(f"{path} is not a run folder: it has no config.toml.")
        return cls(folder, read_only)

    def _acquire_lock(self) -> IO[str]:
        try:
            lock = (self.path / ".lock").open("w")
            lock_file(lock)
        except BlockingIOError:
            raise OtherRunError(f"{self.path} is in use by another process.") from None
        except OSError as error:
            raise FileAccessError(f"cannot write to {self.path}: {error.strerror}.") from error
        return lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def look_again(self) -> bool:
        """Read the newest commit of another process; returns whether there is a new one."""
        before = self.checkpoint.latest
        self.checkpoint = Checkpoint(self.path / "state", read_only=True)
        return self.checkpoint.latest != before

    # ---- what a run writes -----------------------------------------------------------------------------------------

    def write_config(self, settings: dict[str, Any], decisive: dict[str, Any]) -> None:
        """Write all settings, and those that decide the results a second time, to a file that nobody edits."""
        write_json(self.path / "started.json", decisive)
        write_text(self.path / "config.toml", to_toml(settings))  # last: it makes the folder a run that can be resumed

    def write_partition(self, manifest: Manifest) -> None:
        write_text(self.path / "partition.json", manifest.to_json())

    def write_normalization(self, facts: dict[str, Any] | None) -> None:
        """Write means and deviations, if rows are normalized by them."""
        if facts is not None:
            write_json(self.path / "normalization.json", facts)

    def read_partition(self) -> Manifest:
        path = self.path / "partition.json"
        try:
            return Manifest.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FileAccessError(f"cannot read {path}: {error.strerror}.") from error
        except (DataError, UnicodeDecodeError) as error:
            raise DamagedFileError(f"{path} is damaged: {error}") from error

    def append(self, record: dict[str, Any], traffic: list[dict[str, Any]]) -> None:
        append_lines(self.path / "metrics.jsonl", [record])
        append_lines(self.path / "traffic.jsonl", traffic)

    def sync_lines(self) -> None:
        """Make the rounds so far durable, before the commit that relies on them."""
        for name in ("metrics.jsonl", "traffic.jsonl"):
            if (self.path / name).exists():
                sync(self.path / name)

    def history(self, until: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rounds and transfers up to a committed round. Later lines, left by a crash, are skipped; a folder that is
        open for writing also removes them from its files."""
        paths = [self.path / name for name in ("metrics.jsonl", "traffic.jsonl")]
        metrics, traffic = read_metrics(paths[0]), read_traffic(paths[1])
        if self.is_finished:  # even if its checkpoints were deleted to save space
            return metrics, traffic
        metrics, traffic = lines_until(metrics, until), lines_until(traffic, until)
        if until is not None and len(metrics) != until + 1:
            raise DamagedFileError(
                f"{paths[0]} is damaged: it holds {len(metrics)} of {until + 1} rounds. "
                f"Start again: pluribus run --config {self.path / 'config.toml'}"
            )
        for path, lines in zip(paths, (metrics, traffic), strict=True) if self._lock is not None else ():
            write_text(path, "".join(to_json(line) + "\n" for line in lines))
        return metrics, traffic

    def write_result(self, summary: dict[str, Any]) -> None:
        write_json(self.path / RESULT, summary)

    @property
    def is_finished(self) -> bool:
        return (self.path / RESULT).exists()


def check_unchanged(folder: Path, decisive: dict[str, Any], file: Path) -> None:
    """Refuse settings in `file` that differ from those at the start of the run: its results would belong to neither.

    A setting is not checked if the version that started the run did not record it.
    """
    path = folder / "started.json"
    before = read_json(path) if path.exists() else {}
    if not isinstance(before, dict):
        raise DamagedFileError(f"{path} is damaged: it holds no settings. Start a new run with another --out.")
    now = json.loads(to_json(decisive))
    changed = [name for name in now if name in before and not _is_same(name, before[name], now[name])]
    if DIGEST in changed or PUBLIC_DIGEST in changed:
        raise OtherRunError(f"{folder} was started with other data than those that are given now: give the same data.")
    if changed:
        raise OtherRunError(
            f"{' and '.join(_change(name, before[name], now[name]) for name in changed)} when {folder} was started. "
            f"Change it back in {file}, or start a new run with another --out."
        )


def _is_same(name: str, before: Any, now: Any) -> bool:
    if name in PATHS and isinstance(before, str) and isinstance(now, str):
        return Path(before).name == Path(now).name
    return bool(before == now)


def _change(name: str, before: Any, now: Any) -> str:
    was, is_now = ("not set" if value is None else value for value in (before, now))
    return f"'{name}' is {is_now}, but was {was}"


def lines_until(lines: list[dict[str, Any]], until: int | None) -> list[dict[str, Any]]:
    """Lines before the first line of a later round. Layout lines have no round; at the end they are dropped, too."""
    last = -1 if until is None else until
    kept = list(takewhile(lambda line: line.get("round", -1) <= last, lines))
    while kept and "tensors" in kept[-1]:
        kept.pop()
    return kept


def new_folder(label: str) -> Path:
    """A path under `runs/` for a new run, with the date and a label."""
    return free(Path("runs") / f"{date.today().isoformat()}-{label}")


def free(path: Path) -> Path:
    """The path, or the first path with a number appended that does not exist yet."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
