"""On a GPU: recorded steps leave the bits of steps as written, whoever sits in whose place."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_conformance import case_of, every_method
from torch import Tensor, nn
from torch.nn import functional as F

import pluribus
from conftest import new_folder
from kit import StopAfter, StoppedError, assert_same
from pluribus.client import Batch, Client
from pluribus.conformance.cases import settings_on
from pluribus.conformance.kinds import SAMPLES
from pluribus.data.augment import Augment
from pluribus.engines.capture import Captured
from pluribus.engines.server_steps import Recorder
from pluribus.message import Field, Message, Rows, encode, move_together
from pluribus.method import Method, methods
from pluribus.methods.fedtgp import FedTGP
from pluribus.result import Result
from pluribus.server import Server
from pluribus.storage.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(name: str, **settings: Any) -> Result:
    return case_of(name).but(**settings).run()


def as_written(name: str, **settings: Any) -> Result:
    return run(name, device="cuda", capture=False, **{"rounds": 4} | settings)


def captured(name: str, **settings: Any) -> Result:
    return run(name, device="cuda", stack=False, **{"rounds": 4} | settings)


def reasons(result: Result) -> list[str]:
    return [warning for warning in result.warnings if "not captured" in warning or "not stacked" in warning]


@every_method
def test_captured_steps_leave_the_bits_of_steps_as_written(name):
    replayed = captured(name)
    assert reasons(replayed) == []
    assert_same(as_written(name), replayed)


PRIVATE = {"dp_epsilon": 8.0, "batch_size": 16, "epochs": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("local", {"models": "cnn-16,cnn-16-32-gn"}),
        ("local", {"models": "resnet18-gn", "image_size": 32}),
        ("fedgh", {"models": "mlp-64,cnn-16", "width": 64}),
        ("fedkd", {"models": "mlp-64,cnn-16"}),
        ("scaffold", {"models": "cnn-16"}),  # its step reads the private gradient
        ("fedrep", {"models": "cnn-16"}),
        ("fedproto", {"models": "mlp-64,cnn-16", "width": 64}),
    ],
)
def test_private_steps_are_captured_and_leave_the_bits_of_steps_as_written(name, settings):
    replayed = captured(name, **PRIVATE, **settings)
    assert reasons(replayed) == []
    assert_same(as_written(name, **PRIVATE, **settings), replayed)


def test_private_clients_may_take_turns_in_one_place(monkeypatch):
    settings = PRIVATE | {"models": "cnn-16"}
    roomy = captured("fedavg", **settings)
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    assert_same(roomy, captured("fedavg", **settings))


@every_method
def test_clients_may_take_turns_in_one_place(name, monkeypatch):
    roomy = captured(name)
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    assert_same(roomy, captured(name))


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "weight_decay": 1e-3, "epochs": 2},
        {"momentum": 0.9, "optimizer_life": "run"},
        {"optimizer": "amsgrad", "lr": 1e-3},
        {"optimizer": "adamw", "lr": 1e-3, "lr_decay": 0.5},
        {"lr_decay": 0.5},
        {"clip_norm": 0.5, "lr_schedule": "cosine", "lr_warmup": 1},
        {"optimizer": "adam", "lr": 1e-3, "clip_norm": 0.5, "lr_schedule": "steps", "lr_steps": "1,3"},
        {"batch_size": 7},
        {"precision": "bfloat16"},
        {"precision": "float32", "channels_last": False},
        {"models": "mobilenet-v2,googlenet", "image_size": 32, "clients": 2, "rounds": 3, "batch_size": 16},
        {"participation": 0.5, "straggler_rate": 0.3},
        {"augment": "crop,flip,erase", "epochs": 2},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
@pytest.mark.parametrize("name", ["fedavg", "fedl2g-l"])
def test_under_every_setting(name, settings):
    if name == "fedavg":
        settings = settings | {"models": settings.get("models", "cnn-16-32").split(",")[0]}
    assert_same(as_written(name, **settings), captured(name, **settings))


def test_augmented_images_are_those_of_the_cpu():
    x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    changed = [
        Augment.of(("crop", "flip", "erase"), 2**61 + 5, 64, torch.device(name))(x.to(name)) for name in ("cpu", "cuda")
    ]
    assert torch.equal(changed[0], changed[1].cpu())


@pytest.mark.parametrize("name", ["fedmd", "fedh2l", "fedgen", "fedkd"])
def test_captured_steps_see_augmented_images_and_public_ones_as_they_are(name):
    """FedMD takes one step both on augmented images and, in its digest, on images as they are."""
    settings = {"augment": "crop,flip,erase"}
    replayed = captured(name, **settings)
    assert reasons(replayed) == []
    assert_same(as_written(name, **settings), replayed)


def test_a_message_of_a_gpu_has_the_bytes_of_one_of_the_cpu():
    values = {
        "double": torch.randn(3, 2, dtype=torch.float64),
        "count": torch.tensor(7, dtype=torch.int32),
        "kernel": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 5),
    }
    means = Rows(torch.randn(4, 3), torch.tensor([True, False, True, True]))
    schema = {name: Field(tuple(value.shape), value.dtype) for name, value in values.items()}
    schema["means"] = Field((4, 3), form="rows")
    there = {name: value.cuda() for name, value in values.items()} | {
        "means": Rows(means.value.cuda(), means.held.cuda())
    }
    assert encode(Message(there), schema, "") == encode(Message(values | {"means": means}), schema, "")
    back = move_together(move_together(values, "cuda"), "cpu")
    assert all(torch.equal(back[name], value) for name, value in values.items())


@pytest.mark.parametrize("models", ["resnet10,cnn4", "mobilenet-v2"])
def test_clients_share_blocks_whose_copies_are_those_of_single_tensors(models):
    """A step in packed memory leaves the bits of a step in memory of its own."""
    settings = {"models": models, "image_size": 32, "clients": 2, "rounds": 2, "batch_size": 16}
    packed = captured("local", **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "pack", lambda self: None)
        assert_same(packed, captured("local", **settings))


def test_forward_mode_needs_no_more_memory_where_clients_share_blocks():
    """For each parameter that is a view, torch would allocate as much as the whole block has."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    captured("fedl2g-f", models="resnet18", image_size=32, clients=2, rounds=2, warmup=0)
    assert torch.cuda.max_memory_allocated() < 4 * 2**30  # 62 parameters of 45 MB each would take 5.6 GB


