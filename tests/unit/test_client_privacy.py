"""Differential privacy of clients: messages that are clipped as a whole and noised, and runs that keep a budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pluribus
from conftest import assemble_tiny, make_host, run_tiny
from kit import StopAfter, StoppedError
from pluribus.errors import BudgetError, ConflictError, MismatchError
from pluribus.host import Host
from pluribus.message import Field, Message, Rows, decode
from pluribus.method import methods, takes_one_model
from pluribus.privacy.central import NoisedMean
from pluribus.privacy.messages import MessageGuard, add_noise, clip_message
from pluribus.privacy.sampling import Randomness
from pluribus.privacy.terms import Terms
from pluribus.request import Work
from refusals import refused

CPU = torch.device("cpu")
HETERO = {"models": "mlp-64,cnn-16", "width": 64}
HEAD = {"models": "mlp-64", "width": 64}
DELTA = 1e-5


def private(method: Any, **settings: Any):
    return run_tiny(method, **({"dp_epsilon": 8.0, "dp_level": "client"} | settings))


def private_host(method: Any, **settings: Any) -> Host:
    return make_host(assemble_tiny(method, **({"dp_epsilon": 8.0, "dp_level": "client"} | settings)))


def numbers(message: Message) -> Tensor:
    """All floating-point numbers of a message as one vector."""
    values = [one.value if isinstance(one, Rows) else one for one in message.values()]
    return torch.cat([one.double().flatten() for one in values if one.is_floating_point()])


# ---- clipping --------------------------------------------------------------------------------------------------------


def long_message(norm: float) -> Message:
    """A message of this norm: a plain tensor, and the vectors of two of three classes."""
    rows = Rows(torch.tensor([[2.0, 4.0], [0.0, 0.0], [5.0, 2.0]]), torch.tensor([True, False, True]))
    plain = torch.tensor([1.0, -1.0, 7.0])  # 4 + 16 + 25 + 4 + 1 + 1 + 49 = 100
    return Message({"plain": plain * (norm / 10), "rows": Rows(rows.value * (norm / 10), rows.held)})


def test_a_long_message_is_scaled_down_as_a_whole() -> None:
    found = clip_message(long_message(30.0), None, 3.0)
    assert float(numbers(found).norm()) == pytest.approx(3.0, rel=1e-12)
    torch.testing.assert_close(numbers(found), numbers(long_message(30.0)) / 10)


def test_a_short_message_keeps_its_bits() -> None:
    message = long_message(2.9)
    assert torch.equal(numbers(clip_message(message, None, 3.0)), numbers(message))


def test_weights_are_measured_from_the_download() -> None:
    down = Message({"plain": torch.tensor([100.0, 100.0]), "other": torch.tensor([9.0])})
    found = clip_message(Message({"plain": torch.tensor([103.0, 104.0])}), down, 1.0)
    torch.testing.assert_close(found.tensor("plain"), torch.tensor([100.6, 100.8], dtype=torch.float64))


def test_held_classes_are_hidden() -> None:
    assert clip_message(long_message(1.0), None, 3.0).rows("rows").held.tolist() == [True, True, True]


def test_integers_are_sent_back_as_they_came() -> None:
    steps = Message({"steps": torch.tensor(17)})
    assert int(clip_message(steps, Message({"steps": torch.tensor(5)}), 1.0).tensor("steps")) == 5
    assert int(clip_message(steps, None, 1.0).tensor("steps")) == 0


@pytest.mark.parametrize("clip", [0.1, 2.0])
def test_two_clients_are_at_most_twice_the_bound_apart(clip: float) -> None:
    """What the noise has to cover: opposite messages, both far away."""
    one, other = (Message({"w": sign * torch.full((50,), 1e3)}) for sign in (1.0, -1.0))
    apart = numbers(clip_message(one, None, clip)) - numbers(clip_message(other, None, clip))
    assert float(apart.norm()) == pytest.approx(2 * clip, rel=1e-9)


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, None])
def test_noise_has_its_deviation_in_every_field(seed: int | None) -> None:
    rows = Rows(torch.ones(100, 200), torch.ones(100, dtype=torch.bool))
    message = Message({"rows": rows, "plain": torch.full((20_000,), 5.0), "steps": torch.tensor(4)})
    schema = {"rows": Field((100, 200), form="rows"), "plain": Field((20_000,)), "steps": Field((), torch.int64)}
    found = add_noise(message, schema, 0.7, Randomness(seed, CPU))
    assert (found.rows("rows").value - 1).std() == pytest.approx(0.7, rel=0.03)
    assert (found.tensor("plain") - 5).std() == pytest.approx(0.7, rel=0.03)
    assert (found.tensor("plain") - 5).mean() == pytest.approx(0, abs=0.03)
    assert int(found.tensor("steps")) == 4
    pair = torch.stack([found.rows("rows").value.flatten(), found.tensor("plain")])
    assert torch.corrcoef(pair)[0, 1].abs() < 0.04  # other noise in each field


def test_noise_stays_within_the_bounds_of_a_field() -> None:
    message = Message({"share": torch.full((1000,), 0.5), "norm.running_var": torch.zeros(1000)})
    schema = {"share": Field((1000,), least=0.0, most=1.0), "norm.running_var": Field((1000,))}
    found = add_noise(message, schema, 3.0, Randomness(1, CPU))
    assert (float(found.tensor("share").min()), float(found.tensor("share").max())) == (0.0, 1.0)
    assert float(found.tensor("norm.running_var").min()) == 0.0


@pytest.mark.parametrize(("clip", "noise"), [(0.25, 2.0), (1.5, 4.0)])
def test_what_a_client_sends_has_the_noise_that_the_accountant_was_told(clip: float, noise: float) -> None:
    """The upload minus what plain training sends, clipped: noise of twice the bound times the multiplier."""
    settings = {"dp_clip": clip, "dp_noise": noise, "dp_epsilon": 50.0, **HEAD}
    host, plain = private_host("fedavg", **settings), make_host(assemble_tiny("fedavg", **HEAD))
    down = plain_download(plain)
    schema = host.wires(0)[0].up
    sent, honest = (
        decode(one.answer(Work(0, 0, 0, down)).up, schema, "client 0")  # type: ignore[union-attr, arg-type]
        for one in (host, plain)
    )
    start = decode(down, plain.wires(0)[0].down, "client 0")
    added = numbers(sent) - numbers(clip_message(honest, start, clip))
    assert len(added) > 4000
    assert added.std() == pytest.approx(2 * clip * noise, rel=0.05)
    assert added.mean() == pytest.approx(0, abs=0.2 * clip * noise)
    assert host.client(0).state.spent[0].tolist() == [noise, 1.0, 1.0]


def plain_download(host: Host) -> bytes:
    """A download of FedAvg: the weights of client 1."""
    from pluribus.message import encode

    return encode(Message.of(host.client(1).model), host.wires(0)[0].down, "server")


# ---- account ---------------------------------------------------------------------------------------------------------


def test_epsilon_is_that_of_composed_gaussians() -> None:
    """Of k releases with the multiplier s, the Renyi divergence is k alpha / (2 s^2): as one with s / sqrt(k)."""
    from opacus.accountants import RDPAccountant

    rounds, noise = 3, 2.5
    result = private("fedproto", rounds=rounds, dp_noise=noise, dp_epsilon=50.0, **HETERO)
    theirs = RDPAccountant()
    theirs.history = [(noise, 1.0, rounds)]
    assert result.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)
    by_hand = min(
        rounds * a / (2 * noise**2) + math.log1p(-1 / a) - (math.log(DELTA) + math.log(a)) / (a - 1)
        for a in RDPAccountant.DEFAULT_ALPHAS
    )
    assert result.epsilon == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("method", ["fedmd", "fedl2g-f", "fedh2l"])
def test_all_messages_of_a_run_are_planned(method: str) -> None:
    result = private(method, rounds=3, **HETERO)
    assert len(result.history) >= 3
    assert result.epsilon is not None
    assert 7.9 < result.epsilon <= 8.0 * (1 + 1e-6)


def test_who_sends_nothing_spends_nothing() -> None:
    assert private("local", **HETERO).epsilon == 0.0


def test_a_budget_that_is_used_up_ends_training() -> None:
    result = private("lg-fedavg", rounds=30, dp_noise=2.0, evaluate_every=100, **HEAD)
    assert 0 < len(result.history) < 30
    assert result.epsilon is not None
    assert result.epsilon <= 8.0
    assert result.history[-1]["clients"]
    assert any("privacy budget" in warning for warning in result.warnings)


def test_a_budget_that_lasts_for_no_round_is_refused() -> None:
    with refused(BudgetError, "one round"):
        private("fedproto", dp_noise=0.1, **HETERO)


# ---- runs ------------------------------------------------------------------------------------------------------------

REFUSED = {"fedfree", "fedkd", "fedgen", "fedhpl", "hetlora"}
MORE = ["fedavg", "fedbabu", "fedrep", "per-fedavg", "pfedla", "scaffold", "fd", "fedgh", "fedhe", "fedtgp", "fml"]


def suited(method: str) -> dict[str, Any]:
    if method in ("fedhpl", "hetlora"):
        return {"models": "tiny-vit-32"}
    return {"models": "cnn-16-32"} if takes_one_model(methods()[method]) else HETERO


@pytest.mark.parametrize("method", MORE)
def test_methods_run_and_their_weights_stay_finite(method: str) -> None:
    result = private(method, **suited(method))
    assert result.epsilon == pytest.approx(8.0, rel=0.01)
    assert all(record["loss"] is None for record in result.history)
    losses = [one["test_loss"] for one in result.history[-1]["mean"].values()]
    assert all(math.isfinite(loss["mean"]) for loss in losses)


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_what_noise_cannot_hide_is_refused(method: str) -> None:
    with refused(MismatchError, method):
        private(method, **suited(method))


def test_workers_give_the_bits_of_one_process() -> None:
    one, other = (private("fedproto", workers=workers, **HETERO) for workers in (1, 2))
    assert [r["clients"] for r in one.history] == [r["clients"] for r in other.history]
    assert [r["privacy"] for r in one.history] == [r["privacy"] for r in other.history]


def test_noise_is_keyed_unless_it_comes_from_the_system() -> None:
    runs = [private("lg-fedavg", **HEAD, **more) for more in ({}, {}, {"dp_secure": True})]
    losses = [run.history[-1]["mean"]["after"]["test_loss"]["mean"] for run in runs]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("method", ["fedproto", "scaffold", "fedh2l"])
def test_no_bound_and_no_noise_leave_the_bits_of_a_plain_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pluribus.experiment import Experiment

    plain = run_tiny(method, **suited(method))
    endless = Terms(8.0, clip=math.inf, sums_clip=math.inf, noise=0.0, level="client")
    monkeypatch.setattr(Experiment, "privacy", lambda self: endless)
    bare = run_tiny(method, **suited(method))
    assert [r["clients"] for r in bare.history] == [r["clients"] for r in plain.history]
    assert bare.bytes == plain.bytes


def test_a_resumed_run_continues_its_account(tmp_path: Any) -> None:
    whole = private("fedproto", rounds=3, **HETERO)
    folder = tmp_path / "run"
    with pytest.raises(StoppedError):
        private("fedproto", rounds=3, out=str(folder), checkpoint_every=1, observers=[StopAfter(0)], **HETERO)
    resumed = pluribus.resume(folder, progress=False)
    assert [r["privacy"] for r in resumed.history] == [r["privacy"] for r in whole.history]
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in whole.history]


def test_the_message_of_enrolment_is_noised_and_paid_for() -> None:
    """No method of the library may enroll with numbers at this level: the counts of FedGen are integers."""
    host = private_host("lg-fedavg", dp_noise=2.0, dp_epsilon=50.0, **HEAD)
    guard, client = host._guard, host._prepared(0)
    assert isinstance(guard, MessageGuard)
    client.begin(-1, "enrol", {})
    sent = guard.protect(client, Message({"a": torch.zeros(9)}), {"a": Field((9,))}, None)
    assert sent.tensor("a").abs().min() > 0
    assert client.state.spent[0, 2] == 1


# ---- noise in the mean ----------------------------------------------------------------------------------------------


def noised_mean(noise: float = 2.0, clip: float = 0.5) -> NoisedMean:
    parts = assemble_tiny("fedavg", dp_epsilon=50.0, dp_level="client-central", dp_noise=noise, dp_clip=clip, **HEAD)
    terms = parts.local.privacy
    assert terms is not None
    return NoisedMean(terms, parts.method, parts.task, parts.cards)


def test_the_mean_has_the_noise_that_the_accountant_was_told() -> None:
    """One of n clients moves the mean by 2 C / n, so the deviation is the multiplier times that."""
    uploads = {k: Message({"w": torch.full((20_000,), float(k))}) for k in range(4)}
    schemas = {k: {"w": Field((20_000,))} for k in uploads}
    found = noised_mean().of_messages(uploads, schemas, t=0, stage=0)
    values = [found[k].tensor("w") for k in uploads]
    assert all(torch.equal(values[0], one) for one in values)  # the method sees nothing but the mean
    assert values[0].mean() == pytest.approx(1.5, abs=0.02)
    assert values[0].std() == pytest.approx(2.0 * 2 * 0.5 / 4, rel=0.03)
    later = noised_mean().of_messages(uploads, schemas, t=1, stage=0)[0].tensor("w")
    assert not torch.equal(later, values[0])


def test_clients_with_other_models_have_a_mean_of_their_own() -> None:
    sizes = {0: 3, 1: 5, 2: 3}
    uploads = {k: Message({"w": torch.full((size,), 100.0 * k)}) for k, size in sizes.items()}
    found = noised_mean().of_messages(uploads, {k: {"w": Field((size,))} for k, size in sizes.items()}, 0, 0)
    assert [round(float(found[k].tensor("w").mean()), -2) for k in sizes] == [100, 100, 100]
    assert [len(found[k].tensor("w")) for k in sizes] == [3, 5, 3]


def test_a_client_of_a_trusted_server_only_clips() -> None:
    settings = {"dp_clip": 0.05, "dp_level": "client-central", **HEAD}
    host, plain = private_host("fedavg", **settings), make_host(assemble_tiny("fedavg", **HEAD))
    down = plain_download(plain)
    sent = decode(host.answer(Work(0, 0, 0, down)).up, host.wires(0)[0].up, "client 0")  # type: ignore[union-attr, arg-type]
    start = decode(down, plain.wires(0)[0].down, "client 0")
    assert float((numbers(sent) - numbers(start)).norm()) == pytest.approx(0.05, rel=1e-4)
    assert host.client(0).state.spent[0, 2] == 1


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedgh", "fd", "scaffold", "fedl2g-l", "fedmd"])
def test_a_trusted_server_keeps_the_budget(method: str) -> None:
    result = private(method, dp_level="client-central", **suited(method))
    assert result.epsilon == pytest.approx(8.0, rel=0.01)
    assert all(math.isfinite(one["test_loss"]["mean"]) for one in result.history[-1]["mean"].values())


def test_a_trusted_server_merges_with_noise() -> None:
    """Clients only clip: with another multiplier, nothing but the server's noise differs."""
    settings = {"dp_level": "client-central", "dp_epsilon": 50.0, **HEAD}
    runs = [private("fedavg", dp_noise=noise, **settings) for noise in (2.0, 2.0, 4.0)]
    losses = [run.history[0]["mean"]["after"]["test_loss"]["mean"] for run in runs]
    shared = [run.history[-1]["mean"]["before"]["test_loss"]["mean"] for run in runs]
    assert losses[0] == losses[1] == losses[2]  # before the first merge
    assert shared[0] == shared[1] != shared[2]


