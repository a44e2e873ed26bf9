"""Objects in place of names: data, models, partitions and devices from Python, and runs without a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_api import Watcher, outcome
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import pluribus
from conftest import run_tiny, tiny
from pluribus.assembly import assemble
from pluribus.data import load
from pluribus.data.given import as_dataset
from pluribus.errors import (
    ConflictError,
    DataError,
    FormatError,
    MismatchError,
    MissingSettingError,
    OtherRunError,
    PartitionError,
    PluribusError,
    UnknownNameError,
    UserCodeError,
)
from pluribus.experiment import experiment, repeat
from pluribus.models import build
from refusals import refused

ROWS = 320
DIGITS = load("digits")
X, Y = DIGITS.x[:ROWS, 0].numpy(), DIGITS.y[:ROWS].numpy()
SHAPE = (1, 8, 8)


def plain(**settings: Any) -> dict[str, Any]:
    return tiny(data=(X, Y), **settings)


def backbone(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())


class Net(nn.Module):
    """A classifier as a user of PyTorch writes it."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU())
        self.fc = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def make(model: Any, classes: int = 10, **settings: Any) -> pluribus.TwoPartModel:
    own = experiment("local", models=[model]).models[0]
    return build(own, shape=SHAPE, classes=classes, **settings)


# ---- data ------------------------------------------------------------------------------------------------------------


class Rows(TorchDataset[tuple[Any, Any]]):
    """A torch Dataset with names of classes."""

    classes = ("even", "odd")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.x[row], self.y[row]


def test_the_digits_are_those_of_sklearn() -> None:
    from sklearn.datasets import load_digits  # here, because its import takes a second in every process of the tests

    given = load_digits()
    assert torch.equal(DIGITS.x[:, 0], torch.from_numpy(np.rint(given.images * (255 / 16)).astype(np.uint8)))
    assert torch.equal(DIGITS.y, torch.from_numpy(given.target))


def test_arrays_give_the_run_of_their_file() -> None:
    by_name, by_object = run_tiny("fedgh"), run_tiny("fedgh", data=(X, Y))
    assert outcome(by_object.folder) == outcome(by_name.folder)
    assert by_object.data == "data"


@pytest.mark.parametrize(
    "data",
    [
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X[:, None], list(Y)),
        (X[..., None], Y),
        (X.astype(np.int64), Y.astype(np.uint8)),
        pluribus.Dataset("mine", torch.from_numpy(X)[:, None], torch.from_numpy(Y), tuple("0123456789")),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        lambda: (X, Y),
    ],
    ids=["tensors", "channels first", "channels last", "integers", "a Dataset", "a torch Dataset", "a function"],
)
def test_forms_of_one_data_set(data: Any) -> None:
    found = load(experiment("local", data=data).data)
    assert found.x.dtype == torch.uint8
    assert torch.equal(found.x[:, 0], torch.from_numpy(X))
    assert torch.equal(found.y, torch.from_numpy(Y))
    assert found.classes == tuple("0123456789")


def test_floating_point_numbers_stay_as_they_are() -> None:
    x = torch.rand(6, 3, 4, 5)
    found = as_dataset((x.double().numpy(), [7, 7, 3, 3, 7, 3]))
    assert torch.equal(found.x, x)
    assert (found.classes, found.y.tolist()) == (("3", "7"), [1, 1, 0, 0, 1, 0])
    assert "float64" in found.notes[0]
    parts = assemble(experiment("local", **tiny(data=(x.repeat(40, 1, 1, 1), [0, 1] * 120), models=[nn.Flatten()])))
    assert torch.equal(parts.data.store.take(torch.tensor([3]))[0], x[3:4])


