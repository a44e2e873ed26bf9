"""Opens a run folder again: the parts of the run, and a client's trained model.

`selected` is the model whose metrics the run reports: the one of the method's headline view, in the round that the
client's validation data selects. `last` is the model of the same view at the last checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn

from pluribus.assembly import Assembly, assemble
from pluribus.client import Client
from pluribus.data.scaling import choose_normalize, parse_normalize
from pluribus.errors import (
    CheckpointError,
    ConflictError,
    FileAccessError,
    MissingSettingError,
    NoModelError,
    OtherRunError,
    RangeError,
    UnknownNameError,
)
from pluribus.evaluate import choose
from pluribus.experiment import SITES, Experiment, from_toml
from pluribus.host import make_host
from pluribus.internal.arithmetic import reproducible
from pluribus.internal.lookup import is_given
from pluribus.internal.paths import check_path
from pluribus.internal.views import SERVER_VIEWS
from pluribus.method import Method, methods
from pluribus.models.layers import batch_norms
from pluribus.server_half import ServerHalf, publish
from pluribus.storage.checkpoint import READINGS, put_back
from pluribus.storage.code import ADD, Allow, check_code
from pluribus.storage.folder import RunFolder, check_unchanged
from pluribus.storage.model_file import read_model
from pluribus.storage.store import RunStore

Round = Literal["selected", "last"]
OBJECTS = ("data", "models", "partition", "public_data")  # settings that Python also takes as objects


def load_model(
    path: str | Path,
    client: int | None = None,
    round: Round = "selected",
    *,
    model: Any = None,
    server: bool = False,
    data: Any = None,
    models: Any = None,
    partition: Any = None,
    public_data: Any = None,
    allow_code: Allow = False,
) -> nn.Module:
    """Load a trained model in eval mode.

    `path` is a file that `Result.save_model` wrote, or the folder of a run. In a folder, `client` chooses the model: by
    default the one whose metrics the run reports, or with `round="last"` that of the last checkpoint. `server` takes
    the server's model of the last checkpoint, for methods that have one. `model` is the builder or module of the model
    in a file, if its name cannot be looked up. The folder of a run that was started with objects needs the same `data`,
    `models`, `partition` and `public_data` again. `allow_code` lets the file or folder name your own code: all of it,
    or a list of dotted paths.
    """
    if check_path(path).is_file():
        if client is not None or round != "selected":
            raise ConflictError(f"{path} is a file with one model: leave out client= and round=.")
        return read_model(Path(path), model, allow_code)
    if not Path(path).is_dir():
        raise FileAccessError(f"there is no file or folder {path}: give the file of a model, or the folder of a run.")
    if model is not None:
        raise ConflictError(f"{path} is a folder, which says how its models are built: leave out model=.")
    objects = {"data": data, "models": models, "partition": partition, "public_data": public_data}
    with open_run(path, allow_code, **objects) as (parts, folder):
        if server:
            with server_model(parts, folder, client) as found:
                return copy_model(found)
        if client is None:
            clients = f"0 to {len(parts.cards) - 1}"
            raise MissingSettingError(f"{path} has a model for each client: choose one with client=, {clients}.")
        check_client(path, parts, client)
        with trained_client(parts, folder, client, round) as found:
            return copy_model(found)


def copy_model(client: Client) -> nn.Module:
    """A copy of a client's model in eval mode. The client may be restored later."""
    return copy.deepcopy(client.model).eval()


def check_round(round: str) -> None:
    """Refuse a round that is neither 'selected' nor 'last'."""
    if round not in get_args(Round):
        raise UnknownNameError(f"the round must be 'selected' or 'last', not '{round}'.")


def trained_client(parts: Assembly, folder: RunStore, k: int, round: Round) -> AbstractContextManager[Client]:
    """Load a client with the model of the headline view.

    Another process may write to the folder at the same time. A file that is missing has been replaced by a newer one.
    """
    check_round(round)
    read = _load_last if round == "last" else _load_selected
    for _ in range(READINGS):
        try:
            return read(parts, folder, k)
        except CheckpointError:
            if not folder.look_again():
                raise
    return read(parts, folder, k)


def _load_last(parts: Assembly, folder: RunStore, k: int) -> AbstractContextManager[Client]:
    latest, view, saved, down = _find_latest(folder), parts.method.views[0], folder.checkpoint, None
    if view != "after":
        half = ServerHalf(parts.method, parts.task, parts.cards)
        half.put_back(saved.server(), saved.enrolled())
        half.begin(latest)
        down = half.download(0, k)  # what the server would send to the client now
    host = make_host(parts, saved.client)
    host.client(k)  # reads the checkpoint now
    return host.open_view(latest, k, view, down)


@contextmanager
def server_model(parts: Assembly, folder: RunStore, client: int | None) -> Iterator[Client]:
    """The server's model of the last round, in the place of a client.

    The client decides which rows normalize, and with one model per architecture, which model it is.
    """
    views = [view for view in parts.method.views if view in SERVER_VIEWS]
    if not views:
        able = ", ".join(name for name, cls in methods().items() if any(view in SERVER_VIEWS for view in cls.views))
        raise ConflictError(
            f"{parts.experiment.method} has no model of the server: choose a client's. Methods that have one: {able}."
        )
    if client is None and (why := _why_client(parts, views[0])):
        raise MissingSettingError(f"{why}: choose a client, too, 0 to {len(parts.cards) - 1}.")
    latest, saved = _find_latest(folder), folder.checkpoint
    half = ServerHalf(parts.method, parts.task, parts.cards)
    half.put_back(saved.server(), saved.enrolled())
    half.begin(latest)
    k = client or 0
    models = publish(parts.method, half.server, k, {})
    with make_host(parts, lambda _: None).open_view(latest, k, views[0], None, models) as guest:
        yield guest