def test_a_resumed_server_draws_the_same_noise(tmp_path: Any) -> None:
    settings = {"rounds": 3, "dp_level": "client-central", **HETERO}
    whole, folder = private("fedproto", **settings), tmp_path / "run"
    with pytest.raises(StoppedError):
        private("fedproto", out=str(folder), checkpoint_every=1, observers=[StopAfter(0)], **settings)
    resumed = pluribus.resume(folder, progress=False)
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in whole.history]


@pytest.mark.parametrize("method", ["fedh2l", "pfedla", "fedkd", "fedgen"])
def test_a_method_that_needs_single_messages_is_refused(method: str) -> None:
    with refused(MismatchError, method):
        private(method, dp_level="client-central", **suited(method))


def test_a_mean_leaves_nothing_to_a_defense() -> None:
    with refused(ConflictError, "defense"):
        private("fedproto", dp_level="client-central", defense="median", **HETERO)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp_sums_clip", "dp_share"])
def test_settings_of_rows_are_refused(name: str) -> None:
    with refused(ConflictError, name.replace("_", "-")):
        private("fedproto", **HETERO, **{name: 0.25})


def test_numbers_of_all_rows_are_refused_and_those_of_a_client_are_not() -> None:
    with refused(ConflictError, "dataset"):
        private("fedproto", data="watch", models="cnn1d-3", normalize="dataset")
    assert assemble_tiny("fedproto", dp_epsilon=8.0, dp_level="client", data="watch", models="cnn1d-3")


def test_the_level_of_terms_from_elsewhere_is_checked() -> None:
    assert Terms(8.0, level="nobody").problem() is not None  # type: ignore[arg-type]
    assert Terms(8.0, level="client").problem() is None
    assert Terms(8.0, level="client-central").problem() is not None  # a site does not trust its server
