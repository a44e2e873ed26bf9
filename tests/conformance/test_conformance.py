"""What holds for every method. Whatever is registered is tested here, with nothing to add; so are the toy methods.

Most of it is the conformance kit of the library, which users run with `pluribus check`. The rest are rules of this
house, and tests of the library that need many methods. `test_check.py` has methods that break a promise each.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import assemble_tiny, make_host, new_folder
from kit import ByHand, StepError, check_step, differing, everything, kept
from pluribus.client import Batch, Client
from pluribus.conformance import every_kind
from pluribus.conformance.cases import Case
from pluribus.conformance.clients import EVENTFUL
from pluribus.conformance.digits import LONELY
from pluribus.conformance.hands import worked
from pluribus.conformance.kinds import SAMPLES, Sample
from pluribus.conformance.methods import PROMISES
from pluribus.conformance.promise import Promise
from pluribus.errors import MismatchError, SchemaError
from pluribus.experiment import Experiment
from pluribus.federation import Federation
from pluribus.inputs import KINDS
from pluribus.message import Message
from pluribus.method import Method, Need, PeerMethod, find, hyperparameters, methods, name_of, takes_one_model
from pluribus.models.capacity import architecture_of
from pluribus.result import Result
from pluribus.storage.folder import RunFolder
from pluribus.targets import TARGETS
from refusals import refused
from toys import TOYS, Constant, Deaf, Misnamed, Overlooked, Turns, Uninstalled, Unmerged, Unread

NAMES = [*methods(), *(name_of(toy) for toy in (*TOYS, Turns))]
# The tests of a method share its runs, so one process has them all.
every_method = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in NAMES])

# Worker processes and GPUs are in tests/engines, and other rows than images below.
ELSEWHERE = ("worker processes give the same bits", "captured steps give the same bits")
HERE = {one.name: one for one in PROMISES if one.name not in ELSEWHERE and one not in every_kind.PROMISES}


@cache
def case_of(name: str) -> Case:
    return Case(name, Path(new_folder()))


def case_for(promise: str, name: str) -> Case:
    """The case under which a promise is checked."""
    return case_of(name).but(**HERE[promise].settings)


@every_method
@pytest.mark.parametrize("promise", HERE.values(), ids=HERE)
def test_a_method_keeps(name: str, promise: Promise[Case]) -> None:
    line = promise.check(case_of(name))
    if line.status == "skipped":
        pytest.skip(line.detail)
    assert line.status == "passed", str(line)


def test_no_promise_is_forgotten() -> None:
    others = len(ELSEWHERE) + len(every_kind.PROMISES)
    assert len(HERE) + others == len(PROMISES) == len({one.name for one in PROMISES})


# ---- rows that are no images -----------------------------------------------------------------------------------------

ON_A_KIND = {one.name: one for one in every_kind.PROMISES if every_kind.GPU not in one.name}


def is_due(name: str, promise: Promise[Case]) -> bool:
    """A method runs on three of six samples, and its steps are looked at on two, in turn, so that each sample meets
    many methods. `pluribus check` has them all."""
    sample, at = SAMPLES.index(promise.settings["sample"]), list(methods()).index(name)
    return sample % 3 == at % 3 if every_kind.STEPS in promise.name else sample % 2 == at % 2


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        pytest.param(name, one, id=f"{name}-{one.name}", marks=pytest.mark.xdist_group(name))
        for name in methods()
        for one in ON_A_KIND.values()
        if is_due(name, one)
    ],
)
def test_a_method_works_with_every_kind_that_it_takes(name: str, promise: Promise[Case]) -> None:
    cls, sample = find(name), promise.settings["sample"]
    line = promise.check(case_of(name))
    if sample.target in cls.targets and sample.kind in cls.takes:
        assert line.status == "passed", str(line)
    else:
        assert (line.status, name in line.detail) == ("skipped", True), str(line)


def test_every_kind_and_target_has_a_sample_and_methods_that_work_with_it() -> None:
    assert {sample.kind for sample in SAMPLES} == {*KINDS} - {"image"}
    assert {sample.target for sample in SAMPLES} == {*TARGETS}
    not_all = {name for name, cls in methods().items() if cls.takes != KINDS}
    assert not_all == {"fedhpl", "pfedpg", "pfedpt", "depthfl"}, "prompts of images, and exits that cannot see padding"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_there_is_something_to_learn_in_every_sample(sample: Sample) -> None:
    """Twenty rounds fit the training rows far better than two do."""
    longer = case_of("local").but(sample=sample, rounds=20, evaluate_every=20, lr=0.2, momentum=0.9)
    losses = [one["loss"] for one in longer.result.history]
    assert losses[-1] < 0.8 * losses[1]


# ---- the cases are what they are meant to be -------------------------------------------------------------------------


def assert_losses(result: Result) -> None:
    assert all(record["loss"] is not None for record in result.history)


@every_method
def test_the_plain_case_mixes_models_and_leaves_some_client_without_a_class(name):
    result, needs = case_of(name).result, find(name).needs
    assert any(len(facts.classes) < 10 for facts in result.clients.values())
    archs = 1 if takes_one_model(find(name)) else 3 if Need.PRETRAINED in needs else 4
    assert len({architecture_of(facts.model) for facts in result.clients.values()}) == archs
    assert_losses(result)


@pytest.mark.parametrize("name", [name for name in NAMES if takes_one_model(find(name))])
def test_mixed_architectures_are_refused_where_one_is_needed(name):
    models = "tiny" if Need.PRETRAINED in find(name).needs else "small"
    with refused(MismatchError, name, "clients 0 ", "--models"):
        case_of(name).but(models=models, capacity="").run()


@every_method
def test_the_lonely_case_has_one_class_per_client_and_one_sample(name):
    case = case_for("clients with one class or one sample", name)
    assert case.settings["data"] == LONELY
    assert [len(facts.classes) for facts in case.result.clients.values()] == [1, 1, 1, 1]
    assert min(facts.train for facts in case.result.clients.values()) == 1
    if name != name_of(Turns):
        assert_losses(case.result)
    for promise in ("two classes", "less data than a batch"):
        assert_losses(case_for(promise, name).result)


@every_method
def test_in_the_eventful_case_clients_are_absent_and_late(name):
    case = case_for("absent and late clients", name)
    assert EVENTFUL.items() <= case.settings.items()
    for record in case.result.history:
        assert record["answered"] <= record["present"] <= 3
    if name != name_of(Turns):  # chooses its clients itself
        assert any(record["answered"] < record["present"] for record in case.result.history)


@every_method
@pytest.mark.parametrize("trouble", ["drop_rate", "straggler_rate"])
def test_in_a_round_without_answers_nobody_answers(name, trouble):
    (record,) = case_for("no answer, no change", name).but(**{trouble: 0.999999}).result.history
    asked = 1 if name == name_of(Turns) else 4
    assert (record["answered"], record["present"]) == (0, 0 if trouble == "drop_rate" else asked)
    assert len(record["clients"]) == 4


@pytest.mark.xdist_group("fedgh")
def test_rare_evaluation_learns_the_same():
    rare = case_of("fedgh").but(evaluate_every=2).run()
    assert [bool(record["clients"]) for record in rare.history] == [False, True]
    assert differing(kept(rare), kept(case_of("fedgh").result)) == []


# ---- messages ------------------------------------------------------------------------------------------------------


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
        parts = case_of(name).parts()
        hand = ByHand(dataclasses.replace(parts, method=leaking(cls, function)(**hyperparameters(parts.method))))
        with refused(SchemaError, "'secret'"):
            hand.round(0, parts.cards)


@every_method
def test_what_is_not_declared_never_leaves_the_server(name):
    cls = find(name)
    for function in filter(None, (exchange.down for exchange in cls.exchanges)):
        parts = case_of(name).parts()
        folder = RunFolder.create(new_folder())
        leaky = dataclasses.replace(parts, method=leaking(cls, function)(**hyperparameters(parts.method)))
        with refused(SchemaError, "'secret'"):
            Federation(leaky, folder).run()
        folder.close()


def unheeded(name: str) -> dict[str, list[str]]:
    """What nobody reads of uploads, and what makes no difference to a client of what comes down."""
    hand = case_of(name).once(worked).hand
    return {direction: fields for direction in ("up", "down") if (fields := hand.ignored(direction))}


def status(promise: str, name: str) -> str:
    return HERE[promise].check(case_of(name)).status


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
    assert status("every field is used", name_of(toy)) == "failed"
    assert status("predictions depend on the image", name_of(toy)) == "passed", "and nothing else is wrong with it"


def test_constant_predictions_are_found():
    assert status("predictions depend on the image", name_of(Constant)) == "failed"
    assert unheeded(name_of(Constant)) == {}


# ---- steps ---------------------------------------------------------------------------------------------------------


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
    cls, parts = find(name), case_of(name).parts()
    wires = parts.method.wires(parts.task, parts.cards[0])
    assert "__doc__" in vars(cls)
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass made up"
    assert cls.paper
    assert (cls.up != "nothing") == any(wire.up or wire.once for wire in wires)
    if not issubclass(cls, PeerMethod):
        assert (cls.down != "nothing") == any(wire.down for wire in wires)


@every_method
def test_a_method_is_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        case_of(name).parts().method.anything = 1


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
    result = case_of(name).but(rounds=3).run()
    counted = {(record["round"], int(k)): n for record in result.history for k, n in record["steps"].items()}
    assert {key: n for key, n in counted.items() if n} == {key: n for key, n in taken.items() if n}
    assert sum(counted.values()) > 0
    assert result.steps == {k: sum(n for (_, j), n in counted.items() if j == k) for k in range(4)}
