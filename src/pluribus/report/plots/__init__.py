"""The sections of a report, in the order of the page. Each file makes those of one topic.

series.py         what plots, tables and sections are
curves.py         numbers against rounds, bytes and seconds
comparison.py     what `pluribus compare` prints
clients.py        clients, their distribution, fairness
classes.py        classes and their confusion; who holds which
costs.py          bytes and seconds
targets.py        rounds and bytes to a target
settings.py       settings that differ
tuning.py         searches
features.py       features of models, decisions about layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pluribus.report.embeddings import Embedding
from pluribus.report.groups import Group, group_runs
from pluribus.report.numbers import Run
from pluribus.report.plots.classes import confusion, partition
from pluribus.report.plots.clients import distribution, fairness, per_client
from pluribus.report.plots.comparison import comparison
from pluribus.report.plots.costs import time, traffic
from pluribus.report.plots.curves import headline, losses, notes
from pluribus.report.plots.features import decisions, embeddings
from pluribus.report.plots.series import Plot, Section, Series
from pluribus.report.plots.settings import settings
from pluribus.report.plots.targets import targets
from pluribus.report.plots.tuning import tuning
from pluribus.report.views import known_views

__all__ = ["Plot", "Section", "Series", "sections"]


Make = Callable[[Sequence[Group]], Section]


def sections(runs: Sequence[Run], embedded: Sequence[Embedding] = (), why_not: str = "") -> list[Section]:
    """All sections of a report about some runs. Those with results have the same in other views."""
    groups = group_runs(runs)
    views = list(known_views(groups))
    seen = {view: [group.see(view) for group in groups] for view in views}

    def in_views(make: Callable[[Sequence[Group], str], Section]) -> Section:
        first, *others = (make(seen[view], view) for view in views)
        return replace(first, views=dict(zip(views[1:], others, strict=True)))

    def each(*makes: Make) -> list[Section]:
        return [in_views(lambda some, _, make=make: make(some)) for make in makes]  # type: ignore[misc]

    return [
        *each(headline),
        in_views(comparison),
        tuning(groups),
        *each(targets, per_client, distribution, fairness),
        *(make(groups) for make in (confusion, partition, traffic, time)),
        *each(losses),
        embeddings(embedded, why_not),
        *(make(groups) for make in (decisions, notes, settings)),
    ]
