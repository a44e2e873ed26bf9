"""The worker of a site: the process that holds data and model, and answers the requests of the server.

Flower starts a short-lived process for each request. That process relays the request to this one, which keeps running.

python -m pluribus.sites.trainer site.toml SOCKET
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from pluribus.data import Dataset, load
from pluribus.data.dataset import PARTS
from pluribus.data.split import split
from pluribus.draws import numpy_rng
from pluribus.errors import DeviceError, MissingSettingError, PluribusError, UnknownNameError, unknown
from pluribus.models import build, entries
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.programs import set_process_name
from pluribus.sites.flower.wire import serve
from pluribus.sites.holdings import Public
from pluribus.sites.responder import Responder, SiteResources


def load_resources(site: SiteFile) -> SiteResources:
    """Load what site.toml names: images, model, state folder and device."""
    if site.model not in entries():
        raise unknown("model", site.model, entries(), "pluribus list models")
    device, sets = _choose_device(site), _load_sets(site)
    channels, height, width = sets["train"].x.shape[1:]
    with torch.device("meta"):  # without memory, to check that the model accepts these images
        build(site.model, shape=(channels, height, width), classes=max(2, len(sets["train"].classes)))
    public = None if site.public is None else Public.read(site.public, site.image_size)
    if public is not None:
        _print_notes(site.public, public.dataset)
    return SiteResources(sets, public, site.model, site.state, device)


def _choose_device(site: SiteFile) -> torch.device:
    if site.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(site.device)
    except RuntimeError as error:
        raise UnknownNameError(f"'device' in site.toml must be cpu, cuda or auto, not '{site.device}'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("'device' in site.toml is cuda, but this torch sees no GPU: use cpu.")
    return device


def _load_sets(site: SiteFile) -> dict[str, Dataset]:
    if site.data is None:
        given = {"train": site.train, "val": site.val, "test": site.test}
        if missing := [name for name, path in given.items() if path is None]:
            raise MissingSettingError(f"site.toml has neither 'data' nor '{missing[0]}': set the path of the images.")
        return {name: _load_images(str(path), site) for name, path in given.items()}
    whole = _load_images(site.data, site)
    shares = {"train": 1 - site.val_fraction - site.test_fraction, "val": site.val_fraction, "test": site.test_fraction}
    if whole.part is not None:
        cut = {name: np.flatnonzero(whole.part.numpy() == number) for number, name in enumerate(PARTS)}
    else:
        cut = split(whole.y.numpy(), shares, numpy_rng(0, "split", site.name))
    return {name: Dataset(name, whole.x[rows], whole.y[rows], whole.classes) for name, rows in cut.items()}


def _load_images(path: str, site: SiteFile) -> Dataset:
    dataset = load(path, image_size=site.image_size)
    _print_notes(path, dataset)
    return dataset


def _print_notes(path: str | None, dataset: Dataset) -> None:
    for sentence in dataset.notes:
        _print(f"note: {path}: {sentence}")


class RequestHandler:
    """Answers each request and prints a line about it. An error becomes the answer: the worker keeps running."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self.over = False
        """Whether the server has ended the federation."""

    def answer(self, blob: bytes) -> bytes:
        started = time.monotonic()
        try:
            head = unseal(blob).head
            answer = self._responder.answer(blob)
            self.over = head.get("verb") == "finish"
            when = f"round {head['t']}" if "t" in head else "federation"
            _print(f"{when}: {head['verb']}  {time.monotonic() - started:.1f} s, {len(answer)} bytes back")
            return answer
        except PluribusError as error:
            reason = error.sentence
        except Exception as error:  # a bug in a method, or too little memory
            traceback.print_exc()
            reason = f"it failed with {type(error).__name__}: the log of the site shows where."
        _print(f"refused: {reason}")
        return seal({"refused": reason}, {})


def _print(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Answer requests until the server ends the federation. Returns the exit status."""
    path, socket = map(Path, arguments)
    try:
        site = read_site(path)
        if site.threads is not None:
            torch.set_num_threads(site.threads)
        handler = RequestHandler(Responder(load_resources(site)))
        serve(socket, handler.answer, lambda: handler.over)
        return 0
    except PluribusError as error:
        print(f"error: {error.sentence}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    set_process_name("pluribus-site")
    sys.exit(main(sys.argv[1:]))
