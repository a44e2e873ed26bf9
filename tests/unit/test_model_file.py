"""A model in a file of its own: read without its run, its data and its method, with the bits that were measured."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pluribus
from conftest import new_folder, run_tiny, tiny
from pluribus.client import Client
from pluribus.conformance.cases import Case
from pluribus.conformance.kinds import SAMPLES, Sample
from pluribus.data import load
from pluribus.errors import (
    ConflictError,
    DamagedFileError,
    FileAccessError,
    MismatchError,
    MissingSettingError,
    RangeError,
    UnknownNameError,
    UserCodeError,
)
from pluribus.inputs import Input
from pluribus.result import Result
from refusals import refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A run, and the file of the model of its client 1, that tests may look at, but not change."""
    result, path = run_tiny("fedgh"), tmp_path_factory.mktemp("model") / "client1.safetensors"
    result.save_model(1, path)
    return result, path


def facts_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return {name: json.loads(value) for name, value in file.metadata().items()}


def rewrite(path: Path, out: Path, **facts: Any) -> Path:
    """The same tensors with other facts. None: without the fact."""
    kept = {name: value for name, value in (facts_of(path) | facts).items() if value is not None or name not in facts}
    save_file(load_file(path), out, {name: json.dumps(value) for name, value in kept.items()})
    return out


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedgh", {"projector": "linear"}),
        ("fedavg", {"models": "mlp-64"}),  # its headline is the model before local training
        ("local", {"models": "toys.normed", "width": None}),
        ("fedhpl", {"models": "tiny", "width": None, "rounds": 1}),  # prompts are attached to the model
    ],
    ids=["projected", "before", "own builder", "prompts"],
)
def test_the_file_alone_gives_the_model_of_the_run(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(new_folder()) / "run"
    result = run_tiny(method, out=folder, **settings)
    own, x = {}, torch.rand(5, *((1, 16, 16) if method == "fedhpl" else (1, 8, 8))) * 2 - 1
    with torch.no_grad():
        for k in result.clients:
            own[k] = result.model(k)(x)
            result.save_model(k, str(tmp_path / f"{k}.safetensors"))
        shutil.rmtree(folder)
        before = torch.get_rng_state()
        for k, expected in own.items():
            model = pluribus.load_model(tmp_path / f"{k}.safetensors")
            assert not model.training
            assert torch.equal(model(x), expected)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("sample", SAMPLES[:4], ids=lambda sample: sample.name)
def test_a_file_holds_a_model_for_any_kind_of_rows(sample: Sample, tmp_path: Path) -> None:
    case = Case("fedgh", Path(new_folder())).but(sample=sample, clients=2)
    result, row = case.run(), case.seen_parts.task.input
    x = case.seen_parts.dataset.x[:5].to(row.dtype)
    expected = result.model(1)
    result.save_model(1, tmp_path / "model")
    shutil.rmtree(result.folder)
    assert Input.of(facts_of(tmp_path / "model")["input"]) == row
    with torch.no_grad():
        assert torch.equal(pluribus.load_model(tmp_path / "model")(x), expected(x))


def test_the_last_round_may_be_saved_too(tmp_path: Path) -> None:
    result = run_tiny("local", rounds=4, lr=1.0, models="mlp-64")
    k = next(k for k, one in result.per_client().items() if one.selected_round < 3)
    for round in ("selected", "last"):
        result.save_model(k, tmp_path / round, round)
        expected, found = result.model(k, round).state_dict(), pluribus.load_model(tmp_path / round).state_dict()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert facts_of(tmp_path / "last")["round"] == 3
    assert facts_of(tmp_path / "selected")["round"] == result.per_client()[k].selected_round
    assert load_file(tmp_path / "selected").keys() == load_file(tmp_path / "last").keys()


def test_the_facts_in_the_file(saved: tuple[Result, Path]) -> None:
    result, path = saved
    facts = facts_of(path)
    assert facts == {
        "model": "cnn-16",
        "input": {"kind": "image", "shape": [1, 8, 8], "vocabulary": 0, "categories": [], "whole": False},
        "classes": 10,
        "names": [str(number) for number in range(10)],
        "width": 64,
        "projector": "pool",
        "method": "fedgh",
        "view": "after",
        "client": 1,
        "round": result.per_client()[1].selected_round,
        "pluribus": pluribus.__version__,
        "prompting": None,
        "split": None,
    }


def test_its_accuracy_is_the_reported_one(saved: tuple[Result, Path]) -> None:
    result, path = saved
    data, rows = load(result.data), result._kept(1)["row"].long()
    with torch.no_grad():
        predicted = pluribus.load_model(path)(data.x[rows].float() / 127.5 - 1).argmax(1)
    assert (predicted == data.y[rows]).double().mean() == result.per_client()[1].selected["test"]


def small(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12))