METHODS = list(methods())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: one.name)
@pytest.mark.parametrize("name", METHODS)
def test_every_kind_is_captured(name, sample):
    """Every method on rows and targets of one kind. A kind is for every third method, so that all meet all methods."""
    cls = methods()[name]
    mine = (METHODS.index(name) + SAMPLES.index(sample)) % 3 == 0
    if not mine or sample.kind not in cls.takes or sample.target not in cls.targets:
        pytest.skip("another sample is for this method, or the method is not for this one")
    settings = settings_on(sample, cls) | {"rounds": 3, "image_size": None}
    replayed = captured(name, **settings)
    assert reasons(replayed) == []
    assert_same(as_written(name, **settings), replayed)


@pytest.mark.parametrize(
    ("data", "models", "more"),
    [
        ("watch", "sensor5", {"partition": "natural", "augment": "jitter,scale", "class_weights": "balanced"}),
        ("speeches", "text6", {"augment": "drop", "vocabulary": 512, "length": 16}),
        ("breast-cancer", "table4", {"normalize": "dataset"}),
    ],
    ids=str,
)
def test_the_models_of_every_kind_are_captured(data, models, more):
    settings = {"models": models, "rounds": 3, "width": 64, "batch_size": 32, **more}
    settings |= {"clients": 10 if "partition" in more else 6}
    replayed = captured("fedproto", data=data, **settings)
    assert reasons(replayed) == []
    assert_same(as_written("fedproto", data=data, **settings), replayed)


