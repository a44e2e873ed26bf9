"""Models that belong to no client: evaluated in views of their own, saved, and used by predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pluribus
from conftest import new_folder, run_tiny
from pluribus.cli import main
from pluribus.errors import ConflictError, MissingSettingError, RangeError, UserCodeError
from pluribus.methods.fedavg import FedAvg
from refusals import refused
from toys import Groups

TWO = {"models": "mlp-64,cnn-16", "clients": 4}


def accuracy_of(model: torch.nn.Module, result: pluribus.Result, k: int) -> float:
    """The accuracy of a model on the test rows of a client, measured by hand."""
    with result._open() as (parts, _):
        data = parts.data.sets(k)["test"]
        x, y = data.take(torch.arange(len(data)))
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


@pytest.fixture(scope="module")
def cut() -> pluribus.Result:
    return run_tiny("heterofl", rounds=2, out=new_folder())


def test_the_global_model_is_evaluated_on_the_rows_of_each_client(cut: pluribus.Result) -> None:
    record = cut.history[-1]["clients"]
    assert cut.views == ("before", "after", "global")
    for k in cut.clients:
        model = cut.server_model(client=k)
        assert record[str(k)]["global"]["test"] == pytest.approx(accuracy_of(model, cut, k))
    assert any(record[k]["global"] != record[k]["before"] for k in record)


def test_each_architecture_has_a_model_of_its_own() -> None:
    result = run_tiny(Groups, rounds=2, **TWO)
    for k in result.clients:
        model = result.server_model(client=k)
        assert result.history[-1]["clients"][str(k)]["group"]["test"] == pytest.approx(accuracy_of(model, result, k))
    with refused(MissingSettingError, "architecture"):
        result.server_model()


def test_its_bytes_count_as_evaluation(cut: pluribus.Result) -> None:
    size = sum(value.nbytes for value in cut.server_model(client=0).state_dict().values())
    sent = [e.bytes for e in cut.ledger.entries() if e.tensor.startswith("global.") and e.client == 1 and e.round == 1]
    assert sum(sent) == size
    assert all(e.direction == "evaluation" for e in cut.ledger.entries() if e.tensor.startswith("global."))


def test_a_table_shows_the_view(cut: pluribus.Result) -> None:
    frame = cut.frame()
    assert set(frame[frame["view"] == "global"]["client"]) == set(cut.clients)


def test_the_server_s_model_predicts(cut: pluribus.Result, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    x = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = pluribus.predict(cut.folder, x, client=1, server=True)
    with torch.no_grad():
        wanted = cut.server_model(client=1)(x / 127.5 - 1).argmax(1)
    assert [one.number for one in found] == wanted.tolist()
    assert torch.equal(
        torch.cat([p.flatten() for p in pluribus.load_model(cut.folder, 1, server=True).parameters()]),
        torch.cat([p.flatten() for p in cut.server_model(client=1).parameters()]),
    )
    from PIL import Image

    Image.fromarray(x[0, 0].numpy()).save(tmp_path / "one.png")
    main(["predict", str(cut.folder), str(tmp_path / "one.png"), "--global", "--client", "1", "--json"])
    assert f'"number": {found[0].number}' in capsys.readouterr().out


def test_what_has_no_server_model_is_refused(cut: pluribus.Result) -> None:
    plain = run_tiny("fedgh", rounds=1, out=new_folder())
    with refused(ConflictError, "fedgh", "heterofl"):
        plain.server_model()
    with refused(RangeError, "client 99"):
        pluribus.predict(cut.folder, torch.zeros(1, 1, 8, 8, dtype=torch.uint8), client=99, server=True)


@dataclass(frozen=True)
class Wrong(FedAvg):
    """Its headline is a model of the server."""

    views = ("global", "after")


@dataclass(frozen=True)
class Missing(FedAvg):
    """It has a view of the server, and no function for it."""

    views = ("after", "global")


def test_a_headline_is_a_model_of_clients() -> None:
    with refused(UserCodeError, "views", "global"):
        pluribus.run(Wrong())


def test_a_server_view_needs_its_function() -> None:
    with refused(UserCodeError, "Missing", "server_model"):
        pluribus.run(Missing())


def test_normalization_by_a_client_s_rows_needs_a_client(cut: pluribus.Result) -> None:
    plain, scaled = ({"models": "cnn-16", "normalize": how, "rounds": 1} for how in ("none", "client"))
    with refused(MissingSettingError, "normalizes"):
        run_tiny("heterofl", **scaled).server_model()
    with refused(MissingSettingError, "batch norm"):
        cut.server_model()
    assert run_tiny("heterofl", **plain).server_model() is not None
