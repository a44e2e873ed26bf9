"""The terminal output of a search: a line per trial that has ended, and the progress of those that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from pluribus.internal.metrics import Metric
from pluribus.study.parallel import Progress
from pluribus.terminal import make_bar
from pluribus.track.lines import LOGGER

WIDTH = 9  # least characters of a column with values


class TrialBoard:
    """Shows a search on standard error. Without a terminal, it logs a line per trial that has ended."""

    def __init__(
        self, rounds: Mapping[str, int], seeds: int, shown: bool = True, console: Console | None = None
    ) -> None:
        """`rounds` are those of all trials, seeds not counted, by label."""
        console = console or Console(stderr=True, highlight=False)
        live = console.is_terminal or console.is_jupyter
        self._is_live, self._is_logged = shown and live, shown and not live
        self._console = console
        self._bar = make_bar(
            TextColumn(" {task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            _TimeOrScore(),
            TextColumn("{task.fields[about]}", style="dim", table_column=Column(ratio=1, no_wrap=True)),
            console=console,
            disable=not self._is_live,
        )
        self._bar.expand = True  # only the last column is cut off if the terminal is narrow
        self._seeds = seeds
        self._total = sum(rounds.values()) * seeds
        self._per_label = rounds
        self._done = 0  # rounds of the trials that have ended, with those that were not needed
        self._tasks: dict[int, TaskID] = {}
        self._all: TaskID | None = None

    def __enter__(self) -> TrialBoard:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(
        self, label: str, metric: Metric, names: Sequence[str], trials: int, ended: int, best: Mapping[str, Any] | None
    ) -> None:
        """The search of a row begins, or is resumed after `ended` trials."""
        self._label, self._metric, self._names, self._trials = label, metric, names, trials
        self._rounds = self._per_label[label] // trials * self._seeds  # of one trial
        self._ended = ended
        self._done += self._rounds * ended
        if self._all is None:
            self._all = self._bar.add_task("search", total=self._total, about="", skipped=0)
        skipped = self._bar.tasks[0].fields["skipped"] + self._rounds * ended
        self._bar.update(self._all, completed=self._done, skipped=skipped, about=self._summary(best))
        read = f"   {ended} of {trials} trials are already done" if ended else ""
        self._print(f"[bold]{escape(label)}[/]{read}")
        self._print(self._row("trial", metric.name, names, ""), style="dim")

    def start(self, number: int, settings: Mapping[str, Any]) -> None:
        """A trial starts."""
        about = escape(_settings_text(settings))
        self._tasks[number] = self._bar.add_task(f"trial {number}", total=self._rounds, score="", about=about)

    def update(self, number: int, seeds: int, progress: Progress) -> None:
        """A round of a trial is done, after so many finished seeds."""
        done = seeds * (self._rounds // self._seeds) + progress.done
        self._bar.update(self._tasks[number], completed=done)
        if progress.score is not None:
            self._bar.update(self._tasks[number], score=f"{progress.score:.3f}")
        self._show_all()

    def end(self, one: Mapping[str, Any], best: Mapping[str, Any]) -> None:
        """A trial has ended."""
        self._bar.remove_task(self._tasks.pop(one["trial"]))
        self._ended += 1
        self._done += self._rounds
        state = f"pruned after {_count(one['rounds'], 'round')}" if one["state"] == "PRUNED" else ""
        state = "best so far" if one["trial"] == best["trial"] else state
        values = [_value_text(one["settings"][name]) for name in self._names]
        score = _score_text(one["score"])
        self._print(self._row(one["trial"], score, values, state), style="" if state == "best so far" else "dim")
        self._show_all()
        self._bar.update(self._all_task(), about=self._summary(best))
        if self._is_logged:
            facts = f"{self._metric.name} {score} with {_settings_text(one['settings'])}"
            ended = f"{self._ended} of {self._trials} trials have ended"
            best_is = f"the best is trial {best['trial']} with {_score_text(best['score'])}"
            parts = [facts, *([state] if state.startswith("pruned") else []), ended, best_is]
            LOGGER.info(f"{self._label}, trial {one['trial']}: {', '.join(parts)}")

    def _all_task(self) -> TaskID:
        assert self._all is not None, "a search has begun"
        return self._all

    def _show_all(self) -> None:
        running = sum(task.completed for task in self._bar.tasks if task.id in self._tasks.values())
        self._bar.update(self._all_task(), completed=self._done + running)

    def _summary(self, best: Mapping[str, Any] | None) -> str:
        trial = "" if best is None else f", best {_score_text(best['score'])} (trial {best['trial']})"
        return escape(f"{self._label} {self._ended} of {self._trials}{trial}")

    def _row(self, trial: object, score: str, values: Sequence[str], state: str) -> str:
        widths = [max(WIDTH, len(name)) for name in self._names]
        cells = "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True))
        return escape(f" {trial!s:>6}  {score:>{max(WIDTH, len(self._metric.name))}}  {cells}  {state}".rstrip())

    def _print(self, text: str, style: str = "") -> None:
        if self._is_live:
            self._console.print(text, style=style, highlight=False)


class _TimeOrScore(ProgressColumn):
    """The score of a trial. For the search, the time that is left at its speed so far; at the end, the elapsed time."""

    def render(self, task: Task) -> Text:
        if "skipped" not in task.fields:
            return Text(task.fields["score"])
        done, left = task.completed - task.fields["skipped"], (task.total or 0) - task.completed
        if done <= 0 or task.elapsed is None:
            return Text("-:--:--")
        seconds = task.elapsed / done * left if left > 0 else task.elapsed
        return Text(str(timedelta(seconds=round(seconds))), style="cyan")


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value_text(value)}" for name, value in settings.items())


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _score_text(score: float) -> str:
    return f"{score:.3f}" if abs(score) < 1e6 else f"{score:.3g}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"