@pytest.mark.parametrize("model", ["cnn1d-3", "transformer1d", "lstm1d"])
def test_clients_with_scales_of_their_own_train_together_or_alone(model):
    """After one round: rounding differs, and training makes more of a difference with every step."""
    settings = {"data": "watch", "models": model, "partition": "natural", "clients": 10, "rounds": 1}
    settings |= {"precision": "float32", "class_weights": "balanced", "augment": "scale", "width": 64}
    alone, stacked = captured("fedproto", **settings), run("fedproto", device="cuda", **settings)
    assert reasons(stacked) == []
    one, other = (Checkpoint(result.folder / "state") for result in (alone, stacked))
    for k in range(10):
        for part, value in one.client(k).items():
            torch.testing.assert_close(other.client(k)[part], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("turns", [False, True], ids=["roomy", "in turns"])
@pytest.mark.parametrize("name", ["fedproto", "fedmd", "fedl2g-f"])
def test_rows_on_the_host_leave_the_same_bits(name, turns, monkeypatch):
    """Small halves, so that both are used in turn. FedL2G reads rows inside a step, which then runs as written."""
    monkeypatch.setattr("pluribus.engines.staging.HALF_BYTES", 2048)
    settings = {"augment": "crop,flip", "epochs": 2}
    resident = captured(name, **settings)
    if turns:
        monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    assert_same(resident, captured(name, store="host", **settings))
    assert_same(resident, as_written(name, store="host", **settings))


def test_data_that_do_not_fit_stay_on_the_host(monkeypatch):
    monkeypatch.setattr("pluribus.data.host_store.most_bytes", lambda device: 10_000)
    small = captured("local")
    assert [note for note in small.warnings if "host" in note]
    assert not [note for note in captured("local", store="device").warnings if "host" in note]


def test_objects_are_captured_too():
    """Images as numbers, a builder, and a module that is split: as written or recorded, on a torch device."""
    x, y = torch.rand(240, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(240) % 10
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
    with torch.random.fork_rng():
        whole = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    objects = {
        "data": (x, y),
        "models": [lambda shape: copy.deepcopy(backbone), whole],
        "partition": torch.arange(240) % 4,
    }
    settings = {"rounds": 3, "lr": 0.05, "device": torch.device("cuda"), "progress": False}
    one, other = (
        pluribus.run("fedgh", **objects, **settings, capture=capture, stack=False, out=new_folder())
        for capture in (True, False)
    )
    assert reasons(one) == []
    assert_same(one, other)
    assert one.model(1).head.weight.device.type == "cpu"
    stacked = pluribus.run("fedgh", **objects, **settings)
    assert (stacked.folder, reasons(stacked)) == (None, [])


def test_it_repeats():
    assert_same(captured("fedl2g-f"), captured("fedl2g-f"))


@pytest.mark.parametrize("name", ["fedgh", "fedtgp", "fedgen", "pfedla", "pfedpg"])
def test_a_stopped_run_resumes_to_the_same_bits(name, tmp_path):
    case = case_of(name).but(device="cuda", rounds=4, momentum=0.9)
    with pytest.raises(StoppedError):
        pluribus.run(name, progress=False, out=str(tmp_path / "run"), observers=[StopAfter(1)], **case.settings)
    assert_same(pluribus.resume(tmp_path / "run", progress=False), case.run())


# ---- the server ------------------------------------------------------------------------------------------------------

FEW_ANSWER = {"clients": 8, "rounds": 6, "participation": 0.7, "straggler_rate": 0.4}


@pytest.fixture
def replays(monkeypatch) -> list[str]:
    """What the server records and replays."""
    seen: list[str] = []
    record = Recorder.record

    def watched(recorder, step, pool):
        play = record(recorder, step, pool)
        seen.append("record")
        return lambda: (seen.append("replay"), play())

    monkeypatch.setattr(Recorder, "record", watched)
    return seen


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedtgp", {}),
        ("fedtgp", FEW_ANSWER | {"server_epochs": 8, "server_batch": 7}),
        ("fedtgp", FEW_ANSWER | {"partition": "pathological", "classes_per_client": 2}),
        ("fedgen", {}),
        ("fedgen", FEW_ANSWER | {"generator_steps": 9}),
        ("feddf", {}),
        ("feddf", FEW_ANSWER | {"server_steps": 9}),  # recorded steps read the learning rate of the moment
    ],
    ids=str,
)
def test_steps_of_the_server_leave_the_bits_of_steps_as_written(name, settings, replays):
    replayed = captured(name, **settings)
    assert reasons(replayed) == []
    assert replays.count("replay") > replays.count("record") > 0
    if settings:
        assert len({record["answered"] for record in replayed.history}) > 1
    del replays[:]
    assert_same(as_written(name, **settings), replayed)
    assert replays == []


@pytest.mark.parametrize("name", ["fedtgp", "fedgen", "feddf", "pfedla", "pfedpg"])
def test_what_the_server_trains_is_on_the_gpu_and_its_checkpoints_are_not(name, monkeypatch):
    devices: set[str] = set()
    begin = Server.begin

    def watched(server, t, now):
        begin(server, t, now)
        devices.update(p.device.type for p in server.state.parameters())

    monkeypatch.setattr(Server, "begin", watched)
    result = captured(name, rounds=2)
    assert devices == {"cuda"}
    saved = Checkpoint(result.folder / "state").server()
    assert {value.device.type for value in saved.values()} == {"cpu"}
    memory = pluribus.run(name, progress=False, **case_of(name).but(device="cuda", rounds=2).settings)
    assert memory.model(0, round="last") is not None


