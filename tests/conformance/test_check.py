"""`pluribus check`: it passes what is good, and finds what is broken by the right promise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import mutants
import pluribus
from conftest import new_folder
from pluribus.cli import main
from pluribus.conformance import every_kind
from pluribus.conformance.cases import Case
from pluribus.conformance.clients import runs
from pluribus.conformance.kinds import SAMPLES, few_labels
from pluribus.conformance.methods import PROMISES
from pluribus.conformance.models import usual_input
from pluribus.conformance.report import Line
from pluribus.conformance.targets import find_target
from pluribus.errors import FormatError, UnknownNameError, UserCodeError
from pluribus.inputs import Input
from refusals import refused
from toys import SharedHead

HELD = {one.name: one for one in PROMISES}


def failed(report: pluribus.CheckReport) -> dict[str, Line]:
    return {line.promise: line for line in report.lines if line.status == "failed"}


def check(target: object, **settings: object) -> pluribus.CheckReport:
    return pluribus.check(target, progress=False, **settings)


# ---- methods -------------------------------------------------------------------------------------------------------


def test_a_good_method_passes(monkeypatch):
    """A few promises: the documentation runs the whole check of a method, and `test_conformance.py` each promise."""
    monkeypatch.setattr("pluribus.conformance.methods.PROMISES", PROMISES[:5])
    report = check(SharedHead)
    assert (report.kind, report.target, report.passed) == ("method", "toys.SharedHead", True)
    assert report.lines == tuple(Line(one.name, "passed") for one in PROMISES[:5])


@pytest.mark.parametrize(
    ("mutant", "promise", "facts"),
    [
        (mutants.Unequal, "one schema for all clients of a model", ("'rows' (up)", "mlp-64", "clients 0 and 4")),
        (mutants.Counting, "download is pure", ("'sent' differs by up to 2",)),
        (mutants.Counting, "no answer, no change", ("straggler_rate", "'sent' differs by up to")),
        (mutants.Understated, "no more traffic than it says", ("round 0, client 0", "at most 0")),
        (mutants.Seedless, "another seed, other numbers", ("seeds 0 and 1", "initial weights of client 0 model")),
        (mutants.Undone, "training is kept", ("2 of 4 parameters of client 0", "'model'", "fc1.bias")),
        (mutants.Restarting, "rounds build on each other", ("client 0 model", "initial weights")),
        (mutants.Idle, "the server learns from uploads", ("head.bias",)),
        (mutants.Forgetful, "resumes to the same bits", ("stopped after round 0",)),
        (mutants.Attached, "clients may leave memory", ("'server head.bias' differs by",)),
        (mutants.Ordered, "the order of clients does not matter", ("client 0", "round 0")),
        (mutants.AtHome, "worker processes give the same bits", ("workers=2", "round 1: loss is")),
        (mutants.Noisy, "same seed, same bits", ("global generators", "'server head.")),
        (mutants.Remembering, "same seed, same bits", ("left of one run", "'server head.")),
        (mutants.Watched, "evaluation changes nothing", ("'client 0 state.predicted' differs by up to",)),
        (mutants.Peeking, "steps are pure tensor programs", ("without numbers", "mutants.py, line", "in loss")),
        (mutants.Complete, "absent and late clients", ("round 0, server: KeyError: 1", "mutants.py, line")),
        (mutants.Many, "clients with one class or one sample", ("ZeroDivisionError", "mutants.py, line", "round 0")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_promise_is_found(mutant, promise, facts):
    case = Case(mutant, Path(new_folder()))
    if mutant is not mutants.Unequal:  # a run refuses it
        runs(case)
    line = HELD[promise].check(case)
    assert line.status == "failed"
    assert line.change
    assert line.case.startswith(f'pluribus.run("mutants.{mutant.__name__}",')
    missing = [fact for fact in facts if fact not in line.detail]
    assert not missing, str(line)


@pytest.mark.parametrize(
    ("mutant", "promise", "facts"),
    [
        (mutants.Undeclared, "bytes are as declared", ("round 0, client 0", "'secret'")),
        (mutants.NotANumber, "its numbers are finite", ("client 0", "NaN")),
        (mutants.Raising, "runs to the end", ("round 0, server: KeyError: 'head'", "mutants.py, line")),
    ],
)
def test_what_does_not_run_has_one_line_that_says_why(mutant, promise, facts):
    report = check(mutant)
    assert not report.passed
    assert list(failed(report)) == [promise]
    assert {line.status for line in report.lines} == {"failed", "skipped"}
    line = failed(report)[promise]
    missing = [fact for fact in facts if fact not in line.detail]
    assert not missing, str(line)
    assert "clients=2, rounds=1" in " ".join(line.case.split()) or mutant is mutants.NotANumber


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [(mutants.Brightened, {"tokens"}), (mutants.Classified, {"numbers to predict"})],
)
def test_rows_and_targets_that_a_method_cannot_work_with_are_found(mutant, broken):
    case, lines = Case(mutant, Path(new_folder())), {}
    for sample in SAMPLES:
        lines[sample.name] = HELD[f"{sample.name}: {every_kind.RUNS}"].check(case)
    assert {name for name, line in lines.items() if line.status == "failed"} == broken
    (found,) = (lines[name] for name in broken)
    assert "mutants.py, line" in found.detail
    assert "pluribus.conformance.kinds.few_" in found.case
    refused = {name: line.detail for name, line in lines.items() if line.status == "skipped"}
    assert refused.keys() == {one.name for one in SAMPLES if one.target not in mutant.targets}
    assert all("mutants." in sentence for sentence in refused.values()), "the sentence of the refusal"


def test_if_runs_are_never_equal_no_other_promise_compares_them(monkeypatch):
    few = [one for one in PROMISES if one.name in ("same seed, same bits", "resumes to the same bits", "two classes")]
    monkeypatch.setattr("pluribus.conformance.methods.PROMISES", few)
    statuses = {line.promise: line.status for line in check(mutants.Noisy).lines}
    assert [statuses[one.name] for one in few] == ["failed", "skipped", "passed"]


def test_the_case_to_paste_fails_in_the_same_way():
    (line,) = failed(check(mutants.Raising)).values()
    with pytest.raises(KeyError, match="head"):
        eval(line.case.replace("data=", f'out="{new_folder()}", progress=False, data='))


def test_a_class_that_worker_processes_cannot_import_skips_them(monkeypatch):
    monkeypatch.setattr(SharedHead, "__module__", "__main__")
    monkeypatch.setattr("__main__.SharedHead", SharedHead, raising=False)
    line = HELD["worker processes give the same bits"].check(Case(SharedHead, Path(new_folder())))
    assert (line.status, "in a module" in line.detail) == ("skipped", True)


def test_the_hyper_parameters_of_an_instance_are_checked_and_shown():
    from toys import Mutual

    case = Case(Mutual(label_weight=0.25), Path(new_folder()))
    assert case.parts().method.label_weight == 0.25
    assert "label_weight=0.25" in case.call()


def test_a_method_that_is_refused_breaks_the_first_promise():
    from pluribus import Method

    class Local(Method):
        """Cannot be found by its name."""

    report = check(Local)
    assert list(failed(report)) == [PROMISES[0].name]


# ---- models and data -------------------------------------------------------------------------------------------------


UNUSED = {"gradients reach every parameter", "rows are not changed in place"}
RESTLESS = {
    "features have the declared width",
    "evaluation is repeatable",
    "one row at a time",
    "saves and loads",
}


@pytest.mark.parametrize(
    ("model", "promises"),
    [
        ("mutants.Unused", UNUSED),
        (mutants.Restless((1, 8, 8)), RESTLESS),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), set()),
        ("cnn-16", set()),
    ],
    ids=["unused", "restless", "module", "name"],
)
def test_models(model, promises):
    report = check(model)
    assert report.kind == "model"
    assert set(failed(report)) == promises


def token_net(shape, vocabulary):
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Flatten())


@pytest.mark.parametrize("model", ["cnn1d-3", "textbilstm", "texttransformer-1", "ft-transformer", "logistic"])
def test_models_for_other_rows_than_images(model):
    report = check(model)
    assert report.passed, str(report)


def test_rows_are_what_a_builder_asks_for():
    assert usual_input(token_net).kind == "tokens"
    assert usual_input("mlp-64", (9, 128)) == Input("signal", (9, 128))
    assert check(token_net, shape=(5,)).passed


def test_a_model_that_cannot_take_the_images_is_not_checked_further():
    report = check("mutants.Unused", shape="3x32x32")
    assert list(failed(report)) == ["builds and returns one score per class"]
    assert "3x32x32" in report.lines[0].detail
    assert {line.status for line in report.lines[1:]} == {"skipped"}


def test_data(tmp_path):
    assert check("digits").passed
    labels = "copies of a row have one class"
    assert list(failed(check(mutants.black))) == ["every class has rows", "pixels are bytes from 0 to 255", labels]
    assert list(failed(check("mutants.restless"))) == ["loaded twice, it is the same"]
    assert list(failed(check(mutants.leaky()))) == ["no test row is a training row", labels]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"no image")
    assert list(failed(check(tmp_path))) == ["every row can be read"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_data_of_every_kind(sample):
    report = check(sample.data)
    assert (report.kind, report.passed) == ("data", True), str(report)
    statuses = {line.promise: line.status for line in report.lines}
    assert statuses["pixels are bytes from 0 to 255"] == "skipped"
    assert statuses["every class has rows"] == ("skipped" if sample.target == "numbers" else "passed")


def test_a_label_that_no_row_has_is_found():
    labels = few_labels()
    line = failed(check(dataclasses.replace(labels, y=labels.y * torch.tensor([1, 1, 0], dtype=torch.uint8))))
    assert "above 4" in line["every class has rows"].detail


def reads_files(reading):
    """A function for data may ask how files are read."""
    return few_labels()


def test_a_function_that_asks_how_to_read_is_for_data():
    assert find_target(reads_files).kind == "data"


# ---- what is checked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("local", "method"),
        (SharedHead(), "method"),
        ("toys.SharedHead", "method"),
        ("mlp-64", "model"),
        ("mutants.Unused", "model"),
        (mutants.Unused, "model"),
        ("digits", "data"),
        ("some/folder", "data"),
        ("mutants.black", "data"),
        (Path("some"), "data"),
    ],
)
def test_the_kind_is_found(target, kind):
    assert find_target(target).kind == kind


def test_what_cannot_be_checked_is_refused():
    with refused(FormatError, "int", "kind="):
        check(3)
    with refused(UnknownNameError, "'fedg'", "'fedgh'"):
        check("fedg")
    with refused(UserCodeError, "'nowhere.Method'"):
        check("nowhere.Method")
    with refused(UnknownNameError, "'network'"):
        check("mlp-64", kind="network")
    with refused(FormatError, "'8by8'", "3x32x32"):
        check("mlp-64", shape="8by8")
    with refused(FormatError, "6x32", "signals", "1x8x8"):
        check("cnn1d-2", shape="1x8x8")
    with refused(FormatError, "'tpu'"):
        check("mlp-64", device="tpu")


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_fits_into_80_columns_and_into_json():
    report = check(mutants.Undeclared)
    lines = str(report).splitlines()
    assert lines[0] == "method mutants.Undeclared"
    assert max(map(len, lines)) <= 80
    assert json.loads(json.dumps(report.to_json()))["lines"][0]["status"] == "failed"
    skipped = len(PROMISES) - 1
    assert repr(report) == f"CheckReport(method mutants.Undeclared: 1 failed, {skipped} skipped)"


def test_the_command_prints_the_report_and_exits_with_1(capsys):
    with pytest.raises(SystemExit) as end:
        main(["check", "mutants.Undeclared"])
    assert end.value.code == 1
    assert capsys.readouterr().out == f"{check(mutants.Undeclared)}\n"
    assert main(["check", "mlp-64", "--shape", "1x16x16", "--classes", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["target"], found["passed"]) == ("model", "mlp-64", True)
    assert main(["check", "nothing"]) == 2


def test_a_check_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    check(mutants.Raising)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
