"""Results of several runs as tidy rows: one value each, with everything that it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pluribus.evaluate import Metrics, tidy_cells

if TYPE_CHECKING:
    from pluribus.study.standings import Run


def tidy(runs: Mapping[str, Iterable[Run]], rounds: bool = False) -> Iterator[dict[str, Any]]:
    """A row per label, seed, client, view and metric, in the round that the client selects or in every round."""
    for label, some in runs.items():
        for run in some:
            for number, client, view, metrics in _each_round(run) if rounds else _selected(run):
                where = {"label": label, "seed": run.seed, "round": number, "client": client, "view": view}
                yield from (where | cell for cell in tidy_cells(metrics, run.metric))


Found = tuple[int, int, str, Metrics]  # round, client, view and metrics


def _each_round(run: Run) -> Iterator[Found]:
    for record in run.history:
        for client, views in record.get("clients", {}).items():
            for view, metrics in views.items():
                yield record["round"], int(client), view, metrics


def _selected(run: Run) -> Iterator[Found]:
    for view in run.result["summary"]:
        for client, chosen in run.chosen(view).items():
            yield chosen.selected_round, client, view, chosen.selected
