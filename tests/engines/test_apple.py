"""`--device mps`, on a pretended Apple GPU: nobody had a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pluribus
from apple import OnApple, apple_gpu
from kit import assert_same
from pluribus.conformance.cases import fitting_settings
from pluribus.errors import ConflictError, DeviceError
from pluribus.internal.devices import double, find_device
from pluribus.result import Result

MPS = torch.device("mps", 0)
TWO = {"clients": 2, "rounds": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "training": {"optimizer": "adam", "clip_norm": 1.0, "augment": "crop,flip,erase"},
    "evaluation": {"metrics": "f1,auroc,ece,confusion", "store": "host"},
}


@pytest.fixture
def apple() -> Iterator[None]:
    with apple_gpu():
        yield


def run_tiny(method: str, device: str, **settings: Any) -> Result:
    return pluribus.run(method, **fitting_settings(method) | TWO | settings | {"device": device}, progress=False)


def assert_equal_on_both(folder: Path, method: str, **settings: Any) -> None:
    """Equal bits on the CPU and on a pretended Apple GPU, which computes on the CPU."""
    with apple_gpu():
        found = run_tiny(method, "mps", out=folder / "apple", **settings)
    assert_same(found, run_tiny(method, "cpu", out=folder / "cpu", **settings))


@pytest.mark.parametrize("method", ["fedgen", "fedh2l", "fedpac", "feddf", "fedfree"])
def test_a_run_needs_nothing_that_an_apple_gpu_lacks(method: str, tmp_path: Path) -> None:
    assert_equal_on_both(tmp_path, method)


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_settings_need_nothing_that_it_lacks(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_equal_on_both(tmp_path, "fedgh", **settings)


@pytest.mark.usefixtures("apple")
def test_clients_train_there_and_the_server_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = pluribus.Client.fit

    def fit(client: pluribus.Client, *args: Any, **kwargs: Any) -> Any:
        seen.update(type(p) for p in client.model.parameters())
        return real(client, *args, **kwargs)

    monkeypatch.setattr(pluribus.Client, "fit", fit)
    run_tiny("fedgh", "mps")
    assert seen == {OnApple}


@pytest.mark.usefixtures("apple")
def test_auto_never_chooses_it() -> None:
    assert find_device("auto") == torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.usefixtures("apple")
@pytest.mark.parametrize("settings", [{"precision": "bfloat16"}, {"dp_epsilon": 8.0}, {"workers": 2}], ids=str)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConflictError):
        run_tiny("fedavg", "mps", **settings)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="has an Apple GPU")
def test_a_machine_without_one_is_refused() -> None:
    with pytest.raises(DeviceError, match="Apple"):
        run_tiny("fedavg", "mps")


@pytest.mark.usefixtures("apple")
def test_double_precision_is_on_the_cpu() -> None:
    value = torch.ones(3, device=MPS)
    assert double(value).dtype == torch.float64
    assert not isinstance(double(value), OnApple)
    with pytest.raises(TypeError, match="float64"):
        value.double()
    with pytest.raises(RuntimeError, match="on the CPU"):
        value + torch.ones(3)
