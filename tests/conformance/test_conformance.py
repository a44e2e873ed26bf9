"""What holds for every method. Whatever is registered is tested here, with nothing to add; so are the toy methods."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pluribus
from conftest import assemble_tiny, few_digits, make_host, new_folder, run_tiny
from kit import (
    ByHand,
    StepError,
    StopAfter,
    StoppedError,
    assert_same,
    check_step,
    checked_steps,
    differing,
    everything,
    kept,
    numbers,
)
from pluribus.assembly import Assembly
from pluribus.client import Batch, Client
from pluribus.data.datasets import write_npz
from pluribus.errors import MismatchError, SchemaError
from pluribus.experiment import Experiment
from pluribus.federation import Federation
from pluribus.host import Host
from pluribus.internal.ledger import Entry, Ledger
from pluribus.message import Dim, Field, Message, Schema, Wire, tensor_bytes
from pluribus.method import Method, Need, PeerMethod, Sizes, find, hyperparameters, methods, name_of
from pluribus.request import Evaluate
from pluribus.result import Result
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.folder import RunFolder
from refusals import refused
from toys import TOYS, Constant, Deaf, Misnamed, Overlooked, Uninstalled, Unmerged, Unread

NAMES = [*methods(), *(name_of(toy) for toy in TOYS)]
# The tests of a method share its runs, so one process has them all.
every_method = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in NAMES])


# ---- how methods are run here --------------------------------------------------------------------------------------


# What stands in for models without weights where a method needs pretrained ones.
PRETRAINED = {
    "small": "tiny",
    "toys.normed": "tiny-cnn-64",
    "mlp-64,cnn-16-32": "tiny-vit-32,tiny-cnn-64",
}

# Hyper-parameters that some methods have, and values that suit the shortest of runs.
SHORT = {
    "matched_batch": 10**6,  # a bandwidth that pays for a model every round
    "pretrain_public": 2,
    "pretrain_private": 2,
    "head_epochs": 2,
    "finetune_epochs": 2,
    "server_epochs": 5,
    "generator_steps": 5,
    "warmup": 0,
}


def fitting(name: str, **settings: Any) -> dict[str, Any]:
    """Settings that are small, that the method can work with, and under which a checkpoint follows every round."""
    cls = find(name)
    small: dict[str, Any] = {
        "data": few_digits(160),
        "partition": "dirichlet",
        "evaluate_every": 1,
        "checkpoint_every": 1,
    }
    if Need.PUBLIC_DATA in cls.needs and not cls.defaults.get("public_fraction"):
        small["public_fraction"] = 0.2
    small |= {field.name: SHORT[field.name] for field in dataclasses.fields(cls) if field.name in SHORT}
    if Need.PRETRAINED in cls.needs and "models" in settings:
        alone = Need.SAME_MODEL in cls.needs and settings["models"] != "small"
        settings["models"] = cls.defaults["models"] if alone else PRETRAINED[settings["models"]]
    return small | settings


def run(name: str, **settings: Any) -> Result:
    return run_tiny(name, **fitting(name, **settings))


# ---- what many tests look at, and none may change ------------------------------------------------------------------


@cache
def plain_parts(name: str) -> Assembly:
    """To look at. Whoever lets clients work needs parts of its own: cards remember who enrolled."""
    return assemble_tiny(name, **fitting(name))


@cache
def born(name: str) -> dict[str, Tensor]:
    """What will be trained, before anything was."""
    return trained(make_host(plain_parts(name)))


def trained(host: Host) -> dict[str, Tensor]:
    """Everything that an optimizer of a client moves, by client and optimizer, as one vector."""
    return {key: value for k in host.cards for key, value in trained_by(host.client(k)).items()}


def trained_by(client: Client) -> dict[str, Tensor]:
    return {
        f"client {client.card.id} {name}": torch.cat([p.detach().flatten() for p in optimizer.parameters.values()])
        for name, optimizer in client.optimizers.items()
    }


@dataclass(frozen=True)
class Watched:
    """A run to its end; what round 1 started from; and all messages that were booked: direction, client, bytes."""

    result: Result
    at_start: dict[str, Tensor]
    booked: list[tuple[str, int, bytes]]


@cache
def watched_run(name: str) -> Watched:
    at_start: dict[str, Tensor] = {}
    booked: list[tuple[str, int, bytes]] = []
    fit, add = Client.fit, Ledger.add

    def watched_fit(client: Client, *args: Any, **how: Any) -> int:
        if client.t == 1:
            at_start.update({key: value for key, value in trained_by(client).items() if key not in at_start})
        return fit(client, *args, **how)

    def watched_add(ledger: Ledger, t: int, exchange: int, client: int, direction: str, data: bytes) -> None:
        booked.append((direction, client, data))
        add(ledger, t, exchange, client, direction, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "fit", watched_fit)
        patch.setattr(Ledger, "add", watched_add)
        return Watched(run(name), at_start, booked)


def plain_run(name: str) -> Result:
    return watched_run(name).result


@cache
def eventful_run(name: str) -> Result:
    return run(name, **EVENTFUL)


# Of clients 0 and 3 the latter is late, then 1 is alone, then come 1 and 3 again and 2 for the first time.
EVENTFUL = {"rounds": 3, "participation": 0.75, "drop_rate": 0.3, "straggler_rate": 0.3, "seed": 1}


@dataclass(frozen=True)
class Worked:
    """Two rounds without the loop: what was answered, the server before and after each round, and all tensors now."""

    hand: ByHand
    answers: list[dict[tuple[int, int], bytes | None]]
    server: list[dict[str, Tensor]]
    tensors: dict[str, Tensor]


@cache
def by_hand(name: str) -> Worked:
    hand = ByHand(assemble_tiny(name, **fitting(name)), listening=1)
    answers, server = [], [server_of(hand)]
    for t in range(2):
        answers.append(hand.round(t, range(4)))
        server.append(server_of(hand))
    return Worked(hand, answers, server, hand.tensors())


def server_of(hand: ByHand) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in hand.server.state.state_dict().items()}


# ---- state ---------------------------------------------------------------------------------------------------------


@every_method
def test_whatever_has_an_optimizer_learns_and_what_it_learned_is_kept(name):
    saved = Checkpoint(plain_run(name).folder / "state")
    later = make_host(plain_parts(name), saved.client)
    assert sorted(differing(born(name), trained(later))) == sorted(born(name))
    for k in later.cards:
        client = later.client(k)
        kept_at = {value.data_ptr() for value in client.tensors().values()}
        for key, optimizer in client.optimizers.items():
            lost = [n for n, p in optimizer.parameters.items() if p.data_ptr() not in kept_at]
            assert lost == [], f"optimizer '{key}' trains what is neither in client.model nor in client.state"


@every_method
def test_the_next_round_starts_from_what_was_learned(name):
    at_start = watched_run(name).at_start
    assert at_start.keys() == born(name).keys()
    assert sorted(differing(born(name), at_start)) == sorted(at_start)


@every_method
def test_the_server_learns_from_uploads(name):
    hand, (before, after, _) = by_hand(name).hand, by_hand(name).server
    if not before or not any(w.up for w in hand.host.wires(0)):
        pytest.skip("nothing is learned on the server")
    changed = differing(before, after)
    assert changed
    for part, module in hand.server.state.named_children():
        if any(p.requires_grad for p in module.parameters()):
            assert [n for n in changed if n.startswith(f"{part}.")], f"server.state.{part} is in no aggregation"


# ---- everyone counts -----------------------------------------------------------------------------------------------


@cache
def lonely_digits() -> str:
    """Four classes of 60, 30, 8 and 2 images: one class per client leaves the last client one training sample."""
    with np.load(few_digits(1797)) as digits:
        x, y = digits["x_train"], digits["y_train"]
    rows = np.concatenate([np.flatnonzero(y == label)[:size] for label, size in enumerate((60, 30, 8, 2))])
    path = Path(new_folder()) / "lonely.npz"
    none = {"x_test": x[:0], "y_test": y[:0]}
    write_npz(path, {"x_train": x[rows], "y_train": y[rows], "classes": np.array(list("0123")), **none})
    return str(path)


def assert_everyone_counts(result: Result) -> None:
    everyone = {str(k) for k in range(4)}
    for record in result.history:
        assert record["clients"].keys() == everyone
        assert record["present"] == record["answered"] == 4
        assert record["loss"] is not None
        assert np.isfinite(record["loss"])
    for k, views in result.history[-1]["clients"].items():
        assert views.keys() == set(result.views)
        for figures in views.values():
            assert 0 <= figures["test"] <= 1 if result.clients[int(k)].test else figures["test"] is None
    assert all(bool(value.isfinite().all()) for value in kept(result).values())


@every_method
def test_every_client_appears_in_every_evaluated_round(name):
    result = plain_run(name)
    assert any(len(facts.classes) < 10 for facts in result.clients.values()), "some client misses a class"
    assert_everyone_counts(result)


@every_method
def test_one_class_clients_and_a_client_with_one_sample(name):
    alone = {"data": lonely_digits(), "partition": "pathological", "classes_per_client": 1}
    result = run(name, rounds=1, models="toys.normed", **alone)
    assert [len(facts.classes) for facts in result.clients.values()] == [1, 1, 1, 1]
    assert sorted(facts.train for facts in result.clients.values())[0] == 1
    assert_everyone_counts(result)


@every_method
def test_a_task_of_two_classes(name):
    assert_everyone_counts(run(name, rounds=1, data=few_digits(80, classes=2)))


@every_method
def test_less_data_than_one_batch(name):
    assert_everyone_counts(run(name, rounds=1, batch_size=500))


@every_method
def test_mixed_architectures_unless_the_method_refuses_them(name):
    if Need.SAME_MODEL in find(name).needs:
        with refused(MismatchError, name, "clients 0 ", "--models"):
            run(name, models="small")
        return
    result = run(name, models="small", rounds=1)
    assert len({facts.model for facts in result.clients.values()}) == (3 if Need.PRETRAINED in find(name).needs else 4)
    assert_everyone_counts(result)


# ---- equal bits ----------------------------------------------------------------------------------------------------


@every_method
def test_same_seed_same_bits_also_where_clients_leave_memory_and_come_back(name, monkeypatch):
    roomy = plain_run(name)
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
    assert_same(roomy, run(name))


@every_method
def test_another_seed_other_numbers(name):
    other = run(name, seed=1)
    reborn = trained(make_host(assemble_tiny(name, **fitting(name, seed=1))))
    assert sorted(differing(born(name), reborn)) == sorted(reborn)
    assert numbers(other) != numbers(plain_run(name))
    assert differing(kept(other), kept(plain_run(name)))


@every_method
def test_a_stopped_run_resumes_to_the_same_bits(name):
    folder = new_folder()
    with pytest.raises(StoppedError):
        run_tiny(name, folder, observers=[StopAfter(1)], **fitting(name, **EVENTFUL))
    assert_same(eventful_run(name), pluribus.resume(folder, progress=False))


@every_method
def test_the_order_of_clients_does_not_matter(name):
    forwards, backwards = by_hand(name), ByHand(assemble_tiny(name, **fitting(name)))
    assert [backwards.round(t, reversed(range(4))) for t in range(2)] == forwards.answers
    assert differing(forwards.tensors, backwards.tensors()) == []


@every_method
def test_the_loop_is_what_the_parts_do_by_hand_without_evaluation(name):
    assert differing(by_hand(name).tensors, kept(plain_run(name))) == []


@every_method
def test_evaluation_leaves_no_trace(name):
    hand, before = by_hand(name).hand, by_hand(name).tensors
    for k in hand.parts.cards:
        measured = hand.host.answer(Evaluate(k, 1, hand.download(0, k))).figures
        assert measured.keys() == set(hand.method.views)
    assert differing(before, hand.tensors()) == []


@pytest.mark.xdist_group("fedgh")
def test_rare_evaluation_learns_the_same():
    rare = run("fedgh", evaluate_every=2)
    assert [bool(record["clients"]) for record in rare.history] == [False, True]
    assert differing(kept(rare), kept(plain_run("fedgh"))) == []


# ---- messages ------------------------------------------------------------------------------------------------------


@every_method
def test_bytes_are_what_was_serialized_and_what_the_schema_says(name):
    result, booked, host = plain_run(name), watched_run(name).booked, make_host(plain_parts(name))
    for direction, client, data in booked:
        assert sum(tensor_bytes(data).values()) == len(data)
        assert any(_fits(data, schema) for schema in _schemas(host, client, direction)), (direction, tensor_bytes(data))
    for way, total in result.bytes.items():
        assert total == sum(len(data) for direction, _, data in booked if direction == way)
        assert total == sum(result.ledger.by("tensor", way).values()) == sum(result.ledger.by("client", way).values())
        assert total == sum(record["bytes"][way] for record in result.history)


def _schemas(host: Host, client: int, direction: str) -> list[Schema]:
    """What may go this way: of a peer method what comes down is what another sent up."""
    wires = host.wires(client)
    if direction == "up":
        return [schema for wire in wires for schema in (wire.up, wire.once)]
    if isinstance(host.method, PeerMethod):
        return [wire.up for wire in wires]
    return [wire.down for wire in wires]


def _fits(data: bytes, schema: Schema) -> bool:
    """Whether each tensor has exactly the bytes that its declared shape and dtype come to."""
    sizes = tensor_bytes(data)
    del sizes["(header)"]
    expected: dict[str, int] = {}
    for name, field in schema.items():
        if field.optional and name not in sizes:
            continue
        if field.form == "rows":
            expected[f"{name}.ids"] = sizes.get(f"{name}.ids", -1)
            expected[name] = expected[f"{name}.ids"] // 4 * _size(Field(field.shape[1:], field.dtype))
        else:
            fixed = Field(tuple(1 if isinstance(size, Dim) else size for size in field.shape), field.dtype)
            ragged = any(isinstance(size, Dim) for size in field.shape)
            expected[name] = sizes.get(name, -1) if ragged and not sizes.get(name, -1) % _size(fixed) else _size(fixed)
    return sizes == expected


def _size(field: Field) -> int:
    return int(np.prod([size for size in field.shape if isinstance(size, int)])) * field.dtype.itemsize


@every_method
def test_no_client_sends_or_gets_more_in_a_round_than_the_method_says(name):
    parts, wires = plain_parts(name), make_host(plain_parts(name)).wires
    known = {label for k in parts.cards for label, count in enumerate(parts.data.counts(k)) if count}
    found: dict[tuple[str, int, int], int] = {}
    for entry in plain_run(name).ledger.entries():
        if entry.tensor != "(header)" and not _enrolled(wires(entry.client)[0], entry):
            key = entry.direction, entry.client, entry.round
            found[key] = found.get(key, 0) + entry.bytes
    for k, card in parts.cards.items():
        held = sum(count > 0 for count in parts.data.counts(k))
        most = parts.method.traffic(parts.task, card, Sizes(held, len(known), parts.local.batch))
        for direction, t in itertools.product(("up", "down"), range(2)):
            assert found.get((direction, k, t), 0) <= getattr(most, direction), f"{direction} {k} in round {t}"


def _enrolled(wire: Wire, entry: Entry) -> bool:
    """Whether this went up when the client enrolled, which is once."""
    return entry.direction == "up" and entry.tensor.removesuffix(".ids") in wire.once


def leaking(cls: type[Method], function: str) -> type[Method]:
    """The same method, except that what this function sends has a field more."""

    def leak(self: Method, *args: Any) -> Message:
        message = getattr(super(leaky, self), function)(*args) or Message({})
        return Message({**message, "secret": torch.ones(1)})

    leaky = type(cls.__name__, (cls,), {function: leak})
    return leaky


@every_method
def test_what_is_not_declared_never_leaves_a_client(name):
    cls = find(name)
    functions = ["teach"] if issubclass(cls, PeerMethod) else [exchange.work for exchange in cls.exchanges]
    for function in functions + ["enrol"] * cls.enrols:
        parts = assemble_tiny(name, **fitting(name))
        hand = ByHand(dataclasses.replace(parts, method=leaking(cls, function)(**hyperparameters(parts.method))))
        with refused(SchemaError, "'secret'"):
            hand.round(0, parts.cards)


@every_method
def test_what_is_not_declared_never_leaves_the_server(name):
    cls = find(name)
    for function in filter(None, (exchange.down for exchange in cls.exchanges)):
        parts = assemble_tiny(name, **fitting(name))
        folder = RunFolder.create(new_folder(), name)
        leaky = dataclasses.replace(parts, method=leaking(cls, function)(**hyperparameters(parts.method)))
        with refused(SchemaError, "'secret'"):
            Federation(leaky, folder).run()
        folder.close()


def unheeded(name: str) -> dict[str, list[str]]:
    """What nobody reads of uploads, and what makes no difference to a client of what comes down."""
    hand = by_hand(name).hand
    return {direction: fields for direction in ("up", "down") if (fields := hand.ignored(direction))}


@every_method
def test_whatever_travels_is_heeded(name):
    assert unheeded(name) == {}
    hand = by_hand(name).hand
    downs = [wire.up for wire in hand.host.wires(0)] if isinstance(hand.method, PeerMethod) else []
    downs = downs or [wire.down for wire in hand.host.wires(0)]
    tried = {field for (direction, _), field in hand.sent if direction == "down"}
    assert {n for schema in downs for n, field in schema.items() if not field.optional} <= tried, "nothing came down"


@every_method
def test_predictions_depend_on_the_image(name):
    """Two rounds make no good model, but some client of four tells some image from another."""
    assert by_hand(name).hand.classes_predicted(1) > 1


@pytest.mark.parametrize(
    ("toy", "fields"),
    [
        (Unread, {"up": ["samples"]}),
        (Unmerged, {"up": ["head.bias", "head.weight"]}),
        (Overlooked, {"down": ["prior"]}),
        (Uninstalled, {"down": ["head.bias", "head.weight"]}),
        (Misnamed, {"up": ["head.bias", "head.weight"], "down": ["head.bias", "head.weight"]}),
        (Deaf, {"down": ["posteriors"]}),
    ],
)
def test_a_field_that_nobody_heeds_is_found(toy, fields):
    assert unheeded(name_of(toy)) == fields
    assert by_hand(name_of(toy)).hand.classes_predicted(1) > 1, "and nothing else is wrong with it"


def test_constant_predictions_are_found():
    assert by_hand(name_of(Constant)).hand.classes_predicted(1) == 1
    assert unheeded(name_of(Constant)) == {}


# ---- who takes part ------------------------------------------------------------------------------------------------


@every_method
def test_some_take_part_some_go_away_some_are_late(name):
    result = eventful_run(name)
    assert any(record["answered"] < record["present"] for record in result.history)
    for record in result.history:
        assert record["answered"] <= record["present"] <= 3
        assert len(record["clients"]) == 4


@every_method
@pytest.mark.parametrize("trouble", ["drop_rate", "straggler_rate"])
def test_a_round_without_answers_leaves_the_server_unchanged(name, trouble):
    result = run(name, rounds=1, **{trouble: 0.999999})
    assert result.history[0]["answered"] == 0
    assert result.history[0]["present"] == (0 if trouble == "drop_rate" else 4)
    assert len(result.history[0]["clients"]) == 4
    assert differing(Checkpoint(result.folder / "state").server(), by_hand(name).server[0]) == []


# ---- steps ---------------------------------------------------------------------------------------------------------


@every_method
def test_steps_are_pure_tensor_programs(name):
    mixed = {} if Need.SAME_MODEL in find(name).needs else {"models": "mlp-64,cnn-16-32"}
    settings = fitting(name, clients=2, partition="iid", **mixed)
    with checked_steps(assemble_tiny(name, **settings).method) as checked:
        run_tiny(name, **settings)
    assert checked, "no step was seen: client.fit is how a method trains"


class Steps(Method):
    """Steps that the kit must tell apart."""

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        return {"scale": 0.5**t}

    def prepare(self, client: Client) -> None:
        client.state.seen = torch.zeros(client.task.classes)
        client.state.calls = torch.zeros(())

    def scheduled(self, client: Client, batch: Batch) -> Tensor:
        loss = self.loss(client, batch) * client.now["scale"]
        client.state.seen += (batch.y[:, None] == torch.arange(client.task.classes)).sum(0)
        client.state.calls = client.state.calls + 1
        client.descend(loss)
        return loss

    def with_item(self, client: Client, batch: Batch) -> Tensor:
        loss = self.loss(client, batch)
        client.descend(loss / max(loss.item(), 1.0))
        return loss

    def with_branch(self, client: Client, batch: Batch) -> Tensor:
        loss = self.loss(client, batch)
        client.descend(loss if loss < 1 else 0.5 * loss)
        return loss

    def with_selection(self, client: Client, batch: Batch) -> Tensor:
        loss = F.cross_entropy(client.model(batch.x[batch.y > 2]), batch.y[batch.y > 2])
        client.descend(loss)
        return loss

    def with_onehot(self, client: Client, batch: Batch) -> Tensor:
        loss = F.mse_loss(client.model(batch.x), F.one_hot(batch.y).float())
        client.descend(loss)
        return loss

    def with_baked_schedule(self, client: Client, batch: Batch) -> Tensor:
        loss = self.loss(client, batch) * 0.5**client._round
        client.descend(loss)
        return loss

    def with_counter(self, client: Client, batch: Batch) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        loss = self.loss(client, batch) / self.calls
        client.descend(loss)
        return loss

    def with_round_number(self, client: Client, batch: Batch) -> Tensor:
        loss = self.loss(client, batch) * 0.5**client.t
        client.descend(loss)
        return loss


def checked_on_every_model(step: str) -> None:
    method = Steps()
    host = make_host(dataclasses.replace(assemble_tiny("local"), method=method))
    for k in range(4):
        client = host.client(k)
        client.begin(0, 0, method.schedule(0, 2))
        check_step(method, client, getattr(method, step), client.data["train"], 10)


def test_a_clean_step_is_accepted_and_leaves_no_trace():
    checked_on_every_model("scheduled")
    method = Steps()
    client = make_host(dataclasses.replace(assemble_tiny("local"), method=method)).client(3)
    client.begin(0, 0, method.schedule(0, 2))
    before = {name: value.clone() for name, value in everything(client).items()}
    check_step(method, client, method.scheduled, client.data["train"], 10)
    assert differing(before, everything(client)) == []
    assert client.t == 0


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("with_item", "without numbers"),
        ("with_branch", "without numbers"),
        ("with_selection", "without numbers"),
        ("with_onehot", "without numbers"),
        ("with_round_number", "must not read client.t"),
        ("with_baked_schedule", "a replay differs"),
        ("with_counter", "a replay differs"),
    ],
)
def test_a_step_that_could_not_be_captured_is_refused(step, reason):
    with pytest.raises(StepError, match=reason):
        checked_on_every_model(step)


# ---- what a method says of itself ----------------------------------------------------------------------------------


@every_method
def test_hyperparameters_have_names_of_their_own_and_a_word_of_explanation(name):
    cls = find(name)
    assert dataclasses.is_dataclass(cls)
    own = {field.name for field in dataclasses.fields(cls)}
    assert own & {field.name for field in dataclasses.fields(Experiment)} == set()
    assert own - set().union(*(_explained(base) for base in cls.__mro__ if dataclasses.is_dataclass(base))) == set()


def _explained(cls: type) -> set[str]:
    """Fields that are followed by a string."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        line.target.id
        for line, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