def test_a_builder_that_cannot_be_looked_up_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "from torch import nn\n\ndef small(shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12))\n"
    (tmp_path / "gone_model.py").write_text(source)
    result = pluribus.run("local", progress=False, out=new_folder(), **tiny(models="gone_model.small", rounds=1))
    expected = result.model(0).state_dict()
    result.save_model(0, tmp_path / "model")
    (tmp_path / "gone_model.py").unlink()
    monkeypatch.delitem(sys.modules, "gone_model")
    with refused(UserCodeError, tmp_path / "model", "gone_model.small", "model="):
        pluribus.load_model(tmp_path / "model")
    found = pluribus.load_model(tmp_path / "model", model=small).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    with refused(MismatchError, tmp_path / "model", "gone_model.small", "features.backbone.1.weight"):
        pluribus.load_model(tmp_path / "model", model=lambda shape: nn.Sequential(nn.Flatten(), nn.Linear(64, 13)))


class Changed(pluribus.Method):
    """Changes the architecture of its clients."""

    def prepare(self, client: Client) -> None:
        client.model.head = nn.Sequential(client.model.head)


def test_a_model_that_its_method_changed_is_refused(tmp_path: Path) -> None:
    result = run_tiny(Changed, models="mlp-64", rounds=1)
    with refused(MismatchError, "client 2", "mlp-64", "head.weight", "result.model(2)"):
        result.save_model(2, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_a_sentence(saved: tuple[Result, Path], tmp_path: Path) -> None:
    _, path = saved
    (tmp_path / "text").write_text("no tensors")
    with refused(DamagedFileError, tmp_path / "text", "safetensors"):
        pluribus.load_model(tmp_path / "text")
    save_file(load_file(path), tmp_path / "bare")
    with refused(DamagedFileError, tmp_path / "bare", "save_model"):
        pluribus.load_model(tmp_path / "bare")
    for damage in ({"model": None}, {"shape": [1, 8]}, {"shape": "x"}):
        with refused(DamagedFileError, tmp_path / "facts"):
            pluribus.load_model(rewrite(path, tmp_path / "facts", **damage))
    with refused(UnknownNameError, tmp_path / "other", "'nonet'", "model="):
        pluribus.load_model(rewrite(path, tmp_path / "other", model="nonet"))
    tensors = load_file(path)
    tensors.pop("head.bias")
    with safe_open(path, framework="pt") as file:
        save_file(tensors, tmp_path / "part", file.metadata())
    with refused(MismatchError, tmp_path / "part", "head.bias", "cnn-16"):
        pluribus.load_model(tmp_path / "part")


def test_bad_arguments_are_a_sentence(saved: tuple[Result, Path], tmp_path: Path) -> None:
    result, path = saved
    with refused(ConflictError, path, "client="):
        pluribus.load_model(path, client=0)
    with refused(ConflictError, path, "round="):
        pluribus.load_model(path, round="last")
    with refused(FileAccessError, tmp_path / "none"):
        pluribus.load_model(tmp_path / "none")
    with refused(MissingSettingError, result.folder, "client=", "0 to 3"):
        pluribus.load_model(result.folder)
    with refused(ConflictError, result.folder, "model="):
        pluribus.load_model(result.folder, 0, model=small)
    with refused(RangeError, "client 7"):
        result.save_model(7, tmp_path / "model")
    with refused(FileAccessError, tmp_path / "none"):
        result.save_model(0, tmp_path / "none" / "model")
    with refused(UnknownNameError, "best"):
        result.save_model(0, tmp_path / "model", round="best")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
