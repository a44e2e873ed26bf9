"""Settings: the same names and defaults in Python, in TOML and on the command line, each held to its type."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest

import pluribus
from conftest import few_digits, new_folder, suiting, tiny
from pluribus.assembly import assemble
from pluribus.cli import main
from pluribus.errors import OTHER_NAMES, FormatError, UnknownNameError
from pluribus.experiment import SETTINGS, Experiment, experiment, from_toml, known_settings
from pluribus.method import Method, Need, methods
from pluribus.methods.fedgh import FedGH
from pluribus.settings import flag_name
from pluribus.storage.toml import to_toml
from pluribus.study.plan import describe_rows
from pluribus.study.rows import to_rows
from refusals import Kind, refused


@dataclasses.dataclass(frozen=True)
class Options(Method):
    """A method with a hyper-parameter of every kind."""

    number: float = 0.5
    whole: int = 1
    maybe: int | None = None
    choice: Literal["a", "b"] = "a"
    truth: bool = False
    sizes: tuple[int, ...] = (1, 2)
    name: str = "x"
    table: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Enlarging(Method):
    """A method whose defaults suit data of its own."""

    defaults = MappingProxyType({"image_size": 16, "partition": "iid", "rounds": 3})


@dataclasses.dataclass(frozen=True)
class Embedded(Method):
    """A method that needs another rate on the embedded data and models than its paper has."""

    defaults = MappingProxyType({"rounds": 3, "rate": 10.0})

    rate: float = 0.1
    """Of something."""


# ---- one set of names and defaults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", methods())
def test_python_and_the_command_line_describe_the_same_run(method: str) -> None:
    settings = tiny(**suiting(method, data=few_digits(80), rounds=1, clients=2))
    if method.endswith("-matched"):
        settings["matched_batch"] = 10**6  # one round pays for a model
    told = pluribus.run(method, progress=False, out=new_folder(), **settings).folder
    typed = new_folder()
    flags = [word for name, value in settings.items() for word in (flag_name(name), str(value))]
    assert main(["run", method, "--out", typed, *flags, "--json"]) == 0
    assert (told / "config.toml").read_text() == (Path(typed) / "config.toml").read_text()
    assert experiment(method, told / "config.toml").settings() == experiment(method, **settings).settings()


# ---- a method's defaults and the user's data -------------------------------------------------------------------------


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("method", methods())
def test_a_methods_defaults_leave_named_data_alone(method: str, tmp_path: Path) -> None:
    """All but public rows, where the method needs some, and a partition that follows the data."""
    usual, needs = Experiment(), methods()[method].needs
    config = written(tmp_path / "own.toml", 'data = "digits"')
    for described in (experiment(method, data="digits"), experiment(method, config)):
        for name in SETTINGS["data"]:
            value = getattr(described, name)
            if name == "public_fraction" and Need.PUBLIC_DATA in needs:
                continue
            assert value in (getattr(usual, name), "auto" if name == "partition" else None), name
    assert experiment(method, written(tmp_path / "short.toml", "rounds = 3")).data == experiment(method).data


def test_hyper_parameters_for_the_embedded_data_and_models_hold_where_neither_is_named(tmp_path: Path) -> None:
    own = "test_experiment.Embedded"

    def rate(*args: Any, **settings: Any) -> Any:
        return experiment(*args, **settings).settings()["hyper"]["rate"]

    assert rate(own) == rate(Embedded) == rate(own, rounds=2, clients=3) == 10
    assert rate(own, data="digits") == rate(own, models="mlp-64") == 0.1
    assert rate(own, rate=2.0) == 2
    assert rate(Embedded()) == 0.1  # an instance is as it was made
    config = tmp_path / "config.toml"
    for written, expected in (("", 10), ("models = 'small'\n", 0.1), ("[hyper]\nrate = 3.0\n", 3)):
        config.write_text(f"method = '{own}'\nrounds = 1\n{written}")
        assert rate(None, config) == expected
    written = to_toml(experiment(own).settings() | {"rounds": 1})
    config.write_text(written)
    assert rate(None, config) == 10  # as the run had it, though the file names its data


def test_the_command_line_shows_which_of_them_holds(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in (([], "10.0"), (["--models", "mlp-64"], "0.1"), (["--data=digits"], "0.1")):
        with pytest.raises(SystemExit):
            main(["run", "test_experiment.Embedded", *flags, "--help"])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "--rate" in line]
        assert f"default: {expected}" in line


def test_a_comparison_and_another_method_beside_have_them_too(tmp_path: Path) -> None:
    own = "test_experiment.Embedded"
    for settings, expected in (({}, 10), ({"data": "digits"}, 0.1), ({"models": "mlp-64"}, 0.1)):
        assert describe_rows(to_rows(["local", own]), None, {}, settings)[own].build_method().rate == expected
    assert describe_rows(to_rows([own]), None, {own: {"rate": 4.0}}, {})[own].build_method().rate == 4
    assert describe_rows(to_rows([Embedded()]), None, {}, {})[own].build_method().rate == 0.1
    out, small = tmp_path / "run", ["--rounds", "1", "--clients", "2", "--threads", "1", "--json"]
    for named, expected in (([], 10), (["--models", "mlp-64"], 0.1)):
        folder = out.with_name(f"run-{expected}")
        assert main(["run", "local", "--against", own, *small, *named, "--out", str(folder)]) == 0
        assert experiment(None, f"{folder}-{own}/config.toml").hyper["rate"] == expected


def test_a_method_of_ones_own_neither(tmp_path: Path) -> None:
    assert experiment(Enlarging).image_size == 16
    assert experiment(Enlarging).partition == "iid"
    named = experiment(Enlarging, data="digits")
    assert (named.image_size, named.partition, named.rounds) == (None, "dirichlet", 3)
    assert experiment(Enlarging, data="digits", image_size=12).image_size == 12


@pytest.mark.parametrize("method", ["fedfree", "fedhpl", "pfedpg"])
def test_images_of_the_users_keep_their_size(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert assemble(experiment(method, clients=2)).task.shape == (1, 16, 16)
    models = "mlp-64" if method == "fedfree" else "tiny-cnn-64"
    hyper = {"global_model": "mlp-64"} if method == "fedfree" else {"padding": 1} if method == "fedhpl" else {}
    if method != "pfedpg":  # it has transformers alone
        parts = assemble(experiment(method, data=few_digits(), models=models, clients=2, **hyper))
        assert parts.task.shape == (1, 8, 8)
    assert main(["run", method, "--data", few_digits(), "--clients", "2"]) == 2
    said = capsys.readouterr()
    assert "--image-size" in said.out + said.err
    assert "8x8" in said.out + said.err


def test_a_comparison_says_which_size_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fedhpl", "--models", "tiny", "--out", new_folder()]) == 2
    said = capsys.readouterr()
    assert "--image-size 16" in said.out + said.err


def test_without_anything_it_is_fedgh_on_digits() -> None:
    described = experiment(None)
    assert described == Experiment()
    assert (described.method, described.data, described.clients, described.rounds) == ("fedgh", "digits", 8, 20)


def test_the_nearest_source_wins(tmp_path: Path) -> None:
    """The method's own defaults, then the file, then what is said."""
    file = tmp_path / "settings.toml"
    file.write_text('method = "fedavg"\nrounds = 3\nclients = 5\n')
    described = experiment(None, file, clients=6)
    assert (described.method, described.models) == ("fedavg", "cnn-16")
    assert (described.rounds, described.clients, described.batch_size) == (3, 6, 10)
    file.write_text('models = "mlp-64"\n')
    assert experiment("fedavg", file).models == "mlp-64"
    assert experiment("fedavg", file, models="lenet").models == "lenet"