@every_method
def test_a_method_says_what_it_is_and_what_travels(name):
    cls, wires = find(name), make_host(plain_parts(name)).wires(0)
    assert "__doc__" in vars(cls)
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass made up"
    assert cls.paper
    assert (cls.up != "nothing") == any(wire.up or wire.once for wire in wires)
    if not issubclass(cls, PeerMethod):
        assert (cls.down != "nothing") == any(wire.down for wire in wires)
    assert len(wires) == (1 if issubclass(cls, PeerMethod) else len(cls.exchanges))


@every_method
def test_a_method_is_frozen_and_holds_no_tensors(name):
    method = plain_parts(name).method
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.anything = 1
    assert not any(isinstance(value, Tensor | nn.Module) for value in vars(method).values())


# ---- what is counted -------------------------------------------------------------------------------------------------


@every_method
def test_every_gradient_step_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of enrolment and of all exchanges, and none that evaluation takes."""
    taken: dict[tuple[int, int], int] = {}
    fit = Client.fit

    def watched(client: Client, *args: Any, **how: Any) -> int:
        steps = fit(client, *args, **how)
        if not str(client._exchange).startswith("evaluation"):
            key = max(0, client.round), client.card.id
            taken[key] = taken.get(key, 0) + steps
        return steps

    monkeypatch.setattr(Client, "fit", watched)
    result = run(name, rounds=3)
    counted = {(record["round"], int(k)): n for record in result.history for k, n in record["steps"].items()}
    assert {key: n for key, n in counted.items() if n} == {key: n for key, n in taken.items() if n}
    assert sum(counted.values()) > 0
    assert result.steps == {k: sum(n for (_, j), n in counted.items() if j == k) for k in range(4)}
