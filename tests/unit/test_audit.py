"""The numbers of an audit by hand, attacks whose answers are known, and what an audit says about a run."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pluribus
from conftest import run_tiny, tiny
from pluribus.audit.findings import CARD, MODEL, Finding
from pluribus.audit.inversion import Span, angle, descend, invert_gradient, task_gradient
from pluribus.audit.measures import Scores, auc, mean_auc, psnr, total_variation
from pluribus.audit.membership import by_loss
from pluribus.audit.rehearsal import rehearse
from pluribus.audit.weights import find_weights, read_tensors
from pluribus.client import Batch, Client
from pluribus.errors import FileAccessError, MissingSettingError, RangeError
from pluribus.evaluate import rule_of
from pluribus.models import TwoPartModel
from pluribus.privacy.budgets import epsilon_of_run
from pluribus.result import Result
from refusals import refused
from terminal import Terminal

ONE_STEP = {"epochs": 1, "batch_size": 1000, "clients": 10, "optimizer": "sgd", "momentum": 0.0}


def scores(members: list[float], others: list[float], classes: tuple[list[int], list[int]] | None = None) -> Scores:
    of = classes or ([0] * len(members), [0] * len(others))
    return Scores(torch.tensor(members), torch.tensor(others), *map(torch.tensor, of))


@cache
def ran(method: str = "fedgh", **settings: object) -> Result:
    """A run that tests may look at, but not change."""
    return run_tiny(method, **settings)


@cache
def audited(method: str = "fedgh", **settings: object) -> pluribus.Audit:
    return pluribus.audit(ran(method, **settings), steps=5)


def finding(audit: pluribus.Audit, field: str, attack: str) -> Finding:
    (found,) = [one for one in audit.runs[0].findings if one.field == field and one.attack == attack]
    return found


# ---- measures --------------------------------------------------------------------------------------------------------


def test_the_area_counts_pairs_in_the_right_order() -> None:
    assert auc(scores([3, 1], [2, 0])) == 3 / 4  # 3 > 2, 3 > 0, 1 > 0, but 1 < 2
    assert auc(scores([1], [1])) == 1 / 2  # a tie
    assert auc(scores([math.inf], [1])) == 1
    assert auc(scores([], [1])) is None


def test_only_rows_of_one_class_are_compared() -> None:
    """All members of class 1 score higher than all others of class 0, which says nothing about membership."""
    mixed = scores([5, 6, 1], [0, 7, 8], ([1, 1, 0], [0, 1, 1]))
    assert auc(mixed) == 1 / 5  # (1, 0) is right; 5 and 6 are below 7 and 8
    assert auc(scores([5], [0], ([1], [0]))) is None


def test_the_interval_is_over_clients_or_over_rows() -> None:
    same = [scores([3, 1], [2, 0])] * 5
    found = mean_auc(same, 0)
    assert found == (0.75, 0.75, 0.75), "equal clients have no spread"
    one = mean_auc(same[:1], 0)
    assert one is not None
    assert one.value == 0.75
    assert one.low < 0.75 < one.high, "the rows of a single client have one"
    assert mean_auc(same[:1], 0) == one, "the draws have a key"
    assert mean_auc([scores([], [])], 0) is None


def test_the_interval_covers_what_is_true() -> None:
    """Members score N(1, 1), others N(0, 1): the area is the normal distribution's at 1 / sqrt(2), 0.760."""
    rng, hits = np.random.default_rng(0), 0
    for trial in range(40):
        one = Scores(*(torch.from_numpy(rng.normal(shift, 1, 60)) for shift in (1, 0)), *[torch.zeros(60)] * 2)
        found = mean_auc([one], trial)
        assert found is not None
        hits += found.low < 0.7602 < found.high
    assert hits >= 34  # of 40; 38 are expected


def test_psnr_by_hand() -> None:
    assert psnr(torch.zeros(2), torch.tensor([0.2, 0.0]), span=2.0) == pytest.approx(10 * math.log10(4 / 0.02))
    assert psnr(torch.ones(2), torch.ones(2), span=1.0) == math.inf


def test_total_variation_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    assert float(total_variation(image)) == (0 + 2) / 2 + (1 + 3) / 2


# ---- inversion -------------------------------------------------------------------------------------------------------


def linear_client() -> Client:
    """A client whose model is one linear layer."""
    with ran("local")._open() as (parts, store):
        client = rehearse(parts, store, 1).host.client(0)
    client.model = TwoPartModel(nn.Flatten(), nn.Linear(64, 10), 64)
    with torch.no_grad():
        client.model.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    return client


