"""Capacities in the names of models, and models with a share of their channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pluribus
from conftest import assemble_tiny, make_host, run_tiny
from pluribus.client import Client
from pluribus.errors import ConflictError, FormatError, MismatchError, MissingSettingError, PluribusError, RangeError
from pluribus.experiment import experiment
from pluribus.message import Message
from pluribus.methods.heterofl import HeteroFL
from pluribus.models import build
from pluribus.models.capacity import Capacity, split_name, write_capacities
from pluribus.models.width import Cut, Dimension
from pluribus.storage.code import find_code

SMALL, COLOR = (1, 8, 8), (3, 32, 32)


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cnn4@0.5", ("cnn4", Capacity("width", 0.5))),
        ("resnet18@depth2", ("resnet18", Capacity("depth", 2))),
        ("tiny-vit-32@rank4", ("tiny-vit-32", Capacity("rank", 4))),
        ("my.module.build@0.25", ("my.module.build", Capacity("width", 0.25))),
        ("cnn4", ("cnn4", None)),
        ("cnn4@", ("cnn4@", None)),
    ],
)
def test_a_name_has_an_architecture_and_a_capacity(name: str, found: tuple[str, Capacity | None]) -> None:
    assert split_name(name) == found


@pytest.mark.parametrize("name", ["cnn4@0", "cnn4@1.5", "cnn4@depth0", "cnn4@rank2.5"])
def test_a_capacity_leaves_something(name: str) -> None:
    with pytest.raises(RangeError):
        split_name(name)


@given(st.text(max_size=30))
def test_any_name_is_read_or_refused(name: str) -> None:
    try:
        architecture, capacity = split_name(name)
    except PluribusError:
        return
    assert name == architecture if capacity is None else name.startswith(f"{architecture}@")


def test_capacities_are_given_in_turn() -> None:
    models = experiment("local", models="mlp-64", clients=4, capacity="1,0.5,0.25").client_models()
    assert models == ("mlp-64", "mlp-64@0.5", "mlp-64@0.25", "mlp-64")


@pytest.mark.parametrize("given", [[1, 0.5], (1.0, 0.5), "1, 0.5", {0: 1, 1: 0.5}])
def test_python_gives_capacities_in_many_ways(given: Any) -> None:
    assert write_capacities(given, 2) == "1,0.5"
    assert write_capacities(0.5, 2) == "0.5"


def test_wrong_capacities_are_refused() -> None:
    with pytest.raises(FormatError, match="half"):
        experiment("local", capacity="half")
    with pytest.raises(MissingSettingError, match="client 1"):
        write_capacities({0: 1}, 2)
    with pytest.raises(ConflictError, match=r"mlp-64@0\.5"):
        experiment("local", models="mlp-64@0.5", capacity="0.5").client_models()
    with pytest.raises(RangeError):
        experiment("local", models="mlp-64", capacity="2").client_models()


def test_a_capacity_hides_no_code() -> None:
    assert [one.path for one in find_code({"models": "os.system@0.5"})] == ["os.system"]


# ---- widths ----------------------------------------------------------------------------------------------------------


def test_a_dimension_keeps_whole_channels() -> None:
    flat = Dimension(inner=3)  # 4 channels of 3 pixels each
    assert flat.kept(12, 0.5) == 6
    assert flat.indices(12, 6, 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.indices(12, 6, 3).tolist() == [9, 10, 11, 0, 1, 2]  # channels 3 and 0
    heads = Dimension(groups=2)  # 2 heads of 4 channels each
    assert heads.indices(8, 4, 0).tolist() == [0, 1, 4, 5]
    assert Dimension().kept(5, 0.5) == 3  # rounded up


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mlp-128-64", SMALL), ("cnn-16-32", SMALL), ("cnn4", COLOR), ("resnet8", COLOR), ("mobilenet-v2", COLOR)],
)
def test_a_part_computes_what_the_whole_does_with_zeros_elsewhere(
    name: str, shape: tuple[int, ...], first: int
) -> None:
    torch.manual_seed(0)
    whole, small = (build(one, shape=shape, classes=10).eval() for one in (name, f"{name}@0.3"))
    part, tensors = Cut(whole, small, shape).part(first), whole.state_dict()
    small.load_state_dict(part.take(tensors))
    for key, value in tensors.items():
        if not key.endswith(("running_var", "num_batches_tracked")):
            kept = torch.zeros_like(value)
            kept[part.at(key)] = value[part.at(key)]
            value.copy_(kept)
    x = torch.randn(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(small(x), whole(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "shape"), [("vit-s16", COLOR), ("resnet8-gn", COLOR)])
def test_other_models_are_cut_too(name: str, shape: tuple[int, ...]) -> None:
    whole, small = (build(one, shape=shape, classes=10) for one in (name, f"{name}@0.5"))
    taken = Cut(whole, small, shape).part(1).take(whole.state_dict())
    assert {key: value.shape for key, value in taken.items()} == {k: v.shape for k, v in small.state_dict().items()}
    assert small(torch.zeros(2, *shape)).shape == (2, 10)
    assert small.width == whole.width // 2


@pytest.mark.parametrize(
    ("model", "shape", "fact"),
    [("googlenet", COLOR, "joins"), ("tiny-cnn-64", (1, 16, 16), "pretrained")],
)
def test_a_model_that_cannot_be_cut_is_refused(model: str, shape: tuple[int, ...], fact: str) -> None:
    with pytest.raises(MismatchError, match=fact):
        build(f"{model}@0.5", shape=shape, classes=10)


def test_clients_of_any_method_have_capacities() -> None:
    result = pluribus.run("fedgh", models="cnn-16", capacity=[1, 0.5], clients=2, rounds=1, progress=False)
    assert {k: facts.model for k, facts in result.clients.items()} == {0: "cnn-16", 1: "cnn-16@0.5"}
    small, large = (sum(p.numel() for p in result.model(k).parameters()) for k in (1, 0))
    assert small < large


# ---- the scaler of HeteroFL ------------------------------------------------------------------------------------------


def narrow_client(**settings: Any) -> tuple[HeteroFL, Client, dict[str, torch.Tensor]]:
    """A client with half of a perceptron, and the part of the global model that it downloads."""
    parts = assemble_tiny("heterofl", models="mlp-64", capacity="1,0.5", **settings)
    assert isinstance(parts.method, HeteroFL)
    client = make_host(parts).client(1)
    parts.method.prepare(client)
    part = build("mlp-64@0.5", shape=parts.task.input, classes=10).state_dict()
    parts.method.receive(client, Message(part))
    return parts.method, client, part


def test_a_narrow_model_predicts_as_it_is_trained() -> None:
    """Activations are divided by the share 0.5 in both: head(relu(2 (W x + b)))."""
    _, client, part = narrow_client()
    x = torch.randn(3, *client.task.input.shape)
    weight, bias = (part[name] for name in part if name.startswith("features"))
    hidden = torch.relu(2 * (x.flatten(1) @ weight.T + bias))
    expected = hidden @ part["head.weight"].T + part["head.bias"]
    torch.testing.assert_close(client.model.eval()(x), expected)


def test_a_narrow_client_sends_weights_of_the_scale_that_it_got() -> None:
    method, client, part = narrow_client(lr=1e-9)
    for _ in range(2):  # again without a download
        sent = method.local_update(client).part()
        assert all(torch.allclose(sent[name], value) for name, value in part.items())


def test_a_narrow_model_is_the_same_in_a_file(tmp_path: Any) -> None:
    result = run_tiny("heterofl", models="cnn-16-32", capacity="0.3", clients=2)
    x = torch.rand(5, 1, 8, 8)
    result.save_model(0, tmp_path / "model.safetensors")
    assert torch.equal(pluribus.load_model(tmp_path / "model.safetensors")(x), result.model(0)(x))


def test_nobody_needs_to_hold_the_whole_model() -> None:
    result = run_tiny("fedrolex", models="cnn-16", capacity="0.5", clients=2)
    whole, own = (sum(p.numel() for p in model.parameters()) for model in (result.server_model(), result.model(0)))
    assert own < whole
