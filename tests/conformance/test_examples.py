"""The examples: the calls and commands in their docstrings are run as they stand, from the root of the repository."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import pluribus
from conftest import run_tiny
from kit import checked_steps
from parties import card_of, client_of, data_of, flat_split, server_of, signs, task_of
from pluribus import Batch, Message, Rows
from pluribus.cli import main
from pluribus.data import load

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples").glob("my_*.py"))
FEW = ["--rounds", "2", "--threads", "1"]


def commands(file: Path) -> list[list[str]]:
    text = file.read_text(encoding="utf-8")
    about = text if file.suffix == ".toml" else ast.get_docstring(ast.parse(text))
    return [shlex.split(line) for line in re.findall(r"^[# ]*    pluribus (.*)$", about, re.MULTILINE)]


def calls(file: Path) -> list[str]:
    about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return re.findall(r"^    (pluribus\..*)$", about, re.MULTILINE)


CALLS = [pytest.param(file, call, id=f"{file.name}: {call}") for file in FILES for call in calls(file)]
ALL = [
    pytest.param(command, id=f"{file.name}: {shlex.join(command)}")
    for file in (*FILES, ROOT / "examples" / "experiment.toml")
    for command in commands(file)
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def method():
    from examples.my_method import PrototypePull

    return PrototypePull(pull=0.5)


def test_every_file_shows_a_command():
    assert [file.stem for file in FILES] == ["my_data", "my_method", "my_model"]
    assert all(commands(file) for file in (*FILES, ROOT / "examples" / "experiment.toml"))
    assert all(calls(file) for file in FILES)


@pytest.mark.parametrize(("file", "call"), CALLS)
def test_the_call_in_the_docstring_runs(file, call):
    names = vars(importlib.import_module(f"examples.{file.stem}")) | {"pluribus": pluribus}
    assert eval(call, names).folder is None


@pytest.mark.parametrize("command", ALL)
def test_the_command_in_the_docstring_runs(command, tmp_path, capsys):
    if "--help" in command:
        with pytest.raises(SystemExit) as exit:
            main(command)
        assert exit.value.code == 0
        assert "lambda: weight of the distance" in " ".join(capsys.readouterr().out.replace("│", " ").split())
        return
    assert main([*command, *FEW, "--out", str(tmp_path / "run")]) == 0
    assert "mean" in capsys.readouterr().out
    assert (tmp_path / "run" / "result.json").exists()


def test_all_three_together_through_python(method, tmp_path):
    from examples.my_data import CORNERS, blobs
    from examples.my_model import tiny_net

    result = pluribus.run(
        method,
        data=blobs,
        models=[tiny_net, "mlp-64"],
        width=64,
        clients=4,
        rounds=4,
        lr=0.05,
        out=str(tmp_path / "run"),
        progress=False,
    )
    assert result.method == "examples.my_method.PrototypePull"
    assert {c.model for c in result.clients.values()} == {"examples.my_model.tiny_net", "mlp-64"}
    assert {name for c in result.clients.values() for name in c.classes} == set(CORNERS)
    assert isinstance(result.model(0).features.backbone, type(tiny_net((1, 8, 8))))
    assert result.accuracy > 0.5  # four classes, so chance is 0.25


def test_the_loss_is_the_equation(method):
    """Cross-entropy of equal scores is log 3; then lambda / (B K) times the squared distances to the known means."""
    model = flat_split(pixels=2, classes=3)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    x, y = signs([[1, 1], [1, -1], [-1, -1]]), [0, 1, 2]
    client = client_of(
        model, data_of(x, y), classes=3, down=method.schema(task_of(3, 2), card_of(0, task_of(3, 2))).down
    )
    batch = Batch(*client.data["train"].take(torch.arange(3)), torch.arange(3), 3)
    torch.testing.assert_close(method.loss(client, batch), torch.tensor(3.0).log())

    shared = Rows(torch.tensor([[1.0, 3.0], [0.0, 0.0], [-1.0, 0.0]]), torch.tensor([True, False, True]))
    client.take(Message({"means": shared}))
    distances = 4 + 0 + 1  # (1,1) to (1,3); class 1 is not known; (-1,-1) to (-1,0)
    torch.testing.assert_close(method.loss(client, batch), torch.tensor(3.0).log() + 0.5 * distances / (3 * 2))


def test_the_server_averages_over_senders_and_keeps_what_nobody_sent(method):
    server = server_of(task_of(classes=3, width=1), samples={0: 10, 1: 30})
    method.setup(server)
    assert not method.download(server, 0).rows("means").held.any()
    for first, second in (((4.0, None), (None, None)), ((None, 2.0), (None, 5.0))):
        method.aggregate(server, {0: upload(*first, None), 1: upload(*second, None)})
    sent = method.download(server, 0).rows("means")
    assert sent.value.tolist() == [[4.0], [3.5], [0.0]]
    assert sent.held.tolist() == [True, True, False]


def upload(*means: float | None) -> Message:
    value = torch.tensor([[mean or 0.0] for mean in means])
    return Message({"means": Rows(value, torch.tensor([mean is not None for mean in means]))})


def test_its_steps_are_pure_tensor_programs(method):
    with checked_steps(method) as checked:
        run_tiny(method)
    assert checked


def test_without_pull_it_is_local_training():
    from examples.my_method import PrototypePull

    pulled, local = run_tiny(PrototypePull(pull=0.0)), run_tiny("local")
    assert [record["clients"] for record in pulled.history] == [record["clients"] for record in local.history]
    assert pulled.bytes["up"] > local.bytes["up"] == 0


def test_wearers_take_the_larger_data_set_where_it_is(tmp_path, monkeypatch, capsys):
    from examples.wearers import choose_data

    monkeypatch.setenv("PLURIBUS_DATA", str(tmp_path))
    assert choose_data() == "watch"
    (tmp_path / "UCI HAR Dataset.zip").touch()
    assert choose_data() == "uci-har"
    assert capsys.readouterr().out.count(str(tmp_path)) == 2


def test_wearers_are_clients_of_five_architectures():
    from examples.wearers import METHODS, compare_methods

    watch = load("watch")
    first = (watch.client < 2) & (watch.time < 6 * watch.span)  # six windows of each recording of two wearers
    few = {name: getattr(watch, name)[first] for name in ("x", "y", "client", "group", "time")}
    data = few | {"kind": "signal", "span": watch.span, "clients": watch.clients[:2]}
    table = compare_methods(data, rounds=1, seeds=1, device="cpu", progress=False)
    assert {method: table.experiments[method].clients for method in METHODS} == dict.fromkeys(METHODS, 2)
