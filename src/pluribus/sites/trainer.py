"""The warm half of a site: a process that holds data and model, and answers what Flower's short-lived half relays.

python -m pluribus.sites.trainer site.toml SOCKET
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which the first step would load, for seconds, while a deadline runs

from pluribus.data import Dataset, load
from pluribus.data.dataset import PARTS
from pluribus.data.split import split
from pluribus.draws import numpy_rng
from pluribus.errors import DeviceError, MissingSettingError, PluribusError, UnknownNameError, unknown
from pluribus.models import build, entries
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.programs import be_called
from pluribus.sites.flower.wire import serve
from pluribus.sites.holdings import Public
from pluribus.sites.party import Means, Party


def means_of(site: SiteFile) -> Means:
    """What the site brings, from what its file says."""
    if site.model not in entries():
        raise unknown("model", site.model, entries(), "pluribus list models")
    device, sets = _device(site), _sets(site)
    channels, height, width = sets["train"].x.shape[1:]
    with torch.device("meta"):  # no numbers, just to see whether the model takes such images
        build(site.model, shape=(channels, height, width), classes=max(2, len(sets["train"].classes)))
    public = None if site.public is None else Public.read(site.public, site.image_size)
    if public is not None:
        _note(site.public, public.dataset)
    return Means(sets, public, site.model, site.state, device)


def _device(site: SiteFile) -> torch.device:
    if site.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(site.device)
    except RuntimeError as error:
        raise UnknownNameError(f"'device' in site.toml must be cpu, cuda or auto, not '{site.device}'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("'device' in site.toml is cuda, but this torch sees no GPU: use cpu.")
    return device


def _sets(site: SiteFile) -> dict[str, Dataset]:
    if site.data is None:
        given = {"train": site.train, "val": site.val, "test": site.test}
        if missing := [name for name, place in given.items() if place is None]:
            raise MissingSettingError(f"site.toml names neither 'data' nor '{missing[0]}': say where the images lie.")
        return {name: _read(str(place), site) for name, place in given.items()}
    whole = _read(site.data, site)
    shares = {"train": 1 - site.val_fraction - site.test_fraction, "val": site.val_fraction, "test": site.test_fraction}
    if whole.part is not None:
        cut = {name: np.flatnonzero(whole.part.numpy() == number) for number, name in enumerate(PARTS)}
    else:
        cut = split(whole.y.numpy(), shares, numpy_rng(0, "split", site.name))
    return {name: Dataset(name, whole.x[rows], whole.y[rows], whole.classes) for name, rows in cut.items()}


def _read(place: str, site: SiteFile) -> Dataset:
    dataset = load(place, image_size=site.image_size)
    _note(place, dataset)
    return dataset


def _note(place: str | None, dataset: Dataset) -> None:
    for sentence in dataset.notes:
        _say(f"note: {place}: {sentence}")


class Desk:
    """Answers whatever comes, if only with why not, and says what it did: a worker outlives every request."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self.over = False
        """Whether the server has said farewell."""

    def answer(self, blob: bytes) -> bytes:
        """What goes back."""
        started = time.monotonic()
        try:
            head = unseal(blob).head
            answer = self._party.answer(blob)
            self.over = head.get("verb") == "finish"
            _say(f"{_called(head)}  {time.monotonic() - started:.1f} s, {len(answer)} bytes back")
            return answer
        except PluribusError as error:
            reason = str(error)
        except Exception as error:  # a method's own mistake, or a lack of memory
            traceback.print_exc()
            reason = f"it failed with {type(error).__name__}: its own log says where."
        _say(f"refused: {reason}")
        return seal({"refused": reason}, {})


def _called(head: dict[str, object]) -> str:
    at = f"round {head['t']}" if "t" in head else "federation"
    return f"{at}: {head['verb']}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Answer until the server says farewell."""
    path, socket = map(Path, arguments)
    try:
        site = read_site(path)
        if site.threads is not None:
            torch.set_num_threads(site.threads)
        desk = Desk(Party(means_of(site)))
        serve(socket, desk.answer, lambda: desk.over)
        return 0
    except PluribusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    be_called("pluribus-worker")
    sys.exit(main(sys.argv[1:]))