def test_the_gradient_of_a_linear_layer_reveals_the_row() -> None:
    """dL/dW = delta x^T and dL/db = delta, so x is a row of dL/dW over an entry of dL/db. Descent finds the same."""
    client = linear_client()
    x, y = client.data["train"].take(torch.tensor([3]))
    gradient = task_gradient(client, ["head.weight", "head.bias"])
    sent = [one.detach() for one in gradient(Batch(x, y, torch.tensor([0]), 1))]
    exact = (sent[0][y[0]] / sent[1][y[0]]).reshape(x.shape[1:])
    assert torch.allclose(exact, x[0], atol=1e-4), "the closed form"
    (guess,) = invert_gradient(client, Batch(x, y, torch.tensor([0]), 1), gradient, sent, 300, "linear")
    assert guess.psnr > 30
    assert guess.psnr > guess.without + 10
    assert torch.equal(guess.original, x[0])


def test_descent_keeps_the_best_it_has_seen_and_stays_in_the_span() -> None:
    target = torch.full((1, 1, 4, 4), 3.0)
    found = descend(lambda x: (x - target).square().mean(), target.shape, Span(-1, 1), 50, "outside")
    assert torch.allclose(found, torch.ones_like(found), atol=0.02), "the nearest value in the span"
    assert torch.equal(found, descend(lambda x: (x - target).square().mean(), target.shape, Span(-1, 1), 50, "outside"))


def test_angle_by_hand() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert float(angle([one], [other])) == pytest.approx(1 - 1 / math.sqrt(2))
    assert float(angle([one[:1], one[1:]], [2 * one[:1], 2 * one[1:]])) == pytest.approx(0)


def test_a_method_gives_the_gradient_that_it_has_sent() -> None:
    """FedL2G: `private_gradient` of the rows of the batch is the uploaded field."""
    with ran("fedl2g-l")._open() as (parts, store):
        rehearsal = rehearse(parts, store, 2)
        for upload in rehearsal.uploads:
            fit = upload.fits[-1]
            rows = fit.order[: sum(fit.sizes)]
            x, y = fit.data.take(rows)
            with rehearsal.at_upload(upload) as client:
                found = parts.method.private_gradient(client, Batch(x, y, rows, len(x)))["gradient"]
            sent = upload.message.rows("gradient").value
            assert bool(sent.any())
            assert torch.allclose(found, sent, rtol=1e-4, atol=1e-7)


# ---- one more round --------------------------------------------------------------------------------------------------


