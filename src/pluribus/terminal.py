"""Everything that is printed to a person: a progress bar during a run, and tables of results."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from pluribus.errors import to_words
from pluribus.evaluate import evaluated_clients, headline, headline_in
from pluribus.internal.views import AFTER, View, choose_view

if TYPE_CHECKING:
    from pluribus.assembly import Assembly
    from pluribus.conformance.report import Status
    from pluribus.data.check import DataCheck
    from pluribus.data.folders import ImageLabels
    from pluribus.federation import Federation
    from pluribus.internal.ledger import Ledger
    from pluribus.internal.metrics import Metric
    from pluribus.prediction import AnyPrediction
    from pluribus.result import Result
    from pluribus.study.bench import Bench


WARMUP = "warm-up"  # shown in the column of the metric
NOTEBOOK_WIDTH = 100  # characters
NOTEBOOK_SECONDS = 0.1  # between two updates in a notebook


def make_bar(*columns: ProgressColumn, console: Console, disable: bool = False) -> Bar:
    """A live bar with these columns, for a terminal or a notebook."""
    kind = NotebookBar if console.is_jupyter else Bar
    return kind(*columns, console=console, disable=disable)


class NotebookBar(Bar):
    """A bar as text in the output of a notebook's cell. A bar of rich needs ipywidgets there."""

    _handle: Any = None  # of the text in the cell
    _updated = 0.0

    def start(self) -> None:
        if self._handle is None and not self.disable:
            display: Any = import_module("IPython.display")
            self._handle = display.display(self._text(), raw=True, display_id=True)

    def stop(self) -> None:
        self._show()

    def refresh(self) -> None:
        if self.get_time() - self._updated >= NOTEBOOK_SECONDS:
            self._show()

    def _show(self) -> None:
        if self._handle is not None:
            self._handle.update(self._text(), raw=True)
            self._updated = self.get_time()

    def update(self, *task: Any, **fields: Any) -> None:
        super().update(*task, **fields)
        self.refresh()

    def _text(self) -> dict[str, str]:
        text = io.StringIO()
        Console(file=text, width=NOTEBOOK_WIDTH, force_jupyter=False).print(self.get_renderable())
        return {"text/plain": text.getvalue().rstrip()}


class Progress:
    """Live progress bar on standard error: the headline metric, bytes and remaining time (at the end: elapsed time)."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self.bar = make_bar(
            TextColumn(" {task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[score]}"),
            TextColumn("up {task.fields[up]:>8}  down {task.fields[down]:>8}", style="dim"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )
        self._task: TaskID | None = None
        self._view = "after"
        self._notes = Notes(console)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar.live.is_started:  # the run failed; without stop() the terminal has no cursor
            self.bar.stop()

    def start(self, federation: Federation) -> None:
        self._federation = federation
        self._view = federation.method.views[0]
        done, rounds = len(federation.history), federation.parts.task.rounds
        self.bar.start()
        if self._task is not None:  # the run restarts
            self.bar.remove_task(self._task)
            self._notes.forget()
        name = f"{federation.parts.experiment.method:10}"
        warm = done < federation.parts.task.warmup
        columns: dict[str, Any] = {"score": WARMUP if warm else "     ", **_traffic(federation.ledger)}
        self._task = self.bar.add_task(name, total=rounds, completed=done, **columns)
        self._warn()

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        assert self._task is not None
        columns: dict[str, Any] = _traffic(ledger)
        mean = record["mean"].get(self._view, {}).get("test", {}).get("mean")
        if mean is not None:
            columns["score"] = f"{mean:.3f}"
        elif record["round"] + 1 == self._federation.parts.task.warmup:
            columns["score"] = "     "
        self.bar.update(self._task, advance=1, **columns)
        self._warn()

    def finish(self, result: Result) -> None:
        self._warn()
        self.bar.stop()

    def _warn(self) -> None:
        self._notes.show(self._federation.warnings)


class Notes:
    """Prints the warnings of a run, each of them once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def forget(self) -> None:
        """The run restarts."""
        self._shown = 0

    def show(self, warnings: Sequence[str]) -> None:
        for text in warnings[self._shown :]:
            self._console.print(f" [yellow]note[/] {escape(to_words(text))}", highlight=False)
        self._shown = len(warnings)


def _traffic(ledger: Ledger) -> dict[str, str]:
    return {way: format_bytes(ledger.total[way]) for way in ("up", "down")}