def test_hyper_parameters_stay_with_their_method(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('method = "fedgh"\n[hyper]\nserver_lr = 0.5\nserver_step = "client"\n')
    assert experiment(None, file).build_method() == FedGH(0.5, "client")
    assert experiment("fedgh", file, server_lr=0.25).build_method() == FedGH(0.25, "client")
    assert experiment("fedgh", file, hyper={"server_lr": 0.25}).build_method() == FedGH(0.25, "client")
    assert experiment(FedGH(server_lr=0.125)).build_method() == FedGH(0.125)
    assert experiment(FedGH(server_lr=0.125), server_step="client").build_method() == FedGH(0.125, "client")
    assert experiment("local", file).hyper == {}
    assert experiment("local", file, lr=0.5).lr == 0.5


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name", "nearest"),
    [
        ({"client": 4}, "client", ["clients"]),
        ({"serverlr": 4}, "serverlr", ["server_lr"]),
        ({"learning_rate": 0.1}, "learning_rate", ["lr"]),
        ({"folder": "runs/a"}, "folder", ["out"]),
        ({"num_clients": 4}, "num_clients", ["clients"]),
        ({"Rounds": 4}, "Rounds", ["rounds"]),
        ({"xyz": 4}, "xyz", []),
        ({"hyper": {"server_l": 1}}, "server_l", ["server_lr"]),
    ],
)
def test_a_name_that_means_nothing_gets_the_nearest_one(
    settings: dict[str, Any], name: str, nearest: list[str]
) -> None:
    with refused(UnknownNameError, "pluribus run fedgh --help") as refusal:
        experiment("fedgh", **settings).build_method()
    assert re.findall(r"'(\w+)'", str(refusal.value)) == [name, *nearest]


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("lr", 1, 1.0),
        ("lr", np.float32(0.5), 0.5),
        ("clients", np.int64(4), 4),
        ("data", Path("some/digits.npz"), "some/digits.npz"),
        ("out", Path("runs/mine"), "runs/mine"),
        ("width", None, None),
        ("alpha", 1, 1.0),
        ("unequal", True, True),
        ("test", "official", "official"),
        ("models", ("mlp-64", "cnn-16"), ("mlp-64", "cnn-16")),
    ],
)
def test_values_are_kept_in_the_type_of_their_setting(name: str, given: object, kept: object) -> None:
    value = getattr(Experiment(**{name: given}), name)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("clients", 4.0, "whole number"),
        ("clients", "4", "whole number"),
        ("clients", True, "whole number"),
        ("clients", None, "whole number"),
        ("width", "64", "whole number"),
        ("lr", "fast", "number"),
        ("lr", True, "number"),
        ("alpha", [1], "number"),
        ("unequal", 1, "true or false"),
        ("data", 5, "arrays"),
        ("partition", 0.5, "client number"),
        ("test", 1, "own, official, common"),
        ("models", 5, "names"),
        ("hyper", [1], "table"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, given: object, wanted: str) -> None:
    with refused(FormatError, f"--{name}", repr(given), wanted):
        Experiment(**{name: given})  # type: ignore[arg-type]


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with refused(UnknownNameError, "--optimizer", "'sdg'", "sgd, adam, amsgrad, adamw"):
        Experiment(optimizer="sdg")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given", "kind", "wanted"),
    [
        ("number", "x", FormatError, "number"),
        ("whole", 1.5, FormatError, "whole number"),
        ("maybe", "x", FormatError, "whole number"),
        ("choice", "c", UnknownNameError, "a, b"),
        ("truth", 0, FormatError, "true or false"),
        ("sizes", 3, FormatError, "list"),
        ("name", 3, FormatError, "text"),
        ("table", 3, FormatError, "table"),
    ],
)
def test_hyper_parameters_are_held_to_their_types(name: str, given: object, kind: Kind, wanted: str) -> None:
    with refused(kind, f"--{name}", repr(given), wanted):
        experiment(Options, **{name: given}).build_method()