def test_one_more_round_leaves_the_folder_as_it_was() -> None:
    result = ran()
    assert result.folder is not None
    files = [path for path in sorted(result.folder.rglob("*")) if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    pluribus.audit(result.folder, steps=1)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before
    assert sorted(path for path in result.folder.rglob("*") if path.is_file()) == files


def test_clients_start_from_the_state_that_was_saved() -> None:
    with ran()._open() as (parts, store):
        rehearsal = rehearse(parts, store, 2)
        assert len(rehearsal.uploads) == 2
        for upload in rehearsal.uploads:
            saved = store.checkpoint.client(upload.client)
            assert saved is not None
            with rehearsal.trained(upload.client) as client:
                assert all(torch.equal(value, saved[name]) for name, value in client.tensors().items())
            body = [name for name in saved if name.startswith("model.features.")]
            assert body
            assert all(torch.equal(upload.start[name], saved[name]) for name in body)
            assert not all(torch.equal(upload.end[name], saved[name]) for name in body), "it has trained"


def test_a_run_in_memory_gives_the_same_numbers() -> None:
    again = pluribus.run("fedgh", progress=False, **tiny())
    assert again.folder is None
    first, second = (pluribus.audit(one, steps=5).runs[0].rows() for one in (ran(), again))
    assert [{**row, "run": ""} for row in first] == [{**row, "run": ""} for row in second]


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_a_model_that_has_memorized_is_found_out() -> None:
    """Random labels can only be learned by heart: the model knows its training rows, and no test row."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (240, 1, 8, 8), dtype=np.uint8), rng.integers(0, 2, 240)
    learned = {"data": (x, y), "clients": 2, "models": "mlp-64", "partition": "iid", "lr": 0.1, "progress": False}
    result = pluribus.run("local", rounds=30, epochs=5, **learned)
    found = finding(pluribus.audit(result), MODEL, "membership").value
    assert found is not None
    assert found.value > 0.95
    untrained = pluribus.run("local", rounds=1, **{**learned, "lr": 1e-9})
    nothing = finding(pluribus.audit(untrained), MODEL, "membership").value
    assert nothing is not None
    assert nothing.low < 0.5 < nothing.high
    assert abs(nothing.value - 0.5) < 0.1


def test_whole_models_that_are_sent_tell_what_the_model_tells() -> None:
    """FedAvg sends all weights: the server rebuilds the client's model after the round, to the bit."""
    sent = finding(audited("fedavg", models="cnn-16"), "features.*, head.*", "membership")
    assert "all that the clients train" in sent.says
    with ran("fedavg", models="cnn-16")._open() as (parts, store):
        rehearsal, rule, expected = rehearse(parts, store, 10), rule_of(parts.method, "after"), []
        for upload in rehearsal.uploads:
            with rehearsal.at_upload(upload) as client:
                expected.append(by_loss(client, rule))
    assert sent.value == mean_auc(expected, parts.task.seed, "features.*, head.*")


def test_changes_of_weights_are_read_as_weights() -> None:
    """SCAFFOLD sends the change of all weights as one vector, beside another one of the same length."""
    with ran("scaffold", models="cnn-16")._open() as (parts, store):
        rehearsal = rehearse(parts, store, 1)
        (upload,) = rehearsal.uploads
        known = find_weights(rehearsal, upload, upload.message.part())
        assert known is not None
        assert known.is_whole
        assert all(torch.allclose(value, upload.end[name], atol=1e-6) for name, value in known.tensors.items())
        assert find_weights(rehearsal, upload, {"changes": upload.message.tensor("changes")}) is None


def test_equal_tensors_are_found_once_each() -> None:
    """Biases that are zero are equal: each uploaded one is another tensor of the client."""
    end = {"model.a.bias": torch.zeros(3), "model.b.bias": torch.zeros(3), "state.kept": torch.zeros(3)}
    assert read_tensors(end, {"0.bias": torch.zeros(3), "1.bias": torch.zeros(3)}).keys() == end.keys() - {"state.kept"}


def test_a_part_of_a_model_is_no_whole_model() -> None:
    sent = finding(audited("lg-fedavg"), "weight, bias", "membership")
    assert "a part of" in sent.says
    assert sent.value is not None


def test_held_classes_and_counts_are_named() -> None:
    means = finding(audited(), "means", "disclosure")
    assert "4 of 4 clients exactly those" in means.says
    counts = finding(audited("fedgen"), "counts (at enrolment)", "disclosure")
    assert "4 of 4 clients" in counts.says
    assert "number of training rows" in counts.says


def test_weights_of_one_step_are_inverted_and_those_of_many_are_not() -> None:
    settings = {**ONE_STEP, "models": "mlp-64", "same_init": True}
    one = finding(audited("fedavg", **settings), "features.*, head.*", "inversion")
    assert one.value is not None
    assert one.pictures
    assert one.without is not None
    many = finding(audited("fedavg", **{**settings, "batch_size": 4}), "features.*, head.*", "inversion")
    assert many.value is None
    assert "steps on" in many.says


@pytest.mark.parametrize("data", ["breast-cancer", "speeches"])
def test_other_kinds_of_rows_get_what_applies(data: str) -> None:
    result = pluribus.run("fedgh", data=data, clients=3, rounds=1, progress=False)
    found = pluribus.audit(result, clients=2, steps=1)
    assert finding(found, MODEL, "membership").value is not None
    assert finding(found, "means", "membership").value is not None
    assert "reconstructs images" in finding(found, "means", "inversion").says


def test_numbers_have_losses_but_no_classes() -> None:
    result = pluribus.run("fedavg", data="diabetes", clients=3, rounds=1, models="table-mlp-2", progress=False)
    found = pluribus.audit(result, clients=2, steps=1)
    assert finding(found, MODEL, "membership").value is not None


def test_the_epsilon_of_a_run_is_the_largest_in_its_records() -> None:
    spent = [{"privacy": {"epsilon": {"0": 1.0, "1": 2.5}}}, {"privacy": {"epsilon": {"0": 2.0}}}, {"loss": 1}]
    assert epsilon_of_run(spent) == 2.5
    assert epsilon_of_run([{"loss": 1}]) is None


def test_runs_stand_side_by_side() -> None:
    both = pluribus.audit(ran(), ran("local"), steps=1)
    assert len({run.name for run in both.runs}) == 2
    assert {row["method"] for row in both.to_json()["findings"]} == {"fedgh", "local"}
    assert both.to_markdown().splitlines()[0].count("|") == 4
    assert [one.field for one in both.runs[1].findings] == [CARD, MODEL], "local uploads nothing"


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    with refused(FileAccessError):
        pluribus.audit(tmp_path)
    with refused(RangeError, "clients"):
        pluribus.audit(ran(), clients=0)
    with refused(RangeError, "steps"):
        pluribus.audit(ran(), steps=0)


def test_the_command_prints_a_table_and_writes_a_page(terminal: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "audit.html"
    answer = terminal("audit", ran().folder, "--steps", 2, "--out", out)
    assert answer.code == 0, answer.err
    assert {"means", "membership"} <= set(answer.out.split())
    assert "<html" in out.read_text()
    found = terminal("audit", ran().folder, "--steps", 2, "--out", out, "--json").json
    assert found["findings"] == json.loads(json.dumps(pluribus.audit(ran(), steps=2).to_json()["findings"]))
    terminal.refused("audit").check(MissingSettingError)
