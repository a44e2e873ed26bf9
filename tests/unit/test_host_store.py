"""Data that stay on the host: the same rows, labels and bits as on the device."""

from __future__ import annotations

import pytest
import torch

from conftest import run_tiny
from pluribus.assembly import assemble
from pluribus.data.federated import Data, Store
from pluribus.data.host_store import HostStore, make_store
from pluribus.data.scaling import Scale
from pluribus.experiment import experiment
from pluribus.internal import batches

CPU = torch.device("cpu")


def stores() -> tuple[Store, HostStore]:
    x = torch.randint(0, 256, (50, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = torch.arange(50) % 3
    return Store(x, y, CPU), HostStore(x, y, CPU)


def test_it_gives_the_rows_of_a_store_on_the_device():
    one, other = stores()
    rows, scale = torch.tensor([7, 0, 49, 7]), Scale(torch.full((1, 1, 1), 100.0), torch.full((1, 1, 1), 0.5))
    for how in ({}, {"scale": scale}):
        for expected, found in zip(one.take(rows, **how), other.take(rows, **how), strict=True):
            assert torch.equal(expected, found)
    assert torch.equal(one.labels(rows), other.labels(rows))


def test_batches_are_taken_ahead_and_in_order(monkeypatch: pytest.MonkeyPatch):
    """Chunks of one batch, so that there are several to take ahead."""
    monkeypatch.setattr(batches, "CHUNK", 1)
    order, sizes = torch.randperm(50, generator=torch.Generator().manual_seed(1)), [8, 8, 8, 8, 8, 10]
    found = [list(batches.gather(Data(store, torch.arange(50)), order, sizes)) for store in stores()]
    assert [batch.n for batch in found[1]] == sizes
    for expected, batch in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected[:3], batch[:3], strict=True))


def test_where_rows_are_kept():
    x, y = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    assert make_store(x, y, CPU, False, "auto").resident
    assert not make_store(x, y, CPU, False, "host").resident
    parts = assemble(experiment("local", data="digits", store="host", device="cpu"))
    assert not parts.data.store.resident
    assert not [note for note in parts.warnings if "host" in note], "the user asked for it"


@pytest.mark.parametrize("method", ["fedproto", "fedmd"])
def test_a_run_leaves_the_same_bits(method: str):
    how = {"clients": 2, "batch_size": 7, "public_fraction": 0.1}
    one, other = (run_tiny(method, store=where, **how) for where in ("device", "host"))
    assert one.history[-1]["clients"] == other.history[-1]["clients"]
    for name, value in one.model(1).state_dict().items():
        assert torch.equal(value, other.model(1).state_dict()[name])