@dataclass(frozen=True)
class ServerPeeks(FedTGP):
    """The server looks at a number in mid-step."""

    def contrast(self, server: Server, batch: Batch) -> Tensor:
        loss = super().contrast(server, batch)
        return loss * 2 if loss.item() > 1 else loss


@dataclass(frozen=True)
class ServerDices(FedTGP):
    """The server draws from the device's generator."""

    def contrast(self, server: Server, batch: Batch) -> Tensor:
        return super().contrast(server, batch._replace(x=F.dropout(batch.x, 0.1)))


@dataclass(frozen=True)
class ServerAsks(FedTGP):
    """The server reads what differs between rounds."""

    def contrast(self, server: Server, batch: Batch) -> Tensor:
        return super().contrast(server, batch) / (server.t + 1)


@pytest.mark.parametrize(
    ("method", "why"), [(ServerPeeks, "value"), (ServerDices, "random numbers"), (ServerAsks, "server.t")]
)
def test_a_loss_of_the_server_that_cannot_be_captured_runs_as_written_and_says_why(method, why):
    settings = {"device": "cuda", "rounds": 3, "clients": 4, "progress": False, "lr": 0.05}
    first = pluribus.run(method(server_epochs=4), out=new_folder(), **settings)
    (reason,) = reasons(first)
    assert why in reason
    assert_same(first, pluribus.run(method(server_epochs=4), out=new_folder(), capture=False, **settings))


@pytest.mark.parametrize("more", [{}, {"augment": "crop,flip,erase"}, {"clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["local", "fedgh", "fedavg", "fedprox", "fd", "fedproto", "fedrep"])
def test_stacked_clients_train_as_alone(name, more):
    settings = {"clients": 9, "models": "cnn-16-32", "momentum": 0.9, "precision": "float32", "min_samples": 4, **more}
    alone, stacked = captured(name, **settings), run(name, device="cuda", rounds=4, **settings)
    assert reasons(stacked) == []
    one, other = (Checkpoint(result.folder / "state") for result in (alone, stacked))
    for k in range(9):
        for part, value in one.client(k).items():
            torch.testing.assert_close(other.client(k)[part], value, rtol=1e-3, atol=1e-4)


def test_what_ran_as_written_for_one_client_is_recorded_at_once_for_others(monkeypatch):
    """Six clients of two architectures, with equal numbers of rows, try out a step once per architecture."""
    tried = []

    def count(self, client, *rest, as_written=Captured._step_as_written):
        tried.append(client.card.model)
        return as_written(self, client, *rest)

    monkeypatch.setattr(Captured, "_step_as_written", count)
    data = {"data": (torch.rand(360, 1, 8, 8), torch.arange(360) % 10), "partition": torch.arange(360) % 6}
    settings = {"models": ["cnn-16-32", "mlp-64"], "batch_size": 9, "test_fraction": 0.25, "val_fraction": 0.0}
    result = pluribus.run("local", **data, **settings, device="cuda", rounds=2, stack=False, progress=False)
    assert reasons(result) == []
    assert sorted(tried) == ["cnn-16-32", "mlp-64"]


@dataclass(frozen=True)
class Peeks(Method):
    """Looks at a number in mid-step."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        loss = super().loss(client, batch)
        return loss * 2 if loss.item() > 1 else loss


@dataclass(frozen=True)
class Dices(Method):
    """Draws from the device's generator."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return F.cross_entropy(F.dropout(client.model(batch.x), 0.5), batch.y)


@dataclass(frozen=True)
class Asks(Method):
    """Reads what differs between clients of one architecture."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return super().loss(client, batch) / client.card.samples


@pytest.mark.parametrize(("method", "why"), [(Peeks, ""), (Dices, "random numbers"), (Asks, "client.card.samples")])
def test_what_cannot_be_captured_runs_as_written_and_says_why(method, why):
    settings = {"device": "cuda", "rounds": 3, "clients": 4, "progress": False}
    first, again = (pluribus.run(method, out=new_folder(), **settings) for _ in range(2))
    (reason,) = reasons(first)
    assert why in reason
    assert_same(first, again)
    assert_same(first, pluribus.run(method, out=new_folder(), capture=False, **settings))