def format_bytes(size: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(0), format_bytes(999), format_bytes(1234567)
    ('0 B', '999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def write_count(number: int | None) -> str:
    """A number of rows. Clients may keep it."""
    return "-" if number is None else str(number)


def print_table(results: Sequence[Result], console: Console | None = None, view: View | None = None) -> None:
    """Print the headline metric per client of one or more runs, with the mean, weighted mean, worst and best client.

    For several runs, also print the mean in every other view that one of them has. If the views or the metrics differ,
    no value is marked as the best.
    """
    console = console or Console()
    views = [choose_view(one.views, view or (AFTER if len(results) > 1 else "own")) for one in results]
    measured = {result.metric: headline_in(result.history) for result in results}
    alike, metric = len(set(views)) == 1, measured[results[-1].metric]
    marks = metric if alike and len(measured) == 1 else None
    facts = results[-1].clients
    has_classes = any(one.classes for one in facts.values())  # real sites keep them private
    columns = [_right("client"), Column("model"), *([Column("classes")] if has_classes else []), _right("train")]
    table = Table(*columns, *(_right(result.method) for result in results), box=None)
    chosen = [result.per_client(view) for result, view in zip(results, views, strict=True)]
    for k, one in facts.items():
        values = [c[k].selected.get("test") if k in c else None for c in chosen]
        classes = [escape(join_classes(one.classes))] if has_classes else []
        table.add_row(escape(one.label), one.model, *classes, write_count(one.train), *_cells(values, marks))
    table.add_section()
    empty = [""] * (len(columns) - 1)
    for name, label in statistics_for(len(facts)).items():
        values = [_selected(name, of, seen) for of, seen in zip(results, views, strict=True)]
        shown = _cells(values, None if name == "deviation" else marks)
        table.add_row(label, *empty, *shown, style="bold" if name == "mean" else "")
    for other in _other_views(results, views):
        values = [_selected("mean", of, other) for of in results]
        table.add_row(f"mean, {other}", *empty, *_cells(values, metric if len(measured) == 1 else None))
    if len(results) > 1:
        for label, cost in _costs(results):
            table.add_row(label, *empty, *cost)
    console.print(table)
    whose = evaluated_clients(of.history for of in results)
    about = headline(metric, {of.method: seen for of, seen in zip(results, views, strict=True)}, chosen, whose)
    about += "" if alike else ". The views differ, so this does not compare the methods"
    about += "" if len(measured) == 1 else ". The metrics differ, so this does not compare the methods"
    about += ". Gradient steps per client differ by more than a tenth" if _steps_differ(results) else ""
    warmed = [of for of in results if of.warmup]
    lengths = [f"{of.method}: {_count(of.warmup, 'round')} of warm-up, then {of.rounds} of training" for of in warmed]
    spent = [(of.method, of.epsilon) for of in results if of.epsilon is not None]
    private = [f"{name}: epsilon {epsilon:.2f}, the most that a client has spent" for name, epsilon in spent]
    for text in (about, *lengths, *private):
        console.print(Padding(text, (0, 0, 0, 1), expand=False), style="dim", highlight=False)


def _right(name: str, **how: Any) -> Column:
    return Column(escape(name), justify="right", **how)


def _costs(results: Sequence[Result]) -> Iterator[tuple[str, list[str]]]:
    yield "steps", ["-" if (steps := one.steps_per_client) is None else f"{steps:,.0f}" for one in results]
    for way in ("up", "down"):
        yield way, [format_bytes(result.bytes[way]) for result in results]
    if any(one.epsilon is not None for one in results):
        yield "epsilon", ["-" if one.epsilon is None else f"{one.epsilon:.2f}" for one in results]


def _steps_differ(results: Sequence[Result]) -> bool:
    known = [result.steps_per_client for result in results if result.steps_per_client is not None]
    return len(known) == len(results) > 1 and max(known) - min(known) > MOST_APART * min(known)


FAIRNESS = {"worst_decile": "worst decile", "deviation": "deviation"}
ENOUGH_CLIENTS = 10  # for a tenth of them


def statistics_for(clients: int) -> dict[str, str]:
    """What a table shows over so many clients, and its names there."""
    usual = {name: name for name in ("mean", "weighted", "worst", "best")}
    return usual | (FAIRNESS if clients >= ENOUGH_CLIENTS else {})


def _selected(statistic: str, result: Result, view: str) -> float | None:
    """Selected test metric over clients in a view, or None if the method lacks the view."""
    return result.summary.get(view, {}).get("selected", {}).get("test", {}).get(statistic)


def _other_views(results: Sequence[Result], views: Sequence[str]) -> list[str]:
    """Views that some of several runs have and that not all of them show."""
    known = dict.fromkeys(view for result in results for view in result.views)
    return [view for view in known if set(views) != {view}] if len(results) > 1 else []


def _cells(values: Sequence[float | None], marks: Metric | None) -> list[str]:
    """Format values. Mark the best one by a metric, if there are several."""
    best = marks.best(values) if marks and sum(v is not None for v in values) > 1 else None
    return ["-" if v is None else f"[green]{v:.3f}[/]" if v == best else f"{v:.3f}" for v in values]


def join_classes(names: Sequence[str], most: int = 24) -> str:
    """The names of classes, or how many there are if the names take more than `most` characters."""
    text = " ".join(names)
    return text if len(text) <= most else f"{len(names)} classes"


def print_predictions(predictions: Sequence[AnyPrediction], console: Console | None = None) -> None:
    """Print what is predicted for each row: its class, its labels or numbers."""
    from pluribus.prediction import flat_row

    rows = [{name: value for name, value in flat_row(one).items() if name != "number"} for one in predictions]
    texts = ("file", "label", "labels")
    columns = [Column(n, overflow="fold") if n == "file" else n if n in texts else _right(n) for n in (rows or [{}])[0]]
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else escape(value or "-") for value in row.values()))
    (console or Console(highlight=False)).print(table)