def _why_client(parts: Assembly, view: str) -> str:
    """Why the server's model depends on a client. Empty: it does not."""
    if choose_normalize(parse_normalize(parts.experiment.normalize), parts.dataset).by_client:
        return "each client normalizes by its own rows"
    if view == "group" and len(parts.cards.architectures()) > 1:
        return "the server has a model per architecture"
    adapts = type(parts.method).adapt is not Method.adapt
    if adapts and batch_norms(parts.task.shape_of(parts.cards[0].architecture)):
        return "the server's batch norm normalizes by the rows of a client"
    return ""


def _find_latest(folder: RunStore) -> int:
    if folder.checkpoint.latest is None:
        raise NoModelError(f"{folder.path} holds no trained model: no round was saved, or its state was deleted.")
    return folder.checkpoint.latest


def _load_selected(parts: Assembly, folder: RunStore, k: int) -> AbstractContextManager[Client]:
    history, _ = folder.history(_find_latest(folder))
    chosen = choose(history, parts.method.views[0])
    if k not in chosen:
        raise NoModelError(f"client {k} was never evaluated, so it has no selected round. Ask for the last round.")
    t = chosen[k].selected_round
    if (measured := folder.checkpoint.selected(k, t)) is None:
        raise NoModelError(
            f"{folder.path} lacks the model of client {k} in round {t}, which validation selects: its file was "
            f"deleted, or the version of the run kept only the last round. Ask for the last round."
        )
    host = make_host(parts, lambda _: None)
    put_back(host.client(k).prediction_tensors(), measured, f"client {k}")
    return host.open_view(t, k, "after", None)  # as it was measured


@contextmanager
def open_run(
    path: str | Path, allow: Allow = False, again: str = ADD, **objects: Any
) -> Iterator[tuple[Assembly, RunFolder]]:
    """Open a run folder for reading: the parts of the run, on the CPU, and the folder."""
    folder = RunFolder.open(path, read_only=True)
    try:
        described = replace(read_experiment(folder, allow, again, objects), device="cpu")
        check_settings(folder, described)
        with reproducible(described.threads_per_worker(), described.precision):
            parts = assemble(described)
            check_partition(folder, parts)
            folder.look_again()  # assembling took a while, and the run may still write
            yield parts, folder
    finally:
        folder.close()


@contextmanager
def assemble_again(described: Experiment, store: RunStore) -> Iterator[tuple[Assembly, RunStore]]:
    """The parts, on the CPU, and the state of a run that this process has run."""
    with reproducible(described.threads_per_worker(), described.precision):
        yield assemble(replace(described, device="cpu")), store


def check_client(path: str | Path, parts: Assembly, client: int) -> None:
    """Refuse the number of a client that the run does not have."""
    if client not in parts.cards:
        raise RangeError(f"{path} has no client {client}: its clients are 0 to {len(parts.cards) - 1}.")


def read_experiment(
    folder: RunFolder, allow: Allow, again: str = ADD, objects: Mapping[str, Any] = MappingProxyType({})
) -> Experiment:
    """The experiment of a run folder. `objects` has the objects that the run was started with, and None for others.

    Code that the folder names needs permission, of which `again` says how to give it.
    """
    file, given = folder.path / "config.toml", {name: value for name, value in objects.items() if value is not None}
    written = from_toml(file) | {"out": str(folder.path)}
    check_code(file, {name: value for name, value in written.items() if name not in given}, allow, again)
    written |= given
    if written.get("data") == SITES:
        raise OtherRunError(
            f"{folder.path} is a federation of real sites, which keep their data and models. Resume it with pluribus "
            f"serve. Use pluribus predict at a site."
        )
    if missing := [name for name in OBJECTS if _names_object(written.get(name))]:
        again = ", ".join(f"{name}=..." for name in missing)
        raise MissingSettingError(
            f"{folder.path} was started in Python with objects for {' and '.join(missing)}, which it cannot name. "
            f"Give the same objects again: pluribus.resume({str(folder.path)!r}, {again})."
        )
    return Experiment(**written)


def _names_object(value: Any) -> bool:
    every = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    return any(map(is_given, every))


def check_settings(folder: RunFolder, described: Experiment) -> None:
    """Refuse a folder whose experiment has other settings."""
    file = folder.path / "config.toml"
    check_unchanged(folder.path, {"method": described.method}, file)  # first: other methods have other hyper-parameters
    check_unchanged(folder.path, described.decisive(), file)


def check_partition(folder: RunFolder, parts: Assembly) -> None:
    """Refuse a folder whose experiment ran on other data."""
    if folder.read_partition().digest != parts.manifest.digest:
        raise OtherRunError(
            f"{folder.path} is a run on other data: its partition.json does not match {parts.experiment.data_name}."
        )