def test_hyper_parameters_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    method = Options(1e-05, 3, 4, "b", True, (5, 6, 7), 'a "name"\n', {"é": 0.5})
    file = tmp_path / "config.toml"
    file.write_text(to_toml(experiment(method).settings()))
    assert experiment(None, file).build_method() == method
    assert experiment(Options).build_method() == Options()


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "written"),
    [
        ("mlp-64,cnn-16", "mlp-64,cnn-16"),
        (["mlp-64", "cnn-16"], ["mlp-64", "cnn-16"]),
        (("mlp-64", "cnn-16"), ["mlp-64", "cnn-16"]),
        ({0: "mlp-64", 1: "cnn-16", 2: "mlp-64"}, {0: "mlp-64", 1: "cnn-16", 2: "mlp-64"}),
    ],
)
def test_models_of_every_form_survive_a_file(
    tmp_path: Path, models: str | list[str] | dict[int, str], written: object
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(experiment("local", models=models, clients=3, data=few_digits()).settings()))
    assert from_toml(file)["models"] == written


def test_an_experiment_does_not_change_with_what_it_was_made_of() -> None:
    hyper = {"server_lr": 0.5}
    described = Experiment(hyper=hyper)
    hyper["server_lr"] = 0.25
    assert described.build_method() == FedGH(0.5)


@pytest.mark.parametrize(("data", "kind"), [("digits", "dirichlet"), ("rotated-digits", "domain")])
def test_a_partition_by_what_the_data_set_has(data: str, kind: str) -> None:
    parts = assemble(experiment("ind", data=data))
    assert parts.manifest.kind == kind
    assert bool(parts.task.exams) == (kind == "domain")


def test_no_other_name_is_that_of_a_setting_and_each_leads_to_one() -> None:
    """Another name that is a setting itself would never be looked up; one that leads nowhere would help nobody."""
    here = {*known_settings(), "server_lr", "seeds", "jobs", "trials"}  # of FedGH, of compare and of tune
    assert set(OTHER_NAMES.values()) <= here
    assert not here & OTHER_NAMES.keys()


def test_a_file_may_have_another_name_for_a_setting(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("learning_rate = 0.1\n")
    with refused(UnknownNameError, "'learning_rate'", "'lr'"):
        experiment("fedgh", tmp_path / "one.toml")