CHECK_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def print_check(target: str, texts: Iterable[tuple[Status, str]], console: Console | None = None) -> None:
    """Print the lines of a check as they come."""
    console = console or Console()
    console.print(f"[bold]{escape(target)}[/]", highlight=False, soft_wrap=True)
    for status, text in texts:
        line = Text(text)
        line.stylize(CHECK_STYLES[status], 1, 9)
        console.print(line, soft_wrap=True)


MOST_COLUMNS = 5  # of a table of counts, without class and sum


def print_data_check(check: DataCheck, console: Console | None = None) -> None:
    """Print the contents of a data set, how its images are converted, and which files cannot be read."""
    console = console or Console(highlight=False)
    kinds = {name: {getattr(place, name) for place in check.counts} - {""} for name in ("label", "domain", "split")}
    words = {"label": ("class", "classes"), "domain": ("domain", "domains"), "split": ("split", "splits")}
    sizes = [f"{len(found)} {words[name][len(found) != 1]}" for name, found in kinds.items() if found]
    kind = check.facts.get("kind", "image")
    rows = _count(check.images, kind if kind in ("image", "signal") else "row")
    console.print(f"[bold]{escape(check.path)}[/]   {', '.join([rows, *sizes])}\n")
    for table in _count_tables(check) if check.counts else ():
        console.print(table)
        console.print()
    table = Table(Column(no_wrap=True, style="cyan"), Column(overflow="fold"), box=None, show_header=False)
    for name, text in _data_facts(check):
        table.add_row(name, escape(text))
    console.print(table)


def _count_tables(check: DataCheck) -> Iterator[Table]:
    """Images per class, with one column per split and domain. Many splits and domains get a separate table."""
    groups = list(dict.fromkeys(_group(place) for place in check.counts))
    columns = groups if 1 < len(groups) <= MOST_COLUMNS else []
    what = "images" if check.facts.get("kind", "image") == "image" else "rows"
    yield _count_table("class", [(place.label, _group(place), n) for place, n in check.counts.items()], columns, what)
    if len(groups) > MOST_COLUMNS:
        yield _count_table("part", [(_group(place), "", n) for place, n in check.counts.items()], [], what)


def _group(place: ImageLabels) -> str:
    return " ".join(word for word in (place.split, place.domain) if word)


def _count_table(name: str, cells: Sequence[tuple[str, str, int]], columns: Sequence[str], what: str) -> Table:
    table = Table(
        Column(name, overflow="fold"), *(_right(column, overflow="fold") for column in (*columns, what)), box=None
    )
    for row in sorted({row for row, _, _ in cells}) if name == "class" else dict.fromkeys(row for row, _, _ in cells):
        counts = [sum(n for r, c, n in cells if (r, c) == (row, column)) for column in columns]
        table.add_row(escape(row), *(str(n or "·") for n in counts), str(sum(n for r, _, n in cells if r == row)))
    return table


def _data_facts(check: DataCheck) -> Iterator[tuple[str, str]]:
    form = ("shape", "numbers") if check.facts.get("kind", "image") != "image" else ("height x width", "pixels")
    for name, found in zip(form, (check.shapes, check.modes), strict=True):
        yield name, _first_few([f"{kind}: {number}" for kind, number in found.items()])
    yield from _row_facts(check.facts)
    copies = check.duplicates
    if copies.example is not None:
        what = "image" if check.facts.get("kind", "image") == "image" else "row"
        apart = f"{copies.across_splits} in another split, {copies.across_classes} with another class"
        yield "copies", f"{copies.images} of an earlier {what}: {apart} (for example {' and '.join(copies.example)})"
    for note in check.notes:
        yield "note", note
    for sentence in check.unreadable.values():
        yield "unreadable", sentence


