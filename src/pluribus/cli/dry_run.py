"""pluribus run --dry-run: what would run, with every check before round 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pluribus.cli.greeter import print_heading
from pluribus.storage.files import to_json

if TYPE_CHECKING:
    from rich.console import Console

    from pluribus.assembly import Assembly
    from pluribus.experiment import Experiment


def show_plans(chain: Sequence[Experiment], as_json: bool, console: Console) -> None:
    """Assemble experiments and print what each would do. A few steps are timed, and nothing is written."""
    from pluribus.assembly import assemble
    from pluribus.internal.arithmetic import reproducible
    from pluribus.storage.folder import RunFolder

    plans = []
    for one in chain:
        RunFolder.check_free(one.out)
        with reproducible(one.threads_per_worker(), one.precision):
            parts = assemble(one)
            plans.append(describe(parts))
        if not as_json:
            _print(parts, plans[-1], console)
    if as_json:
        print(to_json({"plans": plans}))


def describe(parts: Assembly) -> dict[str, Any]:
    """What a run would do, as values of JSON. Bytes are the most per client and round."""
    from pluribus.assembly import bytes_per_round
    from pluribus.study.estimate import estimate

    one, traffic, expected = parts.experiment, bytes_per_round(parts), estimate(parts)
    return {
        "method": one.method,
        "data": one.data_name,
        "clients": parts.task.clients,
        "models": sorted({parts.cards[k].model for k in parts.cards}),
        "rounds": parts.task.rounds,
        "clients_per_round": one.sampled(),
        "bytes": {"up": round(traffic.up), "down": round(traffic.down)},
        "model_bytes": sum(parts.cards.nbytes(k) for k in parts.cards),
        "device": str(parts.device),
        "seconds": None if expected is None else round(expected.seconds, 3),
        "steps_per_round": None if expected is None else round(expected.steps, 1),
        "engine": one.engine,
        "workers": one.workers,
        "warnings": list(parts.warnings),
    }


def _print(parts: Assembly, plan: dict[str, Any], console: Console) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from pluribus.terminal import Notes, format_bytes

    print_heading(parts, plan["method"], console)
    Notes(Console(stderr=True)).show(plan["warnings"])
    up, down = (format_bytes(plan["bytes"][way]) for way in ("up", "down"))
    table = Table(Column(no_wrap=True, style="cyan"), Column(overflow="fold"), box=None, show_header=False)
    table.add_row("models", escape(", ".join(plan["models"])))
    table.add_row("rounds", f"{plan['rounds']}, with {plan['clients_per_round']} of {plan['clients']} clients in each")
    table.add_row("bytes", f"up {up}, down {down} per client and round, at most")
    table.add_row("memory", f"{format_bytes(plan['model_bytes'])} for the models of all clients")
    table.add_row("time", _time_text(plan))
    table.add_row("engine", f"{plan['engine']}, device {plan['device']}, workers {plan['workers']}")
    console.print(table, highlight=False)
    console.print("\n No round was run: leave out --dry-run.", highlight=False)


def _time_text(plan: dict[str, Any]) -> str:
    from pluribus.internal.clock import time_left

    if plan["seconds"] is None:
        return "unknown: the steps of differential privacy are not tried"
    work = f"{plan['steps_per_round']:,.0f} plain steps a round, and evaluation"
    tried = "Estimated from a few steps of each model on this machine"
    left_out = "without what the method does beside them"
    return f"about {time_left(plan['seconds'], 1)} for {work}, one client after the other. {tried}, {left_out}."
