"""One client after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pluribus.host import Host, Selected, Tensors, most_selected
from pluribus.request import Answer, Request


class Serial:
    """The plain engine: what others must agree with, bit by bit."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.room: float = most_selected(host.device)

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Each client with its answer, in the order of requests."""
        for request in requests:
            yield request.client, self.host.answer(request)

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call."""
        return self.host.changed()

    def selected(self) -> dict[int, Selected]:
        """What clients were measured with in the rounds that were selected since the last call."""
        return self.host.selected()

    def pending(self) -> int:
        """How many clients wait to be saved."""
        return self.host.pending()

    def close(self) -> None:
        """Nothing to let go of."""
