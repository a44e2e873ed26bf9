"""The worker of a site: the process that holds data and model, and answers the requests of the server.

Flower starts a short-lived process for each request. That process relays the request to this one, which keeps running.

python -m pluribus.sites.trainer site.toml SOCKET
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from pluribus.data import Dataset, load
from pluribus.data.dataset import PARTS
from pluribus.data.federated import Fractions, split_rows
from pluribus.data.folders import normalize_name
from pluribus.data.reading import Reading, parse_columns
from pluribus.data.scaling import Normalize, choose_normalize, parse_normalize
from pluribus.draws import numpy_rng
from pluribus.errors import (
    ConflictError,
    DataError,
    DeviceError,
    FormatError,
    MismatchError,
    MissingSettingError,
    PluribusError,
    UnknownNameError,
    unknown,
)
from pluribus.internal.devices import find_device, is_apple, is_present
from pluribus.models import build, entries, has_weights
from pluribus.models.capacity import architecture_of
from pluribus.sites.agreement import is_own
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.programs import set_process_name
from pluribus.sites.flower.wire import serve
from pluribus.sites.holdings import Public, take_part
from pluribus.sites.responder import Responder, SiteResources


def load_resources(site: SiteFile) -> SiteResources:
    """Load what site.toml names: data, model, state folder and device. This finds mistakes without a server."""
    if architecture_of(site.model) not in entries() and not is_own(site.model):
        raise unknown("model", site.model, entries(), "pluribus list models")
    if site.classes and len(set(site.classes)) < len(site.classes):
        raise FormatError("'classes' in site.toml must be names, each once.")
    normalize, device, reading = _choose_normalize(site), _choose_device(site), read_columns(site)
    sets = _load_sets(site, reading)
    train = sets["train"]
    with torch.device("meta"):  # without memory, to check that the model accepts these rows
        build(site.model, shape=train.input, classes=len(known_classes(site, sets)), weights=site.weights)
    is_changed = choose_normalize(normalize, train).mode != "none"
    if is_changed and train.kind == "image" and has_weights(site.model, site.weights):
        raise ConflictError(
            f"model {site.model} is pretrained and normalizes images as in its training: leave out 'normalize'."
        )
    public = None if site.public is None else Public.read(site.public, site.image_size, reading)
    if public is not None:
        _print_notes(site.public, public.dataset)
    how = normalize, site.weights, site.allow, site.share_counts
    return SiteResources(sets, public, site.model, site.state, device, *how)


def known_classes(site: SiteFile, own: Mapping[str, Dataset]) -> tuple[str, ...]:
    """The classes of the federation, as far as the site knows them: those in site.toml, or else those of its data."""
    held = tuple(dict.fromkeys(normalize_name(name) for one in own.values() for name in one.classes))
    if not site.classes:
        lone = own["train"].target == "classes" and len(held) == 1  # a federation has two classes at least
        return (*held, "(other)") if lone else held
    known = tuple(map(normalize_name, site.classes))
    if stray := [name for name in held if name not in known]:
        raise MismatchError(f"the data of this site have the class '{stray[0]}', which 'classes' in site.toml lacks.")
    return known


def read_columns(site: SiteFile) -> Reading:
    """How the files of a site are read."""
    words = site.tokenizer, site.vocabulary, site.length
    return Reading(parse_columns(site.columns), site.window, site.stride, *words, site.label_kind)


def _choose_normalize(site: SiteFile) -> Normalize:
    normalize = parse_normalize(site.normalize)
    if normalize.mode == "dataset":
        raise ConflictError(
            "'normalize' in site.toml cannot be dataset: no site sees the rows of the others. Use client, or "
            "MEAN/DEVIATION with the same numbers at all sites."
        )
    return normalize


def _choose_device(site: SiteFile) -> torch.device:
    device = find_device(site.device)
    if device is None or is_apple(device):  # no site was tried on one
        raise UnknownNameError(f"'device' in site.toml must be cpu, cuda or auto, not '{site.device}'.")
    if not is_present(device):
        raise DeviceError("'device' in site.toml is cuda, but this torch sees no GPU: use cpu.")
    return device


def _load_sets(site: SiteFile, reading: Reading) -> dict[str, Dataset]:
    """The training rows of the site, and its validation and test rows if there are any."""
    if site.data is None:
        given = {"train": site.train, "val": site.val, "test": site.test}
        if missing := [name for name, path in given.items() if path is None]:
            raise MissingSettingError(f"site.toml has neither 'data' nor '{missing[0]}': set the path of the data.")
        if site.split_by != "auto":
            raise ConflictError(
                "'split_by' in site.toml splits 'data', but train, val and test are given: leave it out."
            )
        return {name: _load(str(path), site, reading) for name, path in given.items()}
    whole = _load(site.data, site, reading)
    cut = _split(whole, site)
    if not len(cut["train"]):
        raise DataError(f"the split of {site.data} leaves no rows to train on: change the fractions or 'split_by'.")
    return {name: take_part(whole, rows, name) for name, rows in cut.items() if len(rows)}


def _split(whole: Dataset, site: SiteFile) -> dict[str, np.ndarray]:
    """Rows of each part: the data's own split, or one by one, in groups, or by time."""
    fractions = Fractions(site.val_fraction, site.test_fraction, by=site.split_by)
    if whole.part is not None:
        return {name: np.flatnonzero(whole.part.numpy() == number) for number, name in enumerate(PARTS)}
    everything = np.arange(len(whole.y))
    cut = split_rows(whole, everything, fractions, numpy_rng(0, "split", site.name))
    if left := len(everything) - sum(map(len, cut.values())):
        _print(f"note: {site.data}: {left:,} rows overlap a later part of the split by time, and are left out.")
    return cut


def _load(path: str, site: SiteFile, reading: Reading) -> Dataset:
    dataset = load(path, image_size=site.image_size, reading=reading)
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
            spent = unseal(answer).head.get("privacy")
            budget = f", epsilon {spent['epsilon']:.2f} spent" if spent else ""
            _print(f"{when}: {head['verb']}  {time.monotonic() - started:.1f} s, {len(answer)} bytes back{budget}")
            return answer
        except PluribusError as error:
            reason, sent = error.sentence, self._responder.explain(error)
        except Exception as error:  # a bug in a method, or too little memory
            traceback.print_exc()
            reason = sent = f"it failed with {type(error).__name__}: the log of the site shows where."
        _print(f"refused: {reason}")
        return seal({"refused": sent}, {})


def _print(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Answer requests until the server ends the federation. Returns the exit status."""
    path, socket = map(Path, arguments)
    try:
        site = read_site(path)
        sys.path.insert(0, str(path.absolute().parent))  # the site's own model is beside its file
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