def test_a_torch_dataset_names_its_classes() -> None:
    found = as_dataset(Rows(X, Y % 2))
    assert (found.name, found.classes, found.y[:4].tolist()) == ("Rows", ("even", "odd"), [0, 1, 0, 1])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("data", "kind", "facts"),
    [
        ((X, Y[:-1]), DataError, (320, 319)),
        ((X, Y + 0.5), DataError, ("y ", "float64")),
        ((X, [*"0123456789"[:9], None] * 32), DataError, ("y ", "row 9")),
        ((X, np.eye(10, dtype=int)[Y]), DataError, ("y ", "(320, 10)", "argmax")),
        ((DIGITS.x.view(-1, 64).long().numpy(), DIGITS.y.numpy()), DataError, ("x ", "(1797, 64)", "tokens", "kind")),
        ((X.astype(int) * 2, Y), DataError, ("x ", "int64")),
        ((np.where(X > 250, np.nan, X), Y), DataError, ("x ", "NaN", "row ")),
        ((np.array(["a", "b"]), [0, 1]), DataError, ("x ",)),
        ((X, Y, Y), FormatError, ("--data", "(x, y)")),
        (3.5, FormatError, ("--data", "3.5")),
        (Endless(), DataError, ("Endless", "length")),
        (Rows(X, [None] * 9), DataError, ("y ",)),
        (Rows([X[0], X[0, :4]], [0, 1]), DataError, ("row 1", "(4, 8)", "(8, 8)")),
        (Rows([], []), DataError, ("Rows", "empty")),
        ((X, np.zeros(ROWS, int)), DataError, ("classes", 1)),
        (lambda: 3, UserCodeError, ("lambda", "int")),
    ],
)
def test_bad_data_is_refused(data: Any, kind: type[PluribusError], facts: tuple[object, ...], tmp_path: Path) -> None:
    with refused(kind, *facts):
        pluribus.run("local", **tiny(data=data, out=tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


# ---- partitions ------------------------------------------------------------------------------------------------------


def halves(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    return np.array_split(np.arange(len(labels)), clients)


NUMBERS = np.repeat([0, 1, 2], [100, 100, 120])


@pytest.mark.parametrize(
    "partition",
    [
        NUMBERS,
        NUMBERS.tolist(),
        [np.flatnonzero(k == NUMBERS) for k in range(3)],
        {k: np.flatnonzero(k == NUMBERS).tolist() for k in range(3)},
        lambda labels, clients, rng: NUMBERS,
    ],
    ids=["numbers", "a list of numbers", "rows", "rows by client", "a function"],
)
def test_a_partition_says_who_holds_what(partition: Any) -> None:
    settings = plain(partition=partition)
    settings.pop("clients")
    parts = assemble(experiment("local", **settings, **({"clients": 3} if callable(partition) else {})))
    assert [sorted(part.tolist()) for part in parts.data.parts] == [
        list(range(100)),
        list(range(100, 200)),
        list(range(200, 320)),
    ]


def test_rows_without_an_owner_and_a_test_set_for_all() -> None:
    numbers = np.where(np.arange(ROWS) < 20, -1, np.arange(ROWS) % 4)
    parts = assemble(experiment("local", **plain(partition=numbers)))
    assert any("20 of 320" in note for note in parts.warnings)
    common = assemble(experiment("local", **plain(partition=numbers, test="common")))
    tested = common.data.rows(0)["test"].numpy()
    for k, part in enumerate(common.data.parts):
        assert set(part) == set(np.flatnonzero(numbers == k)) - set(tested)
    with refused(PartitionError, "test set"):
        assemble(experiment("local", **plain(partition=[np.arange(k, ROWS, 4) for k in range(4)], test="common")))


def test_a_registered_partition_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from pluribus.data import PARTITIONS

    with monkeypatch.context() as patch:
        patch.delitem(PARTITIONS, "halves", raising=False)
        assert pluribus.register_partition("halves", "in the order of rows")(halves) is halves
        parts = assemble(experiment("local", **plain(partition="halves", clients=2)))
        assert [len(part) for part in parts.data.parts] == [160, 160]
        assert parts.manifest.kind == "halves"
        PARTITIONS.pop("halves")
    with refused(UserCodeError, "'iid'"):
        pluribus.register_partition("iid", "another")(halves)


def test_a_function_that_can_be_imported_is_named_by_its_path() -> None:
    described = experiment("local", data=few, partition=halves, models=[backbone, Net])
    assert (described.data, described.partition) == ("test_objects.few", "test_objects.halves")
    assert described.models == ("test_objects.backbone", "test_objects.Net")


def few() -> tuple[np.ndarray, np.ndarray]:
    return X, Y


@pytest.mark.parametrize(
    ("partition", "kind", "facts"),
    [
        (np.repeat([0, 2], 160), PartitionError, ("client 1",)),
        (np.zeros(300, int), PartitionError, (300, 320)),
        (np.full(ROWS, -2), PartitionError, (-2,)),
        ([[0, 1], [2, 320]], PartitionError, (320, "client 1", 319)),
        ([[0, 1, 1], [2, 3]], PartitionError, ("client 0", "twice")),
        ([[0, 1], []], PartitionError, ("client 1",)),
        ({0: [1, 2], 2: [3, 4]}, PartitionError, ("client 1",)),
        ([[0.5, 1.0]], FormatError, ("--partition",)),
        (lambda labels, clients, rng: 3, UserCodeError, ("lambda", "int")),
        ("halvse", UnknownNameError, ("halvse",)),
    ],
)
def test_bad_partitions_are_refused(partition: Any, kind: type[PluribusError], facts: tuple[object, ...]) -> None:
    settings = plain(partition=partition)
    settings.pop("clients")
    with refused(kind, *facts):
        assemble(experiment("local", **settings))


def test_a_comparison_has_the_clients_of_its_partition() -> None:
    settings = plain(partition=NUMBERS, rounds=1)
    settings.pop("clients")
    found = pluribus.compare(["local"], **settings, seeds=1, progress=False, jobs=1)
    assert found.to_json()["clients"] == 3


def test_a_partition_for_other_clients_is_refused() -> None:
    with refused(ConflictError, "--clients", 3, 4):
        experiment("local", **plain(partition=NUMBERS))


# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_classifier_is_split_at_its_last_linear_layer() -> None:
    module = Net()
    made = make(module)
    assert isinstance(made.head, nn.Linear)
    assert (made.width, made.head.out_features) == (24, 10)
    x = torch.rand(3, *SHAPE)
    assert torch.equal(made(x), module(x))
    assert made.head.weight is not module.fc.weight  # a copy
    made.head.weight.data.zero_()
    assert module.fc.weight.any()


def test_a_run_says_where_it_split_a_classifier() -> None:
    parts = assemble(experiment("local", **plain(models=[Net(), "mlp-64"])))
    assert any("Net" in note and "'fc'" in note for note in parts.warnings)
    wide = assemble(experiment("fedgh", **plain(models=[Net(), "mlp-64"])))
    assert wide.task.width == 24
    assert {card.width for card in wide.cards.values()} == {24}
    assert any("24" in note and "--width" in note for note in wide.warnings)
    assert any("new head" in note for note in assemble(experiment("fedgh", **plain(models=[Net()], width=8))).warnings)


def asks(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def takes_anything(**kwargs: int) -> nn.Module:
    return Net(kwargs["num_classes"])


@pytest.mark.parametrize(
    ("model", "width", "classes"),
    [
        (backbone, 16, 5),
        (Net, 24, 5),
        (asks, 64, 5),
        (takes_anything, 24, 5),
        (lambda: backbone(SHAPE), 16, 5),
        (lambda in_channels, num_classes: Net(num_classes + in_channels - 1), 24, 5),
        (lambda shape, classes: pluribus.TwoPartModel(backbone(shape), nn.Linear(16, classes), 16), 16, 5),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU()), 7, 5),
        ("timm:test_resnet", 96, 5),
        ("timm:test_vit", 64, 5),
    ],
)
def test_what_a_model_may_be(model: Any, width: int, classes: int) -> None:
    shape = (1, 160, 160) if isinstance(model, str) else SHAPE
    own = experiment("local", models=model).models
    made = build(own if isinstance(own, str) else own[0], shape=shape, classes=classes)
    assert made.width == width
    assert made(torch.rand(2, *shape)).shape == (2, classes)


def test_a_registered_builder_may_ask_for_the_classes() -> None:
    pluribus.register_model("asks", "one linear layer")(asks)
    assert build("asks", shape=SHAPE, classes=5).width == 64


def test_a_module_is_looked_at_again_after_a_change() -> None:
    module = Net()
    assert make(module).width == 24
    module.body, module.fc = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, 10)
    assert make(module).width == 8
    module.fc = nn.Sequential(nn.ReLU())
    assert make(module).head.in_features == 8


def test_a_layer_by_name_is_the_head() -> None:
    two = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sequential(nn.ReLU(), nn.Linear(24, 10)))
    assert make(two).width == 24
    named = make(two, split="fc,2")
    assert isinstance(named.head, nn.Sequential)
    assert len(named.head) == 2
    features = make(Net(64), split="none")
    assert features.width == 64
    with refused(MismatchError, "--split", "neck"):
        make(two, split="neck")
    with refused(MismatchError, "--split", "1"):
        make(two, split="1")


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = Net(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.net(x))


