"""The warm half of a site: a process that holds data and model, and answers what Flower's short-lived half relays.

python -m pluribus.flower.worker site.toml SOCKET
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from pluribus.data import Dataset, load
from pluribus.data.split import split
from pluribus.draws import numpy_rng
from pluribus.errors import ConfigError, PluribusError
from pluribus.flower.config import SiteFile, read
from pluribus.flower.envelope import seal
from pluribus.flower.holdings import Public
from pluribus.flower.party import Means, Party
from pluribus.flower.wire import serve


def means_of(site: SiteFile) -> Means:
    """What the site brings, from what its file says."""
    public = None if site.public is None else Public.read(site.public, site.image_size)
    return Means(_sets(site), public, site.model, Path(site.state), torch.device(site.device))


def _sets(site: SiteFile) -> dict[str, Dataset]:
    if site.data is None:
        given = {"train": site.train, "val": site.val, "test": site.test}
        if missing := [name for name, place in given.items() if place is None]:
            raise ConfigError(f"site.toml names neither 'data' nor '{missing[0]}': say where the images lie.")
        return {name: load(str(place), image_size=site.image_size) for name, place in given.items()}
    whole = load(site.data, image_size=site.image_size)
    shares = {"train": 1 - site.val_fraction - site.test_fraction, "val": site.val_fraction, "test": site.test_fraction}
    cut = split(whole.y.numpy(), shares, numpy_rng(0, "split", site.name))
    return {name: Dataset(name, whole.x[rows], whole.y[rows], whole.classes) for name, rows in cut.items()}


def answering(party: Party) -> Callable[[bytes], bytes]:
    """Whatever comes is answered, if only with why not: a worker outlives every request."""

    def answer(blob: bytes) -> bytes:
        try:
            return party.answer(blob)
        except PluribusError as error:
            return seal({"refused": str(error)}, {})
        except Exception as error:  # a method's own mistake, or a lack of memory: here with all that is known of it
            traceback.print_exc()
            return seal({"refused": f"it failed with {type(error).__name__}: its worker's log says where."}, {})

    return answer


def main(arguments: list[str]) -> int:
    """Answer for ever."""
    path, socket = arguments
    serve(Path(socket), answering(Party(means_of(read(SiteFile, Path(path))))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
