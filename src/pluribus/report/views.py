"""Which model of each method a report shows: one that all methods have, unless the reader chooses another."""

from __future__ import annotations

from collections.abc import Sequence

from pluribus.internal.views import AFTER, choose_view, view_text, views_text
from pluribus.report.groups import Group
from pluribus.report.plan import find_plan
from pluribus.study.standings import SAID_OF_VIEWS

OWN = "own"  # each method's first view


def known_views(groups: Sequence[Group]) -> dict[str, str]:
    """The views that a page can show, with a text each, the one that it shows at first before all others.

    For one method, that is its own view. For several, it is the view of their comparison, or a view that all of them
    have. If there is none, each method is shown in its own.
    """
    views = dict.fromkeys(view for group in groups for view in group.views)
    texts = {view: view_text(view) for view in views}
    if len({group.views[0] for group in groups}) > 1:
        texts[OWN] = "each method's own"
    first = _first(groups, list(texts))
    return {first: texts[first]} | texts


def _first(groups: Sequence[Group], views: Sequence[str]) -> str:
    if len(groups) == 1:
        return groups[0].views[0]
    plan, _ = find_plan(run for group in groups for run in group.runs)
    shared = [view for view in views if all(view in group.views for group in groups)]
    wanted = AFTER if plan is None else plan.view
    if wanted in (shared if plan is None else views):
        return wanted
    return next(iter(shared), views[-1])


def about_view(groups: Sequence[Group], view: str) -> str:
    """Say which methods are shown in which view, if they differ."""
    shown = {group.name: choose_view(group.views, view) for group in groups}
    return f"Views differ: {views_text(shown)}. {SAID_OF_VIEWS}" if len({*shown.values()}) > 1 else ""
