"""FedHe by hand: the squared error to global logits, rounds, and turns with a store that forgets."""

from __future__ import annotations

import pytest
import torch
from test_fd import Told, gradient, party, upload, whole

import pluribus
from conftest import assemble_tiny, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same, checked_steps
from parties import equal, federation_of, run_through
from pluribus.client import Client
from pluribus.errors import RangeError, UnknownNameError
from pluribus.methods.fd import FD
from pluribus.methods.fedhe import FedHe
from pluribus.optim import Rule
from refusals import refused

C = 10


class TestLoss:
    """Logits (1, -1) of class 0: cross-entropy 0.1269280. Global logits (0, 3): squares 1 and 16."""

    def test_by_hand(self):
        client = party(FedHe(), [[1, -1]], [0])
        client.take(upload(2, c0=[0.0, 3.0]))
        assert FedHe().loss(client, whole(client)).item() == pytest.approx(0.1269280 + 0.5 * 17 / 2, abs=1e-6)

    def test_a_step_by_hand(self):
        """p - e_0 = (-0.1192029, 0.1192029); alpha 2 (o - t) / C = 0.5 (1, -4); eta = 0.1, x = (1, -1)."""
        client = party(FedHe(), [[1, -1]], [0], rule=Rule(lr=0.1))
        client.take(upload(2, c0=[0.0, 3.0]))
        FedHe().local_update(client)
        down, up = 0.1 * (0.5 - 0.1192029), 0.1 * (2 - 0.1192029)
        expected = torch.tensor([[1 - down, down], [up, 1 - up]])
        torch.testing.assert_close(client.model.head.weight.detach(), expected, rtol=0, atol=1e-6)

    def test_a_class_without_a_global_logit_counts_in_the_mean_only(self):
        client = party(FedHe(pull=1.0), [[1, -1], [-1, 1]], [0, 1])
        client.take(upload(2, c0=[0.0, 3.0]))
        assert FedHe(pull=1.0).loss(client, whole(client)).item() == pytest.approx(0.1269280 + 17 / 4, abs=1e-6)

    def test_masked_classes_have_no_gradient(self):
        client = party(FedHe(), [[-1, 1], [-1, 1]], [1, 1])
        client.take(upload(2, c0=[0.0, 3.0]))
        assert torch.equal(gradient(FedHe(), client), gradient(FedHe(pull=0.0), client))


class TestSync:
    def test_the_server_does_what_that_of_fd_does(self):
        first = {0: upload(2, c0=[1.0, 3.0]), 1: upload(2, c0=[3.0, -3.0], c1=[4.0, 5.0])}
        one, other = Told(FedHe()), Told(FD())
        for sent in (first, {2: upload(2, c1=[1.0, 1.0])}):
            assert one(sent).down() == other(sent).down()
        assert one.down() == {0: [2, 0], 1: [1, 1]}

    def test_without_its_term_it_is_local_training(self):
        federations = [federation_of(assemble_tiny("fedhe", pull=0.0)), federation_of(assemble_tiny("local"))]
        for one in federations:
            run_through(one)
        for k in range(4):
            assert equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in federations))

    def test_traffic_is_what_the_sheet_says(self):
        """c_i C floats up; C_seen C down, none in the first round."""
        settings = {"rounds": 3, "partition": "pathological", "classes_per_client": 2}
        result, data = run_tiny("fedhe", **settings), assemble_tiny("fedhe", **settings).data
        held = [{c for c, n in enumerate(data.counts(k)) if n} for k in range(4)]
        assert result.ledger.by("tensor", "up")["logits"] == 3 * 4 * C * sum(map(len, held))
        assert result.ledger.by("tensor", "down")["logits"] == 2 * 4 * 4 * C * len(set().union(*held))
        for way in ("up", "down"):
            assert set(result.ledger.by("tensor", way)) == {"logits", "logits.ids", "(header)"}


