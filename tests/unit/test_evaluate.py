"""Figures by hand: of one client, over clients, over rounds; and FedH2L's ACC, BWT and FWT."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import assemble_tiny, run_tiny
from parties import client_of, data_of, flat_split, signs
from pluribus.assembly import assemble
from pluribus.data import Dataset
from pluribus.errors import PartitionError
from pluribus.evaluate import (
    Answers,
    choose,
    exam_sizes,
    measure,
    measure_rows,
    metrics_over_clients,
    over_clients,
    prediction_bytes,
    summarize,
)
from pluribus.experiment import experiment
from pluribus.methods.local import Local
from refusals import refused

LIKELY = math.log1p(math.exp(-2))  # cross-entropy where the logits are 1 and -1 and the label is the first
UNLIKELY = 2 + LIKELY
NOTHING = data_of(signs([[1, 1]])[:0], [])


def looking_at_the_sign():
    """A model whose logits are the two pixels: it says 0 for (1, -1) and 1 for (-1, 1)."""
    model = flat_split(2, 2)
    model.head.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    return model


def answers(right: int, wrong: int):
    """A set of which the model gets so many right and so many wrong."""
    return data_of(signs([[1, -1]] * (right + wrong)), [0] * right + [1] * wrong) if right + wrong else NOTHING


def client_with(val=NOTHING, test=NOTHING):
    return client_of(looking_at_the_sign(), {"train": answers(1, 0), "val": val, "test": test})


class TestOneClient:
    def test_score_by_hand(self):
        data = data_of(signs([[1, -1], [-1, 1], [1, -1]]), [0, 1, 1])
        client = client_with()
        answers = Answers.of(Local().predict, client, data)
        assert answers.measure(client.task) == {"accuracy": 2 / 3}
        assert answers.mean_loss(client.task.target) == pytest.approx((2 * LIKELY + UNLIKELY) / 3, rel=1e-6)

    def test_figures_by_hand(self):
        found = measure(Local().predict, client_with(val=answers(3, 1), test=answers(2, 3)))
        assert found == {
            "val": 0.75,
            "test": 0.4,
            "test_loss": pytest.approx((2 * LIKELY + 3 * UNLIKELY) / 5, rel=1e-6),
        }

    def test_predictions_by_hand(self):
        store = data_of(signs([[1, -1], [-1, 1], [1, -1], [-1, 1]]), [0, 1, 1, 0])
        client = client_with(test=store[torch.tensor([3, 1, 2])])
        metrics, tested = measure_rows(Local().predict, client)
        assert metrics["test"] == pytest.approx(1 / 3)
        found = {name: value.tolist() for name, value in tested.tensors().items()}
        assert found == {"label": [0, 1, 1], "predicted": [1, 1, 0], "row": [3, 1, 2]}
        assert sum(value.nbytes for value in tested.tensors().values()) == 3 * prediction_bytes(client.task)

    def test_without_test_rows_there_are_no_predictions(self):
        _, tested = measure_rows(Local().predict, client_with(val=answers(1, 0)))
        assert [len(value) for value in tested.tensors().values()] == [0, 0, 0]

    def test_the_batch_size_of_sweeps_does_not_matter(self, monkeypatch):
        client = client_with(val=answers(3, 1), test=answers(7, 4))
        whole = measure(Local().predict, client)
        monkeypatch.setattr("pluribus.internal.steps.SWEEP_BATCH", 3)
        found = measure(Local().predict, client)
        assert (found["val"], found["test"]) == (whole["val"], whole["test"])
        assert found["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-6)

    def test_empty_sets_have_no_figure(self):
        assert measure(Local().predict, client_with()) == {"val": None, "test": None, "test_loss": None}
        assert measure(Local().predict, client_with(test=answers(1, 0)))["val"] is None
        assert measure(Local().predict, client_with(val=answers(1, 0)))["test"] is None


class TestOverClients:
    def test_by_hand(self):
        found = over_clients({0: 1.0, 1: 0.5, 2: 0.25}, {0: 10, 1: 20, 2: 20})
        assert found["mean"] == pytest.approx(1.75 / 3)
        assert found["weighted"] == pytest.approx((10 + 10 + 5) / 50)
        assert (found["worst"], found["best"]) == (0.25, 1.0)
        assert found["deviation"] == pytest.approx(math.sqrt((25 + 1 + 16) / 3) / 12)  # 5, 1 and 4 twelfths
        assert found["worst_decile"] == 0.25

    def test_weighted_accuracy_is_the_pooled_one(self):
        right, samples = {0: 3, 1: 40}, {0: 4, 1: 100}
        found = over_clients({k: right[k] / samples[k] for k in right}, samples)
        assert found["weighted"] == pytest.approx(43 / 104)
        assert found["mean"] == pytest.approx((0.75 + 0.4) / 2)

    def test_clients_without_the_figure_are_left_out(self):
        found = over_clients({0: None, 1: 0.5, 2: 0.0}, {0: 0, 1: 30, 2: 10})
        wanted = {"mean": 0.25, "weighted": pytest.approx(0.375), "worst": 0.0, "best": 0.5}
        assert found == wanted | {"deviation": 0.25, "worst_decile": 0.0}

    def test_nobody_has_it(self):
        empty = dict.fromkeys(("mean", "weighted", "worst", "best", "deviation", "worst_decile"))
        assert over_clients({0: None, 1: None}, {0: 0, 1: 0}) == empty
        assert over_clients({}, {}) == empty

    def test_figures_without_test_samples_to_weigh_by(self):
        """Validation accuracy of clients that all lack test data."""
        found = over_clients({0: 0.5, 1: 1.0}, {0: 0, 1: 0})
        wanted = {"mean": 0.75, "weighted": None, "worst": 0.5, "best": 1.0}
        assert found == wanted | {"deviation": 0.25, "worst_decile": 0.5}

    def test_the_worst_decile_is_the_worst_tenth_of_clients_rounded_up(self):
        for clients, tenth in ((1, 1), (10, 1), (11, 2), (20, 2), (21, 3)):
            values = {k: float(clients - k) for k in range(clients)}  # the last is the smallest
            found = over_clients(values, dict.fromkeys(values, 1))
            assert found["worst_decile"] == pytest.approx(sum(range(1, tenth + 1)) / tenth)
            errors = over_clients(values, dict.fromkeys(values, 1), smaller=True)
            assert errors["worst_decile"] == pytest.approx(sum(clients - k for k in range(tenth)) / tenth)
            assert (errors["worst"], errors["best"]) == (clients, 1.0)


def record(t: int, **clients: tuple[float | None, float | None]) -> dict:
    """A line of history: client -> (val, test)."""
    return {"round": t, "clients": {k[1:]: {"after": {"val": v, "test": s}} for k, (v, s) in clients.items()}}


class TestSelection:
    def test_the_test_accuracy_of_the_best_validation_round_per_client(self):
        history = [
            record(0, c0=(0.5, 0.90), c1=(0.3, 0.10)),
            record(1, c0=(0.7, 0.60), c1=(0.2, 0.99)),
            record(2, c0=(0.6, 0.95), c1=(0.4, 0.20)),
        ]
        chosen = choose(history, "after")
        assert (chosen[0].selected["test"], chosen[0].selected_round) == (0.60, 1)
        assert (chosen[1].selected["test"], chosen[1].selected_round) == (0.20, 2)
        assert (chosen[0].last["test"], chosen[1].last["test"]) == (0.95, 0.20)

    def test_of_equal_rounds_the_earliest(self):
        history = [record(t, c0=(val, test)) for t, (val, test) in enumerate([(0.1, 1), (0.8, 2), (0.8, 3), (0.8, 4)])]
        assert choose(history, "after")[0].selected_round == 1
        assert choose(history, "after")[0].selected["test"] == 2
        assert choose(history, "after")[0].last["test"] == 4

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    def test_first_maximum(self, vals):
        history = [record(t, c4=(val / 5, float(t))) for t, val in enumerate(vals)]
        assert choose(history, "after")[4].selected_round == vals.index(max(vals))
        assert choose(history, "after")[4].last["test"] == len(vals) - 1

    def test_the_test_set_never_chooses(self):
        history = [record(t, c0=(0.5, test)) for t, test in enumerate((0.1, 0.9, 0.5))]
        assert choose(history, "after")[0].selected["test"] == 0.1

    def test_without_validation_data_the_last_round_stands(self):
        history = [record(t, c0=(None, t / 4)) for t in range(3)]
        assert choose(history, "after")[0].selected_round == 2
        assert choose(history, "after")[0].selected == {"val": None, "test": 0.5}

    def test_rounds_without_evaluation_and_clients_seen_now_and_then(self):
        history = [
            record(0, c1=(0.9, 0.5)),
            {"round": 1, "clients": {}},
            {"round": 2},
            record(3, c0=(0.2, 0.3)),
            record(4, c1=(0.1, 0.7)),
        ]
        chosen = choose(history, "after")
        assert list(chosen) == [0, 1]
        assert (chosen[1].selected_round, chosen[1].last["test"]) == (0, 0.7)
        assert chosen[0].selected_round == 3

    def test_summary_by_hand(self):
        history = [record(0, c0=(0.9, 0.8), c1=(0.1, 0.2)), record(1, c0=(0.5, 1.0), c1=(0.6, 0.4))]
        test = {m: summarize(history, ["after"], {0: 30, 1: 10})["after"][m]["test"] for m in ("last", "selected")}
        last = {"mean": 0.7, "weighted": (30 + 4) / 40, "worst": 0.4, "best": 1.0}
        assert test["last"] == pytest.approx(last | {"deviation": 0.3, "worst_decile": 0.4})
        selected = {"mean": 0.6, "weighted": (24 + 4) / 40, "worst": 0.4, "best": 0.8}
        assert test["selected"] == pytest.approx(selected | {"deviation": 0.2, "worst_decile": 0.4})

    def test_views_are_chosen_apart(self):
        both = [
            {"round": t, "clients": {"0": {"after": {"val": a, "test": t}, "before": {"val": b, "test": 10 + t}}}}
            for t, (a, b) in enumerate([(0.9, 0.1), (0.2, 0.3)])
        ]
        summary = summarize(both, ["after", "before"], {0: 1})
        assert summary["after"]["selected"]["test"]["mean"] == 0
        assert summary["before"]["selected"]["test"]["mean"] == 11

    def test_an_empty_history(self):
        assert summarize([], ["after"], {}) == {"after": {"last": {}, "selected": {}}}


class TestRuns:
    def test_no_validation_data(self):
        result = run_tiny("local", val_fraction=0.0)
        assert result.accuracy == result.summary["after"]["last"]["test"]["mean"]
        assert {c.selected_round for c in result.per_client().values()} == {1}

    def test_no_test_data(self):
        result = run_tiny("local", test_fraction=0.0)
        assert result.accuracy is None
        assert result.summary["after"]["last"]["val"]["mean"] is not None
        assert set(result.summary["after"]["last"]["test"].values()) == {None}

    def test_the_headline_is_the_mean_over_clients_of_the_selected_round(self):
        result = run_tiny("local", rounds=4)
        picked = []
        for k in range(4):
            vals = [record["clients"][str(k)]["after"]["val"] for record in result.history]
            picked.append(result.history[vals.index(max(vals))]["clients"][str(k)]["after"]["test"])
        assert result.accuracy == pytest.approx(sum(picked) / 4)


class TestDomains:
    """ACC_i = (n_i BWT_i + sum_{j != i} n_j FWT_i) / sum n, for any sizes."""

    def in_domain(self, own: int, exams):
        client = client_with()
        named = {f"M{d}": {"val": val, "test": test} for d, (val, test) in enumerate(exams)}
        client.task, client.exams = dataclasses.replace(client.task, domain_of={0: own}), named
        return client

    def test_by_hand(self):
        exams = [(answers(1, 0), answers(3, 1)), (answers(0, 1), answers(1, 9)), (answers(2, 0), answers(5, 1))]
        found = measure(Local().predict, self.in_domain(1, exams))
        assert found == {"val": 3 / 4, "test": 9 / 20, "acc": 9 / 20, "bwt": 1 / 10, "fwt": 8 / 10}

    def test_predictions_are_those_for_the_own_domain(self):
        exams = [(NOTHING, answers(3, 1)), (NOTHING, answers(1, 2)), (NOTHING, answers(0, 1))]
        _, tested = measure_rows(Local().predict, self.in_domain(1, exams))
        assert tested.tensors()["label"].tolist() == [0, 1, 1]
        assert tested.tensors()["predicted"].tolist() == [0, 0, 0]

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=4), st.data())
    def test_identity(self, counts, data):
        own = data.draw(st.integers(0, len(counts) - 1))
        found = measure(Local().predict, self.in_domain(own, [(NOTHING, answers(*one)) for one in counts]))
        sizes = [sum(one) for one in counts]
        mine, others = sizes[own], sum(sizes) - sizes[own]
        assert (found["bwt"] is None) == (mine == 0)
        assert (found["fwt"] is None) == (others == 0)
        if sum(sizes):
            assert found["acc"] * sum(sizes) == pytest.approx(mine * (found["bwt"] or 0) + others * (found["fwt"] or 0))
        else:
            assert found["acc"] is None

    def test_a_real_run(self):
        settings = {"data": "rotated-digits", "partition": "domain", "clients": 4, "models": "mlp-64"}
        result = run_tiny("local", rounds=1, **settings)
        exams = assemble_tiny("local", **settings).task.exams
        sizes = list(exams.values())
        assert list(exams) == ["M0", "M20", "M40", "M60"]
        measured = [result.history[0]["clients"][str(k)]["after"] for k in range(4)]
        for k, found in enumerate(measured):
            others = sum(sizes) - sizes[k]
            assert found["acc"] == pytest.approx((sizes[k] * found["bwt"] + others * found["fwt"]) / sum(sizes))
            assert found["test"] == found["acc"]
            assert found["acc"] * sum(sizes) == pytest.approx(round(found["acc"] * sum(sizes)))
        assert all(found["bwt"] > found["fwt"] for found in measured), "a party knows its own domain best"

    def test_a_figure_weighs_as_much_as_the_test_samples_behind_it(self):
        """Domains of 30 and 10 test samples: bwt counts 30 and 10, fwt 10 and 30, acc and test 40 each."""
        rows = {
            0: {"test": 0.5, "acc": 0.5, "bwt": 1.0, "fwt": 0.2},
            1: {"test": 0.9, "acc": 0.9, "bwt": 0.4, "fwt": 0},
        }
        over = metrics_over_clients(rows, {0: 30, 1: 10}, {0: (30, 40), 1: (10, 40)})
        weighted = {name: figure["weighted"] for name, figure in over.items()}
        assert weighted == pytest.approx({"test": 0.7, "acc": 0.7, "bwt": 34 / 40, "fwt": 2 / 40})
        assert {name: figure["mean"] for name, figure in over.items()} == pytest.approx(
            {"test": 0.7, "acc": 0.7, "bwt": 0.7, "fwt": 0.1}
        )

    def test_weighted_figures_of_a_run_are_those_of_all_tests_pooled(self):
        settings = {"data": "test_evaluate.two_domains", "partition": "domain", "clients": 2, "models": "mlp-64"}
        sizes = 30, 10
        for test in ("own", "official"):
            result = run_tiny("local", test=test, rounds=1, lr=0.01, **settings)
            parts = assemble_tiny("local", test=test, **settings)
            assert [exam_sizes(parts.task, k) for k in range(2)] == [(sizes[0], sum(sizes)), (sizes[1], sum(sizes))]
            last = {k: record["after"] for k, record in result.history[-1]["clients"].items()}
            pooled = {
                "bwt": (sizes[0] * last["0"]["bwt"] + sizes[1] * last["1"]["bwt"]) / sum(sizes),
                "fwt": (sizes[1] * last["0"]["fwt"] + sizes[0] * last["1"]["fwt"]) / sum(sizes),
                "acc": (last["0"]["acc"] + last["1"]["acc"]) / 2,
            }
            for found in (result.summary["after"]["last"], result.history[-1]["mean"]["after"]):
                assert {name: found[name]["weighted"] for name in pooled} == pytest.approx(pooled)
            assert last["0"]["fwt"] != last["1"]["fwt"], "or the weights would not matter"

    def test_with_the_official_test_set_a_client_knows_its_own_domain_best(self):
        """The domains contradict each other: whoever has learned one is wrong on the other."""
        settings = {"data": "test_evaluate.two_domains", "partition": "domain", "clients": 2, "models": "mlp-64"}
        result = run_tiny("local", test="official", rounds=4, **settings)
        for views in result.history[-1]["clients"].values():
            found = views["after"]
            assert found["bwt"] > 0.9 > 0.3 > found["fwt"]

    @pytest.mark.parametrize(
        ("official", "domain", "part"),
        [(40, [0] * 20 + [1] * 20 + [0] * 10, "test set"), (20, [0] * 20 + [1] * 30, "training set")],
    )
    def test_an_official_set_that_lacks_a_domain_is_refused(self, official, domain, part):
        lacking = dataclasses.replace(plain(), official=official, domain=torch.tensor(domain), domains=("p", "q"))
        described = experiment("local", data="x", clients=2, partition="domain", test="official", device="cpu")
        with refused(PartitionError, part, "domain 'q'", "--test official"):
            assemble(described, lacking)
        assemble(dataclasses.replace(described, test="own"), lacking)

    def test_a_domain_without_images_is_refused(self):
        lacking = dataclasses.replace(plain(), domain=torch.arange(50) % 2, domains=("p", "q", "r"))
        with refused(PartitionError, "domain 'r'"):
            assemble(experiment("local", data="x", clients=3, partition="domain", device="cpu"), lacking)


def plain() -> Dataset:
    return Dataset("plain", torch.zeros(50, 1, 8, 8, dtype=torch.uint8), torch.arange(50) % 2, ("a", "b"))


def two_domains() -> Dataset:
    """Three rows of domain p to one of q, and the class that is bright in p is dark in q.

    150 and 50 rows, of which a fifth is 30 and 10; in the official test set, the last 40 rows, they are 30 and 10, too.
    """
    label, domain = torch.arange(200) % 2, (torch.arange(200) // 2 % 4 == 0).long()
    x = torch.full((200, 1, 8, 8), 40) + 150 * (label ^ domain).view(-1, 1, 1, 1)
    x += torch.randint(0, 40, x.shape, generator=torch.Generator().manual_seed(0))
    return Dataset("two", x.to(torch.uint8), label, ("a", "b"), 160, domain, ("p", "q"))


def test_of_a_loss_the_largest_is_the_worst_and_the_smallest_the_best() -> None:
    rows = {0: {"test": 0.5, "test_loss": 2.0}, 1: {"test": 0.75, "test_loss": 0.5}}
    over = metrics_over_clients(rows, {0: 1, 1: 3})
    more = {"deviation": 0.125, "worst_decile": 0.5}
    assert over["test"] == {"mean": 0.625, "weighted": 0.6875, "worst": 0.5, "best": 0.75} | more
    more = {"deviation": 0.75, "worst_decile": 2.0}
    assert over["test_loss"] == {"mean": 1.25, "weighted": 0.875, "worst": 2.0, "best": 0.5} | more
