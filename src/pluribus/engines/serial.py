"""Clients run one after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pluribus.host import Host, Selected, Tensors, most_selected
from pluribus.request import Answer, Request


class Serial:
    """The reference engine: all others must give the same bits."""

    can_lose = False

    def __init__(self, host: Host) -> None:
        self.host = host
        self.room: float = most_selected(host.device)

    def expect(self, clients: Iterable[int]) -> None:
        pass

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        for request in requests:
            yield request.client, self.host.answer(request)

    def take_changed(self) -> dict[int, Tensors]:
        return self.host.take_changed()

    def take_selected(self) -> dict[int, Selected]:
        return self.host.take_selected()

    def pending(self) -> int:
        return self.host.pending()

    def is_full(self) -> bool:
        return self.host.is_full()

    def close(self) -> None:
        self.host.close()
