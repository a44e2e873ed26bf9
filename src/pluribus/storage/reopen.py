"""A client's trained model, as the folder of a run has it.

`selected` is the model whose accuracy the run reports: that of the method's headline view, in the round that the
client's validation data selects. `last` is the model of the same view at the last checkpoint.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, get_args

from torch import nn

from pluribus.api import check_client, opened
from pluribus.assembly import Assembly
from pluribus.client import Client
from pluribus.engines import make_host
from pluribus.errors import CheckpointError, NoModelError, UnknownNameError
from pluribus.evaluate import choose
from pluribus.message import Message, decode, encode
from pluribus.method import Wires
from pluribus.server import Server
from pluribus.storage.checkpoint import READINGS, Checkpoint, put_back
from pluribus.storage.folder import RunFolder

Round = Literal["selected", "last"]


def load_model(path: str | Path, client: int, round: Round = "selected") -> nn.Module:
    """A client's model, in eval mode: the one whose accuracy the run reports, or that of the last checkpoint."""
    with opened(path) as (parts, folder):
        check_client(path, parts, client)
        with trained_client(parts, folder, client, round) as asked:
            return copy.deepcopy(asked.model).eval()  # on exit the client may change back


def check_round(round: str) -> None:
    """Refuse what is neither of the two."""
    if round not in get_args(Round):
        raise UnknownNameError(f"the round must be 'selected' or 'last', not '{round}'.")


def trained_client(parts: Assembly, folder: RunFolder, k: int, round: Round) -> AbstractContextManager[Client]:
    """A client with the model that the headline measured.

    Another process may write to the folder meanwhile: what is gone has been replaced by something newer.
    """
    check_round(round)
    read = _last if round == "last" else _selected
    for _ in range(READINGS):
        try:
            return read(parts, folder, k)
        except CheckpointError:
            if not folder.look_again():
                raise
    return read(parts, folder, k)


def _last(parts: Assembly, folder: RunFolder, k: int) -> AbstractContextManager[Client]:
    latest, view = _latest(folder), parts.method.views[0]
    down = None if view == "after" else _download(parts, folder.checkpoint, latest, k)
    host = make_host(parts, folder.checkpoint.client)
    host.client(k)  # read now
    return host.viewed(latest, k, view, down)


def _latest(folder: RunFolder) -> int:
    if folder.checkpoint.latest is None:
        raise NoModelError(f"{folder.path} holds no trained model: no round was saved, or its state was deleted.")
    return folder.checkpoint.latest


def _selected(parts: Assembly, folder: RunFolder, k: int) -> AbstractContextManager[Client]:
    _latest(folder)
    t = _selected_round(parts, folder, k)
    if (measured := folder.checkpoint.selected(k, t)) is None:
        raise NoModelError(
            f"{folder.path} lacks the model of client {k} in round {t}, which validation selects: its file was "
            f"deleted, or the run is of a version that kept the last round alone. Ask for the last round."
        )
    host = make_host(parts, lambda _: None)
    put_back(host.client(k).measured(), measured, f"client {k}")
    return host.viewed(t, k, "after", None)  # as it was measured


def _selected_round(parts: Assembly, folder: RunFolder, k: int) -> int:
    history, _ = folder.history(folder.checkpoint.latest)
    chosen = choose(history, parts.method.views[0])
    if k not in chosen:
        raise NoModelError(f"client {k} was never evaluated, so no round of it is selected. Ask for the last round.")
    return chosen[k].selected_round


def _download(parts: Assembly, saved: Checkpoint, t: int, client: int) -> bytes | None:
    """What the server would send to the client now."""
    method = parts.method
    name = method.exchanges[0].down
    if name is None:
        return None
    wires, server = Wires(method, parts.task, parts.cards), Server(parts.task, parts.cards)
    method.setup(server)
    put_back(server.state.state_dict(), saved.server(), "the server")
    for k, data in saved.enrolled().items():
        parts.cards.enrolled[k] = decode(data, wires(k)[0].once, f"enrolment of client {k}")
    server.begin(t, method.schedule(t, parts.task.rounds))
    message: Message | None = getattr(method, name)(server, client)
    return None if message is None else encode(message, wires(client)[0].down, f"download of client {client}")
