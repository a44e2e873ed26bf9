"""FedAvg and FedProx at FedH2L's bandwidth: how often, when, and what they are in between."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import pluribus
from conftest import assemble_tiny, new_folder, run_tiny
from kit import ByHand, StopAfter, StoppedError, assert_same, differing, kept, numbers
from parties import card_of, equal, federation_of, run_through, task_of
from pluribus.assembly import assemble, bytes_per_round
from pluribus.client import Batch
from pluribus.errors import RangeError
from pluribus.evaluate import measure
from pluribus.experiment import experiment
from pluribus.inputs import Input
from pluribus.message import Message
from pluribus.methods.fedavg import FedAvg
from pluribus.methods.ind import own_and_public
from pluribus.methods.matched import FedAvgMatched, FedProxMatched
from pluribus.optim import Opt
from refusals import refused

P = 64 * 64 + 64 + 64 * 10 + 10  # floats of mlp-64 on digits
# 121 samples of 10 classes and an accuracy: in 12 rounds 14,532 floats, that is 3 models of 4,810
TINY = {"partition": "iid", "evaluate_every": 1, "rounds": 12, "matched_batch": 121, "models": "mlp-64"}
BOTH = pytest.mark.parametrize("name", ["fedavg-matched", "fedprox-matched"])


def tiny(name="fedavg-matched", **settings):
    return assemble_tiny(name, **{**TINY, **settings})


def run(name="fedavg-matched", **settings):
    return run_tiny(name, **{**TINY, **settings})


@dataclass(frozen=True)
class OfSize(FedAvgMatched):
    """As if the model had so many floats."""

    floats: int = 1
    """P."""

    def _model_bytes(self, task, card):
        return 4 * self.floats


class TestHowOften:
    @pytest.mark.parametrize(("floats", "times"), [(44_426, 72), (61_706, 52), (431_080, 7)])
    def test_as_often_as_the_papers_bandwidth_pays_for(self, floats, times):
        """10,000 rounds of 321 floats."""
        task = pluribus.Task(10, Input("image", (1, 28, 28)), None, "pool", 4, rounds=10_000, seed=0)
        method = OfSize(floats=floats)
        assert method.synchronizations(task, card_of(0, task)) == times
        assert 10_000 * 321 - floats < floats * times <= 10_000 * 321

    def test_at_most_once_a_round(self):
        task = task_of(10, 2)
        assert OfSize(floats=7).synchronizations(task, card_of(0, task)) == task.rounds == 3

    @pytest.mark.parametrize(("rounds", "times"), [(12, 3), (12, 12), (12, 1), (500, 9), (10, 6), (10_000, 72)])
    def test_evenly_and_at_the_end(self, rounds, times):
        task = pluribus.Task(10, Input("image", (1, 1, 2)), None, "pool", 4, rounds=rounds, seed=0)
        method = OfSize(matched_batch=1, floats=11 * rounds // times)
        assert method.synchronizations(task, card_of(0, task)) == times
        at = [t for t in range(rounds) if method.synchronizes(task, card_of(0, task), t)]
        gaps = {later - sooner for sooner, later in zip([-1, *at], at, strict=False)}
        assert len(at) == times
        assert at[-1] == rounds - 1
        assert gaps <= {rounds // times, -(-rounds // times)}

    def test_the_default_model_fits_on_rotated_digits(self):
        """256 * 64 + 64 + 650 = 17,098 floats; 500 rounds of 321 pay for nine."""
        parts = assemble(experiment("fedavg-matched"))
        assert parts.method.synchronizations(parts.task, parts.cards[0]) == 500 * 321 // 17_098 == 9


class TestWhatTravels:
    @BOTH
    def test_nothing_between_synchronizations(self, name):
        entries = list(run(name).ledger.entries())
        assert {e.round for e in entries if e.direction == "up"} == {3, 7, 11}
        assert {e.round for e in entries if e.direction == "down"} == {0, 4, 8}

    @BOTH
    def test_traffic_is_what_the_sheet_says(self, name):
        """P R_sync floats each way and client, not above R (B M + 1); `traffic` says the mean per round."""
        result, said = run(name), bytes_per_round(tiny(name))
        for way in ("up", "down"):
            by_tensor = result.ledger.by("tensor", way)
            del by_tensor["(header)"]
            assert sum(by_tensor.values()) == 4 * 4 * 3 * P <= 4 * 4 * 12 * 1211
            assert getattr(said, way) * 4 * 12 == pytest.approx(sum(by_tensor.values()))

    def test_the_counters_of_batch_norm_count_twice(self):
        """P is what is sent, in floats of four bytes."""
        parts = tiny(models="cnn-16-32", matched_batch=10_000)
        model = parts.task.build("cnn-16-32")
        assert parts.method._model_bytes(parts.task, parts.cards[0]) == sum(
            v.nbytes for v in model.state_dict().values()
        )


@dataclass(frozen=True)
class EveryRound(FedAvg):
    """FedAvg on the same data and steps, written down once more."""

    defaults = FedAvgMatched.defaults

    def optimizers(self, client):
        return {"model": Opt(client.model, life="run")}

    def local_update(self, client):
        client.data["local"] = own_and_public(client, everyones=False)
        client.fit(self.step, on="local", steps=1)
        return Message.of(client.model)


class TestTraining:
    def test_with_the_bandwidth_for_it_it_is_fedavg(self):
        settings = {**TINY, "rounds": 3, "models": "cnn-16-32", "lr": 1e-3}
        del settings["matched_batch"]
        often = federation_of(assemble_tiny("fedavg-matched", matched_batch=10**6, **settings))
        plain = federation_of(assemble_tiny(EveryRound, **settings))
        results = run_through(often), run_through(plain)
        assert differing(*(dict(one.server.state.shared.state_dict()) for one in (often, plain))) == []
        measured = [[record["clients"] for record in result.history] for result in results]
        assert measured[0] == measured[1]

    def test_in_between_it_is_ind(self):
        """Private and own public data, one step a round, an optimizer that goes on: to the bit."""
        settings = {**TINY, "rounds": 4, "matched_batch": 150}
        matched = ByHand(assemble_tiny("fedavg-matched", **settings))
        del settings["matched_batch"]
        alone = ByHand(assemble_tiny("ind", **settings))
        start = matched.server.state.shared.state_dict()
        for k in range(4):
            alone.host.client(k).model.load_state_dict(start)
        for t in range(4):
            sent = matched.round(t, range(4))
            assert [up is not None for up in sent.values()] == [t == 3] * 4
            alone.round(t, range(4))
        for k in range(4):
            mine, other = (dict(one.host.client(k).model.state_dict()) for one in (matched, alone))
            assert equal(mine, other)

    @BOTH
    def test_everyone_is_given_the_mean_in_the_next_round(self, name):
        hand = ByHand(tiny(name))
        for t in range(4):
            hand.round(t, range(4))
        shared = {n: v.clone() for n, v in hand.server.state.shared.state_dict().items()}
        hand.round(4, range(4))
        for k in range(4):
            assert equal(dict(hand.host.client(k).state.shared.state_dict()), shared)
        assert equal(dict(hand.server.state.shared.state_dict()), shared)


class Compare:
    """Sees to it that `before` is the global model in every round."""

    def __init__(self) -> None:
        self.rounds = 0

    def start(self, federation) -> None:
        self.federation = federation

    def round(self, record, ledger) -> None:
        method, shared = self.federation.method, self.federation.server.state.shared
        for k in range(4):
            client = self.federation.engine.host.client(k)
            with client.fork():
                client.model.load_state_dict(shared.state_dict())
                assert measure(method.predict, client) == record["clients"][str(k)]["before"], record["round"]
        self.rounds += 1

    def finish(self, result) -> None: ...


class TestBefore:
    @BOTH
    def test_is_the_last_global_model(self, name):
        compare = Compare()
        run(name, observers=[compare])
        assert compare.rounds == 12

    def test_also_of_who_never_took_part(self):
        """Up to the first synchronization, and whenever it was given the model to be measured."""
        compare = Compare()
        with pytest.raises(StoppedError):
            run(participation=0.5, observers=[compare, StopAfter(3)])
        assert compare.rounds == 4


class TestFedProx:
    def test_without_a_pull_it_is_fedavg(self):
        plain, pulled = run(), run("fedprox-matched", mu=0.0)
        assert numbers(plain) == numbers(pulled)
        assert differing(kept(plain), kept(pulled)) == []

    def test_the_pull_is_to_the_last_global_model(self):
        """Each step after the first one differs; a strong pull keeps clients nearer to where they began."""
        far, near = (ByHand(tiny("fedprox-matched", mu=mu, optimizer="sgd")) for mu in (0.0, 5.0))
        for hand in (far, near):
            hand.round(0, range(4))
        assert differing(far.tensors(), near.tensors()) == []
        distances = []
        for hand in (far, near):
            for t in (1, 2):
                hand.round(t, range(4))
            client = hand.host.client(0)
            start = client.state.shared.state_dict()
            distances.append(sum(float((v - start[n]).square().sum()) for n, v in client.model.state_dict().items()))
        assert 0 < distances[1] < 0.9 * distances[0]

    def test_who_missed_the_first_download_is_pulled_to_the_first_model(self):
        """It starts there; a bias of ten classes that is 1 too large is pulled back with mu / 2 times 10."""
        client = ByHand(tiny("fedprox-matched")).host.client(0)
        assert client.got == {}
        positions = torch.arange(8)
        batch = Batch(*client.data["train"].take(positions), positions, 8)

        def pull() -> float:
            pulled, free = (FedProxMatched(mu=mu).loss(client, batch).detach().double() for mu in (3.0, 0.0))
            return float(pulled - free)

        assert pull() == 0
        with torch.no_grad():
            client.model.head.bias += 1
        assert pull() == pytest.approx(15, abs=1e-4)

    def test_it_has_both_options(self):
        assert (FedProxMatched().mu, FedProxMatched().matched_batch) == (0.01, 32)


@BOTH
def test_a_run_that_stops_between_synchronizations_resumes(name):
    straight, folder = run(name, participation=0.75, checkpoint_every=1), new_folder()
    with pytest.raises(StoppedError):
        run(name, participation=0.75, checkpoint_every=1, out=folder, observers=[StopAfter(4)])
    assert_same(straight, pluribus.resume(folder, progress=False))


class TestRefusals:
    @BOTH
    def test_a_run_too_short_for_one_model(self, name):
        """4,810 floats at 321 a round take 15 rounds."""
        with refused(RangeError, "14", "mlp-64", "--rounds 15"):
            tiny(name, rounds=14, matched_batch=32)
        assert tiny(name, rounds=15, matched_batch=32).method.matched_batch == 32

    def test_no_batch(self):
        with refused(RangeError, "--matched-batch", 1, 0):
            tiny(matched_batch=0)

    def test_a_pull_below_zero(self):
        with refused(RangeError, "--mu", 0, -1):
            tiny("fedprox-matched", mu=-1.0)