@pytest.mark.parametrize(
    ("model", "kind", "facts"),
    [
        (Wrapped(lambda x: {"logits": x}), UserCodeError, ("Wrapped", "dict", "['logits']")),
        (Wrapped(lambda x: (x, x)), UserCodeError, ("Wrapped", "tuple", "[0]")),
        (Net(7), MismatchError, ("Net", 7, 10, "--split none")),
        (lambda k: "cnn-16", UserCodeError, ("lambda", "str", "list")),
        (lambda depth, width: backbone(SHAPE), UserCodeError, ("lambda", "width")),
        (nn.Conv2d(1, 4, 3), MismatchError, ("Conv2d", "flat vector")),
        (nn.Conv2d(3, 4, 3), MismatchError, ("Conv2d", "1x8x8")),
        ("timm:resnet10", UnknownNameError, ("resnet10", "resnet10t")),
        ([], MissingSettingError, ("models",)),
        ([3], FormatError, ("--models", "3")),
        ({"a": "cnn-16"}, FormatError, ("--models", "'a'")),
    ],
)
def test_bad_models_are_refused(model: Any, kind: type[PluribusError], facts: tuple[object, ...]) -> None:
    with refused(kind, *facts):
        assemble(experiment("local", **plain(models=model)))


def test_objects_of_one_name_are_told_apart() -> None:
    first, second = Net(), Net()
    described = experiment("local", models=[first, second, first, "mlp-64"])
    assert described.settings()["models"] == ["given:Net", "given:Net-2", "given:Net", "mlp-64"]


