"""One client after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pluribus.site import Selected, Site, Tensors, most_selected


class Serial:
    """The plain engine: what others must agree with, bit by bit."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.room: float = most_selected(site.device)

    def each(self, verb: str, jobs: Iterable[tuple[int, tuple[Any, ...]]]) -> Iterator[tuple[int, Any]]:
        """Do a site's verb for clients; answers in the order of jobs."""
        for k, args in jobs:
            yield k, getattr(self.site, verb)(*args)

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call."""
        return self.site.changed()

    def selected(self) -> dict[int, Selected]:
        """What clients were measured with in the rounds that were selected since the last call."""
        return self.site.selected()

    def pending(self) -> int:
        """How many clients wait to be saved."""
        return self.site.pending()

    def close(self) -> None:
        """Nothing to let go of."""
