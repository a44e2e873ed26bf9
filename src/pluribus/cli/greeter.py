"""What a command prints when a run starts, and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pluribus.cli.interrupts import at_work
from pluribus.storage.files import to_json

if TYPE_CHECKING:
    from rich.console import Console

    from pluribus.assembly import Assembly
    from pluribus.experiment import Experiment
    from pluribus.federation import Federation
    from pluribus.internal.views import View
    from pluribus.result import Result
    from pluribus.storage.store import RunStore


class Greeter:
    """Prints a heading if it has experiments, and remembers the run folder for the message after Ctrl-C."""

    def __init__(self, console: Console, chain: Sequence[Experiment] = ()) -> None:
        self._console = console
        self._chain = chain
        self.run: RunStore | None = None
        """None before the run starts."""
        self.settings: dict[str, Any] = {}
        """Those of the run."""

    def start(self, federation: Federation) -> None:
        from pluribus.assembly import Assembly

        self.run, self.settings = federation.folder, vars(federation.parts.experiment)
        at_work.set()
        if not self._chain:
            return
        assert isinstance(federation.parts, Assembly), "pluribus run simulates"
        print_heading(federation.parts, " against ".join(e.method for e in reversed(self._chain)), self._console)

    def round(self, record: Any, ledger: Any) -> None: ...

    def finish(self, result: Result) -> None: ...


def print_heading(parts: Assembly, names: str, console: Console) -> None:
    """Print what runs, and who holds which rows."""
    from rich.markup import escape

    from pluribus import __version__
    from pluribus.terminal import print_partition

    one, kinds = parts.experiment, len(parts.cards.architectures())
    models = f"{kinds} architecture{'s' if kinds > 1 else ''}"
    what = f"{one.data_name}   {one.clients} clients, {models}   seed {one.seed}"
    console.print(f"[bold]Pluribus {__version__}[/]   {names}   {escape(what)}\n", highlight=False)
    print_partition(parts, console)
    console.print()


def print_answer(as_json: bool, to_object: Callable[[], Any], show: Callable[[], None]) -> None:
    """Print a result as one JSON object, or show it to a person."""
    if as_json:
        print(to_json(to_object()))
    else:
        show()


def print_notes(results: Sequence[Result]) -> None:
    """Print the warnings of runs that showed no progress."""
    from rich.console import Console

    from pluribus.terminal import Notes

    for one in results:
        Notes(Console(stderr=True)).show(one.warnings)


def print_results(
    results: list[Result],
    as_json: bool,
    console: Console,
    again: str | None = None,
    view: View | None = None,
    cautions: Sequence[str] = (),
) -> None:
    """Print the table of one or more runs, or with `--json` an object."""
    from pluribus.internal.tables import show_cautions
    from pluribus.terminal import print_table

    if as_json:
        extra = {"against": [r.to_json() for r in results[:-1]]} | ({"cautions": cautions} if cautions else {})
        print(to_json(results[-1].to_json() | extra))
        return
    console.print()
    show_cautions(cautions, console)
    print_table(results, console, view)
    folder = results[-1].folder
    again = again or f"pluribus run --config {folder}/config.toml"
    saved = f"\n Saved {folder}   again: {again}"
    console.print(saved, highlight=False, markup=False, soft_wrap=True)
