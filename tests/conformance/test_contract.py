"""The contract carries the shapes of the methods in the literature: shown on the toys of `toys.py`, number by number.

Every toy also goes through `test_conformance.py`: it resumes to the same bits, evaluation leaves no trace, and so on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pluribus
from conftest import assemble_tiny, few_digits, make_host, new_folder, run_tiny
from kit import ByHand, StopAfter, StoppedError, assert_same, differing, kept, same_bits
from parties import server_of, task_of
from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, MismatchError, SchemaError, UserCodeError
from pluribus.federation import Federation
from pluribus.message import Field, Message, Rows, Wire, decode, encode
from pluribus.method import Exchange, Method, register
from pluribus.optim import Opt, Rule
from pluribus.request import Evaluate, Work
from pluribus.server import Server
from pluribus.storage.checkpoint import Checkpoint, put_back
from pluribus.storage.folder import RunFolder
from pluribus.task import Cards, Task
from refusals import refused
from toys import (
    Adapted,
    Careful,
    Consensus,
    Counted,
    Mutual,
    Pairs,
    Peers,
    Prototypes,
    Reviewed,
    Sampled,
    Steady,
    Turns,
)

CLASSES, WIDTH = 10, 64


def by_hand(method, **settings) -> ByHand:
    return ByHand(assemble_tiny(method, data=few_digits(160), **settings))


def tensors_of(data: bytes | None, schema) -> dict[str, Tensor]:
    assert data is not None
    return decode(data, schema, "test").part()


def first_batch(client: Client, size: int = 10) -> Batch:
    positions = torch.arange(size)
    x, y = client.data["train"].take(positions)
    return Batch(x, y, positions, size)


def payload(result, way: str) -> dict[str, int]:
    """Bytes per tensor, without what the format itself adds."""
    sizes = result.ledger.by("tensor", way)
    sizes.pop("(header)", None)
    return sizes


@dataclasses.dataclass(frozen=True)
class Picky(Method):
    """Refuses, and says which architectures it was shown, each by its first client."""

    def check(self, task: Task, cards: Cards) -> None:
        raise MismatchError(str([(card.id, card.model) for card in cards.firsts()]))


class TestCheck:
    def test_it_sees_each_architecture_once(self):
        with refused(MismatchError) as refusal:
            assemble_tiny(Picky, models="mlp-64,cnn-16", clients=5)
        assert str(refusal.value) == "[(0, 'mlp-64'), (1, 'cnn-16')]"


class TestSeveralExchanges:
    def test_each_client_gets_the_mean_of_the_others(self):
        hand = by_hand(Consensus)
        answers = hand.round(0, range(4))
        schema = hand.host.wires(0)[0].up
        sent = {k: tensors_of(answers[0, k], schema)["scores"] for k in range(4)}
        for k in range(4):
            others = [sent[j] for j in range(4) if j != k]
            assert torch.allclose(hand.host.client(k).got["consensus"], sum(others) / 3, atol=1e-6)

    def test_all_parties_derive_the_same_public_subset_and_another_one_each_round(self):
        method, hand = Consensus(), by_hand(Consensus)
        first, again, next_round = (method.chosen(hand.host.client(k), t).rows for k, t in ((0, 0), (1, 0), (0, 1)))
        assert first.tolist() == again.tolist() != next_round.tolist()
        assert set(first.tolist()) <= {row for data in hand.parts.data.public.values() for row in data.rows.tolist()}

    def test_bytes(self):
        scores = 4 * 2 * 12 * CLASSES * 4  # clients, rounds, subset, classes, bytes of a float
        result = run_tiny(Consensus)
        assert payload(result, "up") == {"scores": scores}
        assert payload(result, "down") == {"consensus": scores}
        assert {(e.exchange, e.direction) for e in result.ledger.entries()} == {(0, "up"), (1, "down")}

    def test_who_is_late_in_the_first_exchange_is_not_asked_in_the_second(self):
        result = run_tiny(Consensus, rounds=3, straggler_rate=0.5)
        for t in range(3):
            ways = {
                w: {e.client for e in result.ledger.entries() if (e.round, e.direction) == (t, w)}
                for w in ("up", "down")
            }
            assert len(ways["up"]) == result.history[t]["present"] == 4
            assert len(ways["down"]) == result.history[t]["answered"]
        assert any(record["answered"] < 4 for record in result.history)

    def test_it_needs_public_data(self):
        with refused(MismatchError, "public data", "--public-fraction 0.1"):
            assemble_tiny(Consensus, public_fraction=0.0)

    def test_momentum_goes_on_in_the_second_exchange_wherever_the_client_was(self, monkeypatch):
        roomy = run_tiny(Consensus, momentum=0.9)
        monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
        assert differing(kept(roomy), kept(run_tiny(Consensus, momentum=0.9))) == []


class TestPublicAtServer:
    def test_the_rows_are_those_of_all_clients(self):
        hand = by_hand(Reviewed)
        public = hand.host.client(2).public.values()
        expected = torch.cat([data.take(torch.arange(len(data)))[0] for data in public])
        assert torch.equal(hand.server.public.take(torch.arange(len(hand.server.public))), expected)

    def test_they_have_no_labels(self):
        assert isinstance(by_hand(Reviewed).server.public.take(torch.arange(2)), Tensor)

    @pytest.mark.parametrize("normalize", ["dataset", "0.5/0.25"])
    def test_one_normalization_for_all_holds_for_the_server(self, normalize):
        hand = by_hand(Reviewed, normalize=normalize)
        own = hand.host.client(0).public[0]
        assert torch.equal(hand.server.public.take(torch.arange(len(own))), own.take(torch.arange(len(own)))[0])

    def test_where_clients_normalize_by_their_own_rows_the_server_does_so_too(self):
        server = by_hand(Reviewed, normalize="client").server
        x = server.public.take(torch.arange(len(server.public))).double()
        assert (x.mean().item(), x.std(correction=0).item()) == pytest.approx((0, 1), abs=1e-5)

    def test_rows_of_another_data_set(self):
        other = few_digits(30)
        server = by_hand(Reviewed, public_data=other, public_fraction=0.0).server
        assert len(server.public) == 30

    def test_they_must_be_needed(self):
        server = by_hand(Consensus).server
        with refused(UserCodeError, "Need.PUBLIC_AT_SERVER"):
            _ = server.public

    def test_there_must_be_public_data(self):
        with refused(MismatchError, "public data", "--public-fraction 0.1"):
            assemble_tiny(Reviewed, public_fraction=0.0)

    def test_the_server_learns_from_them(self):
        usual, other = (by_hand(Reviewed(review_steps=n)) for n in (3, 0))
        for hand in (usual, other):
            hand.round(0, range(4))
        aux, mean = (dict(hand.server.state.aux.state_dict()) for hand in (usual, other))
        assert sorted(differing(aux, mean)) == sorted(aux)


class TestSecondModel:
    def test_both_models_take_one_step_of_their_own_loss(self):
        hand = by_hand(Mutual)
        client, method = hand.host.client(1), hand.method
        client.begin(0, 0, {})
        batch = first_batch(client)
        models = {"model": client.model, "aux": client.state.aux}
        scores = {name: model(batch.x) for name, model in models.items()}
        losses = {
            one: 0.5 * F.cross_entropy(scores[one], batch.y)
            + 0.5 * F.kl_div(scores[one].log_softmax(1), scores[two].detach().softmax(1), reduction="batchmean")
            for one, two in (("model", "aux"), ("aux", "model"))
        }
        lr = hand.parts.local.rule.lr
        expected = {
            name: [p.detach() - lr * g for p, g in zip(model.parameters(), _grads(losses[name], model), strict=True)]
            for name, model in models.items()
        }
        loss = method.step(client, batch)
        assert torch.allclose(loss, losses["model"] + losses["aux"])
        for name, model in models.items():
            for value, want in zip(model.parameters(), expected[name], strict=True):
                assert torch.allclose(value, want, atol=1e-7)

    def test_the_second_model_travels_and_is_not_kept_twice(self):
        hand = by_hand(Mutual)
        hand.round(0, range(4))
        assert hand.host.client(0).got == {}
        aux = 4 * (64 * 64 + 64 + 64 * CLASSES + CLASSES)
        result = run_tiny(Mutual, rounds=1)
        for way in ("up", "down"):
            assert sum(payload(result, way).values()) == 4 * aux


def _grads(loss: Tensor, model: torch.nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


class TestEnrolment:
    def test_counts_travel_once_and_are_pooled(self):
        hand = by_hand(Counted)
        hand.round(0, range(4))
        hand.round(1, range(4))
        pooled = torch.tensor([hand.parts.data.counts(k) for k in range(4)]).sum(0).clamp(min=1)
        for k in range(4):
            assert torch.equal(hand.host.client(k).got["prior"], (pooled / pooled.sum()).log())
        result = run_tiny(Counted, rounds=3)
        assert payload(result, "up") == {"counts": 4 * CLASSES * 8}
        assert result.ledger.by("round", "up").keys() == {0}
        assert payload(result, "down") == {"prior": 3 * 4 * CLASSES * 4}

    def test_a_client_enrols_when_it_first_takes_part(self):
        result = run_tiny(Counted, rounds=6, participation=0.5)
        first: dict[int, int] = {}
        for entry in result.ledger.entries():
            if entry.direction == "down":
                first.setdefault(entry.client, entry.round)
        enrolled = {e.client: e.round for e in result.ledger.entries() if e.direction == "up"}
        assert enrolled == first
        assert len(set(first.values())) > 1

    def test_enrolment_outlives_a_stop(self):
        folder, settings = new_folder(), {"rounds": 4, "participation": 0.5, "checkpoint_every": 1}
        with pytest.raises(StoppedError):
            run_tiny(Counted, folder, observers=[StopAfter(1)], **settings)
        before = Checkpoint(Path(folder) / "state").enrolled()
        resumed = pluribus.resume(folder, progress=False)
        assert 2 <= len(before) <= 4
        senders = [e.client for e in resumed.ledger.entries() if (e.direction, e.tensor) == ("up", "counts")]
        assert len(senders) == len(set(senders))
        assert set(before) < set(senders) or len(before) == 4

    def test_a_client_does_not_see_what_the_server_keeps_on_its_card(self):
        hand = by_hand(Counted)
        hand.round(0, range(4))
        assert hand.parts.cards[0].enrolled is not None
        for host in (hand.host, make_host(hand.parts)):
            assert host.client(0).card.enrolled is None


class TestRows:
    def test_before_anything_came_nothing_is_held_and_nothing_pulls(self):
        hand = by_hand(Prototypes)
        client = hand.host.client(2)
        rows = client.got["prototypes"]
        assert isinstance(rows, Rows)
        assert rows.value.shape == (CLASSES, WIDTH)
        assert not rows.held.any()
        client.begin(0, 0, {"pull": 1.0})
        batch = first_batch(client)
        assert same_bits(hand.method.loss(client, batch).detach(), Method().loss(client, batch).detach())
        assert torch.equal(hand.method.predict(client, batch.x), client.model(batch.x))

    def test_only_held_rows_pull(self):
        hand = by_hand(Prototypes)
        client, method = hand.host.client(2), hand.method
        client.begin(0, 0, {"pull": 0.5})
        rows = client.got["prototypes"]
        batch = first_batch(client)
        held = int(batch.y[0])
        rows.value[held], rows.held[held] = 1.0, True
        features = client.features(batch.x)
        squares = ((features - 1) ** 2)[batch.y == held].sum() / features.numel()
        expected = F.cross_entropy(client.model(batch.x), batch.y) + 0.5 * squares
        assert torch.allclose(method.loss(client, batch), expected)
        assert method.predict(client, batch.x).argmax(1).tolist() == [held] * 10

    def test_what_the_server_holds_comes_down_whole(self):
        hand = by_hand(Prototypes, partition="pathological", classes_per_client=2)
        hand.round(0, range(4))
        sent = Rows(hand.server.state.prototypes.clone(), hand.server.state.held.clone())
        hand.round(1, range(4))
        assert sent.held.sum() == 8  # four clients of two classes each
        for k in range(4):
            rows = hand.host.client(k).got["prototypes"]
            assert same_bits(rows.held, sent.held)
            assert same_bits(rows.value, sent.value)

    def test_the_server_trains_with_momentum_that_outlives_the_round(self):
        hand = by_hand(Prototypes, server_lr=0.25, server_momentum=0.5)
        hand.server.begin(0, {})
        ones, held = torch.ones(CLASSES, WIDTH), torch.tensor([True] + [False] * (CLASSES - 1))
        for _ in range(2):
            hand.method.aggregate(hand.server, {0: Message({"means": Rows(ones * held[:, None], held)})})
        # p: 0 -> 0.25, speed: 0 -> -1; then gradient -0.75, speed -1.25, p 0.5625
        assert torch.equal(hand.server.state.prototypes, 0.5625 * held[:, None] * ones)
        assert torch.equal(hand.server.state.speed, -1.25 * held[:, None] * ones)
        assert hand.server.state.held.tolist() == held.tolist()

    def test_bytes_are_those_of_the_held_rows(self):
        result = run_tiny(Prototypes, rounds=1, data=few_digits(80), partition="pathological", classes_per_client=2)
        assert payload(result, "up") == {"means": 4 * 2 * WIDTH * 4, "means.ids": 4 * 2 * 4}
        assert payload(result, "down") == {"prototypes": 0, "prototypes.ids": 0}


class TestTime:
    def test_a_schedule_reaches_the_steps_of_its_round(self):
        hand = by_hand(Steady)
        for t, scale in ((0, 1.0), (1, 0.5)):
            hand.round(t, range(4))
            assert [hand.host.client(k).now["scale"].item() for k in range(4)] == [scale] * 4

    def test_a_schedule_is_there_for_clients_that_only_are_evaluated(self):
        hand = by_hand(Prototypes)
        hand.host.answer(Evaluate(3, 1))
        assert hand.host.client(3).now["pull"].item() == 1.0

    def test_the_round_number_is_not_for_steps(self):
        client = by_hand("local").host.client(0)
        client.begin(7, 0, {})
        assert client.t == 7
        with pytest.raises(RuntimeError, match="declare a schedule"):
            client.fit(lambda client, batch: torch.tensor(client.t))
        assert client.t == 7

    def test_moments_live_as_long_as_the_run_and_momentum_as_long_as_the_round(self):
        hand = by_hand(Steady)
        for t in range(2):
            hand.round(t, range(4))
        client = hand.host.client(0)
        steps = {value.item() for name, value in client.tensors().items() if name.endswith(".step")}
        batches = -(-client.card.samples // 10) - (client.card.samples % 10 == 1)
        assert steps == {2.0 * batches}
        other = by_hand("local", momentum=0.9).host.client(0)
        other.begin(0, 0, {})
        Method().local_update(other)
        assert not any(name.startswith("opt.") for name in other.tensors())
        assert any(value.any() for value in other.optimizers["model"].slots().values())
        other.begin(1, 0, {})
        assert not any(value.any() for value in other.optimizers["model"].slots().values())


class TestPeers:
    def test_a_student_learns_from_the_posteriors_on_its_teachers_batches(self):
        hand = by_hand(Peers)
        answers = hand.round(0, range(4))
        for student in range(4):
            inbox = hand.host.client(student).inbox
            assert inbox.ids == tuple(k for k in range(4) if k != student)
            for at, teacher in enumerate(inbox.ids):
                sent = tensors_of(answers[0, teacher], hand.host.wires(teacher)[0].up)["posteriors"]
                assert torch.equal(inbox.got["posteriors"][at], sent)
                assert torch.allclose(sent.sum(1), torch.ones(6))

    def test_the_loss_of_a_student(self):
        hand = by_hand(Peers)
        hand.round(0, range(4))
        client, method = hand.host.client(0), hand.method
        shown = method.shown(client, 1)
        x, y = shown.take(torch.arange(6))
        scores = client.model.eval()(x)
        targets = client.inbox.got["posteriors"][0]
        expected = (targets * (targets.log() - scores.log_softmax(1))).sum() / 6
        assert torch.allclose(method.imitate(client, Batch(x, y, torch.arange(6), 6)), expected, atol=1e-6)

    def test_bytes(self):
        lesson = 6 * CLASSES * 4
        everyone, pairs = run_tiny(Peers), run_tiny(Pairs)
        assert payload(everyone, "up") == payload(pairs, "up") == {"posteriors": 2 * 4 * lesson}
        assert payload(everyone, "down") == {"posteriors": 2 * 4 * 3 * lesson}
        assert payload(pairs, "down") == {"posteriors": 2 * 4 * lesson}

    def test_pairs_are_mutual_and_change(self):
        method, task = Pairs(), by_hand(Pairs).parts.task
        graphs = [method.topology(task, t, (0, 1, 2, 3, 5)) for t in range(8)]
        for graph in graphs:
            assert len(graph) == 4
            assert all(graph[other] == (one,) for one, (other,) in graph.items())
        assert len({tuple(sorted(graph.items())) for graph in graphs}) > 1

    def test_a_late_teacher_is_not_heard(self):
        result = run_tiny(Peers, rounds=4, straggler_rate=0.4)
        assert any(record["answered"] < 4 for record in result.history)
        for record in result.history:
            heard = [
                e
                for e in result.ledger.entries()
                if (e.round, e.direction, e.tensor) == (record["round"], "down", "posteriors")
            ]
            assert len(heard) == record["answered"] * (record["answered"] - 1)


class TestOwnViews:
    def test_adapted_is_one_step_from_the_global_model(self):
        hand = by_hand(Adapted)
        hand.round(0, range(4))
        client = hand.host.client(0)
        measured = hand.host.answer(Evaluate(0, 0, hand.download(0, 0))).figures
        assert list(measured) == ["adapted", "before"]
        seen = {}
        with client.fork():
            for view in measured:
                client.model.load_state_dict(hand.server.state.shared.state_dict())
                client.begin(0, f"evaluation {view}", {})
                hand.method.adapt(client, view)
                x, y = client.data["test"].take(torch.arange(len(client.data["test"])))
                with torch.no_grad():
                    seen[view] = F.cross_entropy(client.model.eval()(x), y).item()
        assert seen["adapted"] != seen["before"]
        for view, loss in seen.items():
            assert measured[view]["test_loss"] == pytest.approx(loss, rel=1e-5)

    def test_adaptation_starts_without_the_momentum_of_training(self):
        after_training, fresh = by_hand(Adapted, momentum=0.9), by_hand(Adapted, momentum=0.9)
        for k in range(4):
            after_training.host.answer(Work(k, 0, 0, after_training.download(0, k)))
        figures = [hand.host.answer(Evaluate(0, 0, hand.download(0, 0))).figures for hand in (after_training, fresh)]
        assert figures[0] == figures[1]


class TestRuntimeSizes:
    def test_lists_of_any_length_up_to_the_most(self):
        hand = by_hand(Sampled)
        hand.round(0, range(4))
        hand.round(1, range(4))
        sent = [min(5, hand.parts.cards[k].samples) for k in range(4)]
        client = hand.host.client(0)
        assert client.got == {}
        assert client.state.there.sum().item() == sum(sent)
        assert client.state.y[: sum(sent)].tolist() == [
            label for k in range(4) for label in hand.parts.data.sets(k)["train"].labels()[:5].tolist()
        ]

    def test_a_longer_list_is_refused(self):
        hand = by_hand(Sampled)
        message = Message({"z": torch.zeros(6, WIDTH), "y": torch.zeros(6, dtype=torch.int64)})
        with refused(SchemaError, "client 0", "'y'", "(6,)", "(rows <= 5)"):
            encode(message, hand.host.wires(0)[0].up, "client 0")

    def test_what_has_no_fixed_size_cannot_be_kept(self):
        class Keeps(Sampled):
            def _list(self, task, card, most):
                return {
                    name: dataclasses.replace(field, kept=True)
                    for name, field in super()._list(task, card, most).items()
                }

        parts = dataclasses.replace(assemble_tiny(Sampled), method=Keeps())
        with pytest.raises(TypeError, match="kept=False"):
            make_host(parts).client(0)

    def test_bytes(self):
        result = run_tiny(Sampled, partition="iid")
        assert payload(result, "up") == {"z": 2 * 4 * 5 * WIDTH * 4, "y": 2 * 4 * 5 * 8}
        assert payload(result, "down") == {"z": 4 * 20 * WIDTH * 4, "y": 4 * 20 * 8}  # nothing in round 0


class TestState:
    def test_a_tensor_that_is_set_again_stays_where_it_is(self):
        client = by_hand(Sampled).host.client(0)
        address = client.state.there.data_ptr()
        client.state.there = client.state.there + 1
        assert client.state.there.data_ptr() == address
        assert client.state.there.sum() == 20

    def test_another_shape_is_refused(self):
        client = by_hand(Sampled).host.client(0)
        with pytest.raises(ValueError, match=r"'there' has shape \(20,\), not \(\)"):
            client.state.there = torch.tensor(1.0)

    def test_what_was_not_there_from_the_start_is_refused(self):
        host = by_hand(Sampled).host
        with pytest.raises(AttributeError, match=r"state\.late is new: allocate it in prepare"):
            host.client(0).state.late = torch.zeros(3)
        with pytest.raises(AttributeError, match=r"state\.model is new"):
            host.client(0).state.model = torch.nn.Linear(1, 1)

    def test_what_could_not_be_saved_is_refused(self):
        client = by_hand(Sampled).host.client(0)
        with pytest.raises(TypeError, match=r"state\.rounds is of type int: only tensors and modules are saved"):
            client.state.rounds = 3

    def test_the_server_allocates_in_setup_alone(self):
        class Late(Method):
            """Allocates when it is too late."""

            def schema(self, task, card):
                return Wire(up={"one": Field((1,))})

            def local_update(self, client: Client) -> Message:
                return Message({"one": torch.ones(1)})

            def aggregate(self, server, uploads) -> None:
                server.state.sum = sum(upload.tensor("one") for upload in uploads.values())

        folder = RunFolder.create(new_folder())
        with pytest.raises(AttributeError, match="allocate it in prepare"):
            Federation(dataclasses.replace(assemble_tiny("local"), method=Late()), folder).run()
        folder.close()

    def test_a_fork_forgets_what_was_set_in_it(self):
        client = by_hand(Sampled).host.client(0)
        with client.fork():
            client.state.there = torch.ones(20)
        assert client.state.there.sum() == 0


class Whisper(Method):
    """Declares nothing, and sends all the same."""

    exchanges = (Exchange(None, "local_update", None),)

    def local_update(self, client: Client) -> Message:
        return Message({"labels": client.data["train"].labels()})


def test_a_method_that_declares_nothing_cannot_send():
    host = make_host(dataclasses.replace(assemble_tiny("local"), method=Whisper()))
    assert host.wires(0) == (Wire(),)
    with refused(SchemaError, "client 0", "'labels'"):
        host.answer(Work(0, 0))


def test_a_name_is_registered_once(monkeypatch):
    monkeypatch.setattr("pluribus.method._registry", {})
    register("mine")(Steady)
    register("mine")(Steady)  # its module is loaded again
    with refused(UserCodeError, "'mine'", "registered"):
        register("mine")(Mutual)


class TestOptimizers:
    def test_a_frozen_part_does_not_move(self):
        class HeadOnly(Method):
            def optimizers(self, client: Client) -> dict[str, Opt]:
                return {"model": Opt(client.model.head, Rule(lr=0.1))}

        host = make_host(dataclasses.replace(assemble_tiny("local"), method=HeadOnly()))
        client = host.client(1)
        before = {name: value.clone() for name, value in client.model.state_dict().items()}
        host.answer(Work(1, 0))
        assert sorted(differing(before, client.model.state_dict())) == ["head.bias", "head.weight"]

    @pytest.mark.parametrize("method", ["fedgh", Adapted])
    def test_momentum_of_a_round_depends_on_nothing_but_the_round(self, method, monkeypatch):
        settings = {"momentum": 0.9, "rounds": 3, "participation": 0.5, "checkpoint_every": 1}
        straight, folder = run_tiny(method, **settings), new_folder()
        with pytest.raises(StoppedError):
            run_tiny(method, folder, observers=[StopAfter(1)], **settings)
        assert_same(straight, pluribus.resume(folder, progress=False))
        monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
        assert_same(straight, run_tiny(method, **settings))


class TestTurns:
    def test_the_method_decides_who_takes_part(self):
        result = run_tiny(Turns, rounds=8)
        task = assemble_tiny(Turns, rounds=8).task
        assert [record["present"] for record in result.history] == [1] * 8
        drawn = {Turns().participants(task, t)[0] for t in range(8)}
        assert len(drawn) > 1
        assert set(Checkpoint(result.folder / "state")._newest) == drawn


class TestPlainSGD:
    @pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=["momentum", "adam"])
    def test_anything_else_is_refused(self, settings):
        with refused(ConflictError, "SGD", "--optimizer sgd", "--momentum 0"):
            assemble_tiny(Careful, **settings)

    def test_plain_sgd_is_taken(self):
        assert assemble_tiny(Careful, weight_decay=0.1, lr_decay=0.9).local.rule.name == "sgd"

    def test_clipped_gradients_are_refused(self):
        with refused(ConflictError, "--clip-norm"):
            assemble_tiny(Careful, clip_norm=1.0)

    def test_a_rate_that_is_constant_in_a_round_is_taken(self):
        assert assemble_tiny(Careful, lr_schedule="cosine", lr_warmup=1).local.rule.rate(1) == 0.05


class TestServerOptimizer:
    @staticmethod
    def server() -> Server:
        server = server_of(task_of(2, 2), {0: 1})
        server.state.net = nn.Linear(2, 1)
        with torch.no_grad():
            server.state.net.weight.fill_(0.5)
            server.state.net.bias.zero_()
        server.optimize("net", server.state.net, Rule("adam", lr=0.1))
        server.state.fix()
        return server

    @staticmethod
    def steps(server: Server, number: int) -> None:
        for _ in range(number):
            server.descend(server.state.net(torch.ones(1, 2)).square().sum(), "net")

    def test_what_it_remembers_is_saved_and_restored_in_place(self):
        straight, first, second = (self.server() for _ in range(3))
        self.steps(straight, 5)
        self.steps(first, 3)
        saved = {name: value.clone() for name, value in first.state.state_dict().items()}
        put_back(second.state.state_dict(), saved, "the server")
        self.steps(second, 2)
        assert differing(straight.state.state_dict(), second.state.state_dict()) == []
        assert any("exp_avg" in name for name in saved)

    def test_the_first_step_of_adam_moves_by_its_rate(self):
        server = self.server()
        self.steps(server, 1)
        torch.testing.assert_close(server.state.net.weight, torch.full((1, 2), 0.4))


@pytest.mark.parametrize(("former", "now"), [("optimisers", "optimizers"), ("settled", "complete")])
def test_a_hook_by_its_former_name_is_refused(former: str, now: str) -> None:
    with refused(UserCodeError, "Old", former, now):
        type("Old", (Method,), {former: lambda self: None})