class TestStore:
    """Two clients: nothing is taught before 2 uploads, and after every 20 the history becomes one report."""

    def test_nothing_is_taught_before_there_is_an_upload_per_client(self):
        told = Told(FedHe(mode="async"), clients=2)
        assert told({0: upload(2, c0=[1.0, 1.0])}).down() == {}
        assert told({0: upload(2, c0=[3.0, 1.0])}).down() == {0: [2, 1]}

    def test_the_arithmetic_mean_until_the_first_collapse(self):
        told, sent = Told(FedHe(mode="async"), clients=2), []
        for number in range(19):
            sent.append(float(number**2))
            told({number % 2: upload(2, c0=[sent[-1], 1.0])})
            if number:
                assert told.down() == {0: [pytest.approx(sum(sent) / len(sent), rel=1e-6), 1]}

    def test_after_a_collapse_history_is_one_report(self):
        told = Told(FedHe(mode="async"), clients=2)
        for _ in range(19):
            told({0: upload(2, c0=[0.0, 2.0])})
        told({0: upload(2, c0=[20.0, 2.0])})
        assert told.down() == {0: [1, 2]}, "the mean itself does not move"
        assert told.server.state.reports.tolist() == [1, 0]
        assert told({0: upload(2, c0=[4.0, 2.0])}).down() == {0: [2.5, 2]}, "(1 + 4) / 2"
        assert told({1: upload(2, c1=[6.0, 6.0])}).down() == {0: [2.5, 2], 1: [6, 6]}

    def test_it_collapses_again(self):
        told = Told(FedHe(mode="async"), clients=2)
        for _ in range(40):
            told({0: upload(2, c0=[1.0, 1.0])})
        assert told.server.state.reports.tolist() == [1, 0]
        told({0: upload(2, c0=[1.0, 1.0])})
        assert told.server.state.reports.tolist() == [2, 0]


steps: list[int] = []
taught: list[bool] = []


class Watched(FedHe):
    """FedHe that writes down how many steps its turns have, and whether there was something to learn from."""

    def train(self, client: Client) -> None:
        before = client.state.seen.counts.sum()
        super().train(client)
        steps.append(round(float(client.state.seen.counts.sum() - before) / client.local.batch))
        taught.append(bool(client.got.rows("logits").held.any()))


class TestTurns:
    def test_one_client_a_round_drawn_by_key(self):
        task = assemble_tiny("fedhe").task
        turns = [FedHe(mode="async").participants(task, t) for t in range(60)]
        assert all(len(turn) == 1 for turn in turns)
        assert {k for (k,) in turns} == set(range(4))
        assert turns == [FedHe(mode="async").participants(task, t) for t in range(60)]
        assert FedHe().participants(task, 0) is None

    def test_a_turn_is_a_few_batches_and_teaching_starts_late(self):
        steps.clear()
        taught.clear()
        result = run_tiny(Watched(mode="async"), rounds=7, partition="iid", evaluate_every=7)
        assert steps == [3] * 7
        assert taught == [False] * 4 + [True] * 3
        assert [record["answered"] for record in result.history] == [1] * 7
        steps.clear()
        run_tiny(Watched(mode="async", turn_batches=2), rounds=2, partition="iid", evaluate_every=2)
        assert steps == [2, 2]

    def test_late_uploads_do_not_count(self):
        federation = federation_of(assemble_tiny(FedHe(mode="async"), rounds=12, straggler_rate=0.5, evaluate_every=12))
        run_through(federation)
        answered = sum(record["answered"] for record in federation.history)
        assert 0 < answered < 12
        assert int(federation.server.state.uploads) == answered

    def test_a_stopped_run_resumes_to_the_same_bits(self):
        settings = {"rounds": 8, "evaluate_every": 4, "checkpoint_every": 1}
        straight, folder = run_tiny("fedhe", mode="async", **settings), new_folder()
        with pytest.raises(StoppedError):
            run_tiny("fedhe", folder, mode="async", observers=[StopAfter(5)], **settings)
        assert_same(straight, pluribus.resume(folder, progress=False))

    def test_steps_are_pure_tensor_programs(self):
        settings = {"mode": "async", "clients": 2, "models": "mlp-64", "rounds": 12, "evaluate_every": 12}
        with checked_steps(assemble_tiny("fedhe", **settings).method) as checked:
            run_tiny("fedhe", **settings)
        assert checked

    def test_an_upload_holds_the_classes_of_its_batches_alone(self):
        result = run_tiny("fedhe", mode="async", turn_batches=1, batch_size=2, rounds=6, evaluate_every=6)
        up = {e.round: e.bytes for e in result.ledger.entries() if (e.direction, e.tensor) == ("up", "logits")}
        assert up.keys() == set(range(6))
        assert all(size in (4 * C, 2 * 4 * C) for size in up.values())


class TestRefusals:
    def test_a_negative_weight(self):
        with refused(RangeError, "--pull", 0, -1):
            assemble_tiny("fedhe", pull=-1.0)

    def test_an_empty_turn(self):
        with refused(RangeError, "--turn-batches", 1, 0):
            assemble_tiny("fedhe", turn_batches=0)

    def test_no_other_mode(self):
        with refused(UnknownNameError, "--mode", "sync", "async", "later"):
            assemble_tiny("fedhe", mode="later")