def _row_facts(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is predicted, who holds the rows and when they were recorded, as far as a data set says it."""
    if facts.get("kind", "image") != "image":
        yield "kind", facts["kind"]
    for name, one in facts.get("numbers", {}).items():
        yield "to predict", f"{name}: {one['min']:g} to {one['max']:g}, mean {one['mean']:.3g}"
    if "vocabulary" in facts:
        yield "tokens", f"{facts['tokens'][0]} to {facts['tokens'][1]} per row, {facts['vocabulary']} ids"
    for role, columns in facts.get("roles", {"columns": facts.get("columns", [])}).items():
        if columns:
            yield role, _first_few(columns)
    if held := facts.get("clients"):
        yield "clients", f"{len(held)}, with {min(held.values())} to {max(held.values())} rows each"
    if alone := facts.get("labels_of_one_client"):
        yield "at one client", _first_few([f"{label} ({client})" for label, client in alone.items()])
    if "groups" in facts:
        yield "groups", str(facts["groups"])
    if "time" in facts:
        yield "time", f"{facts['time'][0]:g} to {facts['time'][1]:g}"


def _first_few(parts: Sequence[str], most: int = 8) -> str:
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return ", ".join([*parts[:most], *more])


def print_partition(parts: Assembly, console: Console, most: int = 30) -> None:
    """Print how many rows of each class every client holds. If nothing is classified, how many rows."""
    names = parts.task.names if parts.task.target.kind == "classes" else ()
    if len(names) > 20 or parts.task.clients > most:
        sizes = [sum(counts) for counts in parts.manifest.counts]
        held = [sum(count > 0 for count in counts) for counts in parts.manifest.counts]
        classes = f" and {min(held)} to {max(held)} of {len(names)} classes" if names else ""
        console.print(
            f" partition {parts.manifest.kind}: {min(sizes)} to {max(sizes)} rows{classes} per client   "
            f"{parts.manifest.digest[:12]}",
            highlight=False,
        )
        return
    table = Table(_right("client"), "model", *(_right(name[:6]) for name in names), _right("rows"), box=None)
    for k, counts in enumerate(parts.manifest.counts):
        cells = [str(count) if count else "[dim]·[/]" for count in counts[: len(names)]]
        table.add_row(escape(parts.holders.get(k, str(k))), parts.cards[k].model, *cells, str(sum(counts)))
    console.print(table)
    console.print(f" partition {parts.manifest.kind}   {parts.manifest.digest[:12]}", style="dim", highlight=False)


MOST_APART = 0.1  # relative difference of the steps of two runs that needs no note
BAR = 30  # characters for 100 % of the time
SHARE_LABELS = {"other": "everything else"}
MEMORY_LABELS = {"host": "memory", "gpu": "GPU memory"}


def print_bench(bench: Bench, console: Console | None = None) -> None:
    """Print time, traffic and memory of a round, and the machine they were measured on."""
    from pluribus import __version__

    console = console or Console()
    one, machine = bench.experiment, bench.machine
    what = f"{one.data_name}   {_count(one.clients, 'client')}, {_count(bench.architectures, 'architecture')}"
    heading = f"[bold]Pluribus {__version__}[/]   bench {one.method}   {escape(what)}   seed {one.seed}"
    console.print(f"{heading}\n", highlight=False, soft_wrap=True)
    table = Table("", _right(""), Column(style="dim"), box=None, show_header=False)
    for number, section in enumerate((_speed(bench), _shares(bench), _sizes(bench))):
        if number:
            table.add_row()
        for row in section:
            table.add_row(*row)
    console.print(table)
    processes = f" in {machine.workers} processes" if machine.workers > 1 else ""
    threads = _count(machine.threads, "thread") + (" each" if processes else "")
    facts = f"{machine.engine} engine{processes}, {threads}   {machine.device}   torch {machine.torch}"
    console.print(f"\n {escape(facts)}", style="dim", highlight=False, soft_wrap=True)
    console.print(f" again: {bench.command}", highlight=False, markup=False, soft_wrap=True)


def _speed(bench: Bench) -> Iterator[tuple[str, str, str]]:
    yield "round", f"{bench.seconds:.3f} s", f"median of {_count(len(bench.each), 'round')}, overhead included"
    yield "training", f"{bench.samples_per_second:.0f} /s", f"samples, {bench.samples:.0f} per round"
    if bench.bare_seconds is not None:
        yield "bare loop", f"{bench.bare_seconds:.3f} s", f"a round takes {bench.ratio:.2f} times as long"


def _shares(bench: Bench) -> Iterator[tuple[str, str, str]]:
    for kind, share in bench.shares.items():
        yield SHARE_LABELS.get(kind, kind), f"{100 * share:.1f} %", "▪" * round(share * BAR)


def _sizes(bench: Bench) -> Iterator[tuple[str, str, str]]:
    for way in ("up", "down"):
        yield way, format_bytes(bench.bytes[way]), "per round"
    for kind, size in bench.memory.items():
        if size is not None:
            yield MEMORY_LABELS[kind], format_bytes(size), "peak"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"