def test_a_device_may_be_an_object() -> None:
    assert assemble(experiment("local", **plain() | {"device": torch.device("cpu")})).device == torch.device("cpu")


# ---- runs without a folder, and again --------------------------------------------------------------------------------


def test_a_run_without_a_folder_has_the_numbers_of_one_with_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = plain(models=[backbone, Net()], rounds=3, width=16)
    memory = pluribus.run("fedgh", **settings, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert memory.folder is None
    assert memory.to_json()["folder"] is None
    folder = pluribus.run("fedgh", **settings, progress=False, out="run")
    for name in ("summary", "bytes"):
        assert getattr(memory, name) == getattr(folder, name)
    for round in ("selected", "last"):
        ours, theirs = (one.model(1, round).state_dict() for one in (memory, folder))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with refused(MissingSettingError, "--out"):
        pluribus.run("fedgh", **settings, track="tensorboard")


def test_a_run_with_objects_is_resumed_with_the_same_objects(tmp_path: Path) -> None:
    def mine(shape: tuple[int, int, int]) -> nn.Module:  # no path leads to a local function
        return backbone(shape)

    objects = {"data": (X, Y), "models": [mine, "mlp-64"], "partition": np.arange(ROWS) % 4}
    settings = tiny(**objects, width=16, rounds=3, checkpoint_every=1)
    whole = pluribus.run("fedgh", **settings, out=tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        pluribus.run("fedgh", **settings, out=tmp_path / "part", progress=False, observers=[Watcher(stop_after=1)])
    with refused(MissingSettingError, "data and models and partition", "pluribus.resume"):
        pluribus.resume(tmp_path / "part", progress=False)
    with refused(OtherRunError, "part ", "other data"):
        pluribus.resume(tmp_path / "part", progress=False, **objects | {"data": (255 - X, Y)})
    pluribus.resume(tmp_path / "part", progress=False, **objects)
    assert outcome(tmp_path / "part") == outcome(tmp_path / "whole")
    assert pluribus.load_result(tmp_path / "part").clients[0].model == "mine"
    model = pluribus.load_model(tmp_path / "part", 1, **objects)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.model(1).parameters(), strict=True))


@pytest.mark.parametrize("setting", ["data", "models", "partition"])
def test_a_file_does_not_stand_for_an_object(setting: str) -> None:
    with refused(UnknownNameError, "'given:mine'", "again"):
        assemble(experiment("local", **plain() | {setting: "given:mine"}))


def test_a_note_in_python_names_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    pluribus.run("fedgh", **plain(models=[Net(), "mlp-64"], rounds=1))
    assert "width= sets another" in " ".join(capsys.readouterr().err.split())


def test_worker_processes_get_what_can_be_pickled() -> None:
    settings = plain(models=[Net(), backbone])
    alone = pluribus.run("local", **settings, progress=False)
    spread = pluribus.run("local", **settings, workers=2, threads=1, progress=False)
    assert spread.summary == alone.summary
    with refused(UserCodeError, "lambda ", "--workers"):
        pluribus.run("local", **plain(models=[lambda: Net()]), workers=2, progress=False)


def test_what_repeats_a_run_with_objects_is_a_call() -> None:
    described = experiment("local", **plain(models=[Net()], lr=0.5))
    assert repeat("run", described) == (
        "pluribus.run('local', data=..., models=..., clients=4, rounds=2, lr=0.5, device='cpu')"
    )
    assert repeat("run", experiment("local", lr=0.5)) == "pluribus run local --lr 0.5"
    assert len(repr(described)) < 1500


def test_a_report_is_about_results_with_a_folder() -> None:
    memory = pluribus.run("local", **plain(rounds=1), progress=False)
    with refused(MissingSettingError, "local", "--out"):
        pluribus.write_report([memory])


def test_a_notebook_sends_nothing_of_its_own_to_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    own = type("Own", (Net,), {"__module__": "__main__", "__qualname__": "Own"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", own, raising=False)  # pickle finds it, another process does not
    with refused(UserCodeError, "Own ", "notebook", "--workers"):
        assemble(experiment("local", **plain(models=[own()]), workers=2))
