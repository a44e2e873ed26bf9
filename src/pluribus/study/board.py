"""The terminal output of a comparison: the progress of all its runs, then the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.text import Text

from pluribus.experiment import Experiment
from pluribus.internal.tables import print_tables
from pluribus.study.parallel import Failure, Progress
from pluribus.terminal import make_bar
from pluribus.track.lines import LOGGER, Pace

if TYPE_CHECKING:
    from pluribus.study.standings import Comparison


class Board:
    """One live progress line per run, on standard error. Without a terminal, log lines."""

    def __init__(
        self, experiments: Sequence[Experiment], folder: Path, shown: bool = True, console: Console | None = None
    ) -> None:
        console = console or Console(stderr=True)
        live = console.is_terminal or console.is_jupyter
        self._logged, self._pace = shown and not live, Pace()
        self._bar = make_bar(
            TextColumn(" {task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[score]:5}"),
            TextColumn("{task.fields[state]}", style="dim"),
            console=console,
            disable=not (shown and live),
        )
        self._tasks: dict[str, TaskID] = {}
        paths = [Path(one.out or "") for one in experiments]
        names = [str(path.relative_to(folder)) for path in paths]
        for one, path, name in zip(experiments, paths, names, strict=True):
            state = "already done" if (path / "result.json").exists() else "waiting"
            rounds = one.all_rounds()
            done = rounds if state != "waiting" else 0
            padded = escape(name.ljust(max(map(len, names))))
            task = self._bar.add_task(padded, total=rounds, completed=done, score="", state=state)
            self._tasks[one.out or ""] = task

    def __enter__(self) -> Board:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, out: str, progress: Progress) -> None:
        self._bar.update(self._tasks[out], completed=progress.done, state="running")
        if progress.score is not None:
            self._bar.update(self._tasks[out], score=f"{progress.score:.3f}")
        self._log(out)

    def finish(self, out: str, failure: Failure | None) -> None:
        self._bar.update(self._tasks[out], state="failed" if failure else "done")
        self._log(out, certainly=True)

    def _log(self, out: str, certainly: bool = False) -> None:
        """Log the state of a run: its end always, what is in between at most every ten seconds."""
        if not self._logged or not self._pace.is_due(certainly):
            return
        task = self._bar.tasks[self._tasks[out]]
        ended = sum(one.fields["state"] not in ("waiting", "running") for one in self._bar.tasks)
        parts = [f"{task.completed:.0f} of {task.total:.0f} rounds", task.fields["state"], task.fields["score"]]
        facts = ", ".join(part for part in (*parts, f"{ended} of {len(self._tasks)} runs have ended") if part)
        LOGGER.info(f"{Text.from_markup(task.description).plain.rstrip()}: {facts}")


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Print results, cost and differences, with their notes."""
    console = console or Console(highlight=False)
    one = next(iter(found.experiments.values()))
    seeds = [run.seed for run in found.runs[found.baseline]]
    which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    least, most = (of(row.rounds for row in found.rows) for of in (min, max))
    rounds = str(least) if least == most else f"{least} to {most}"
    what = f"compare {', '.join(found.runs)}   {one.data_name}   {one.clients} clients   {rounds} rounds   {which}"
    print_tables(what, found.tables, found.notes, console, found.cautions)
    if found.folder is not None:
        console.print(f"\n Saved {found.folder}", markup=False, soft_wrap=True)
