"""Differential privacy of rows: the accountant, the noise, the bound on one row, and runs that keep a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.special import ndtr
from torch import Tensor

import pluribus
from conftest import assemble_tiny, few_digits, make_host, run_tiny
from kit import StopAfter, StoppedError
from pluribus.client import Batch, Client
from pluribus.errors import BudgetError, ConflictError, MismatchError, PackageError
from pluribus.host import Host
from pluribus.message import Message
from pluribus.method import methods, takes_one_model
from pluribus.methods.fedgh import FedGH
from pluribus.models import build
from pluribus.models.group_norm import twin_of
from pluribus.privacy import accountant
from pluribus.privacy.accountant import Spend, epsilon_of, find_noise
from pluribus.privacy.budgets import Budgets, epsilon_of_run
from pluribus.privacy.rows import RowSums, clip_factors
from pluribus.privacy.sampling import PADDING, Randomness, chunk_size, draw_batches
from pluribus.privacy.terms import Terms
from refusals import refused

CPU = torch.device("cpu")
SMALL = {"models": "mlp-64,cnn-16", "width": 64}
MODEL = {"models": "mlp-64"}


def private(method: Any, **settings: Any):
    return run_tiny(method, **({"dp_epsilon": 8.0, "batch_size": 16} | settings))


def private_host(method: Any = "local", **settings: Any) -> Host:
    return make_host(assemble_tiny(method, **({"dp_epsilon": 8.0} | MODEL | settings)))


def prepared(host: Host, k: int = 0) -> Client:
    client = host._prepared(k)
    client.begin(0, 0, host.method.schedule(0, host.task.rounds))
    return client


# ---- accountant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.1, 100), (0.7, 0.02, 1000), (3.0, 1.0, 20)])
def test_epsilon_is_that_of_opacus(noise: float, rate: float, steps: int) -> None:
    from opacus.accountants import RDPAccountant

    theirs = RDPAccountant()
    theirs.history = [(noise, rate, steps), (2.0, 1.0, 3)]
    ours = epsilon_of([Spend(noise, rate, steps), Spend(2.0, 1.0, 3)], 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("noise", [1.0, 2.0, 5.0])
def test_one_gaussian_release_is_bounded_by_its_closed_form(noise: float) -> None:
    """Balle and Wang, ICML 2018: the smallest delta of a Gaussian mechanism has a closed form."""
    epsilon = epsilon_of([Spend(noise, 1.0, 1)], 1e-5)
    delta = ndtr(1 / (2 * noise) - epsilon * noise) - math.exp(epsilon) * ndtr(-1 / (2 * noise) - epsilon * noise)
    assert delta <= 1e-5  # the accountant gives an upper bound
    assert delta > 1e-7  # and not a loose one


def test_renyi_divergence_of_a_gaussian() -> None:
    """alpha / (2 sigma^2) for every order."""
    orders = accountant._orders()
    found = accountant._divergence(2.0, 1.0, orders)
    assert list(found) == pytest.approx([order / 8 for order in orders])


def test_noise_is_just_enough() -> None:
    def spends(noise: float) -> list[Spend]:
        return [Spend(noise, 0.05, 400), Spend(8.0, 1.0, 10)]

    noise = find_noise(4.0, 1e-5, spends)
    assert epsilon_of(spends(noise), 1e-5) <= 4.0 < epsilon_of(spends(0.99 * noise), 1e-5)


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("epsilon", [1.0, 8.0, 100.0, 1000.0])
def test_orders_that_are_not_tried_do_not_change_the_noise(epsilon: float, rate: float) -> None:
    def spends(noise: float) -> list[Spend]:
        return [Spend(noise, rate, 20), Spend(40.0, 1.0, 2)]

    def costs_at_most(epsilon: float, spends: list[Spend], delta: float) -> bool:
        orders = (*accountant._whole_orders(), *accountant.BETWEEN)
        return accountant._epsilon(accountant._total(spends, orders), orders, delta) <= epsilon

    found = find_noise(epsilon, 1e-5, spends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountant, "costs_at_most", costs_at_most)
        assert find_noise(epsilon, 1e-5, spends) == found


@pytest.mark.parametrize("order", accountant.BETWEEN)
@pytest.mark.parametrize(("noise", "rate"), [(0.4, 0.05), (0.8, 0.3), (3.0, 0.01), (2.0, 1.0)])
def test_whole_orders_bound_those_between_them(order: float, noise: float, rate: float) -> None:
    spends = [Spend(noise, rate, 50)]
    least = accountant._least_epsilon(accountant._total(spends, accountant._whole_orders()), order, 1e-5)
    exact = accountant._epsilon(accountant._total(spends, (order,)), (order,), 1e-5)
    assert least <= exact * (1 + accountant.ROUNDING)
    assert least > exact / 3  # not a loose bound


def test_the_package_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus.accountants.analysis", None)
    with refused(PackageError, "pluribus[privacy]"):
        assemble_tiny("local", dp_epsilon=8.0, **MODEL)


# ---- sampling and noise ----------------------------------------------------------------------------------------------


def test_every_row_is_drawn_by_itself() -> None:
    rows, batch, steps = 40, 10, 2000
    batches = draw_batches(rows, batch, steps, Randomness(1, CPU).uniform)
    chosen = batches.order[batches.order != PADDING]
    times = torch.bincount(chosen, minlength=rows)
    assert sum(batches.ends) == steps
    deviation = math.sqrt(steps * 0.25 * 0.75)
    assert (times - steps * 0.25).abs().max() < 5 * deviation
    sizes = torch.bincount(torch.arange(len(batches.ends)).repeat_interleave(15)[batches.order != PADDING])
    assert chunk_size(batch, rows) == 15
    # sizes vary as those of independent draws: 10 rows, with a variance of 7.5
    step = torch.tensor([0, *batches.ends[:-1]]).cumsum(0)
    per_step = torch.zeros(steps).index_add(0, step[: len(sizes)], sizes.float())
    assert per_step.mean() == pytest.approx(10, abs=0.4)
    assert per_step.var() == pytest.approx(7.5, rel=0.2)


def test_no_row_is_dropped_and_none_comes_twice() -> None:
    def everyone(size: int) -> Tensor:
        return torch.zeros(size)

    batches = draw_batches(100, 10, 1, everyone)
    assert sorted(batches.order[batches.order != PADDING].tolist()) == list(range(100))
    assert batches.ends == [False] * 6 + [True]


def test_an_empty_batch_is_a_step() -> None:
    batches = draw_batches(100, 10, 1, lambda size: torch.ones(size))
    assert set(batches.order.tolist()) == {PADDING}
    assert batches.ends == [True]


@pytest.mark.parametrize("seed", [7, None])
def test_noise_is_normal(seed: int | None) -> None:
    noise = torch.empty(100_000)
    Randomness(seed, CPU).fill_normal(noise)
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert (noise.abs() < 1.96).float().mean() == pytest.approx(0.95, abs=0.01)


def test_noise_of_the_system_is_never_the_same() -> None:
    one, other = torch.empty(8), torch.empty(8)
    for noise in (one, other):
        Randomness(None, CPU).fill_normal(noise)
    assert not torch.equal(one, other)


# ---- gradients of single rows ----------------------------------------------------------------------------------------


class Written:
    """A tape that keeps the loss of a plain step."""

    def descend(self, loss: Tensor, opts: tuple[str, ...]) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("local", {"models": "cnn-16-32-gn"}),
        ("local", {"models": "resnet6-gn"}),
        ("fedprox", {"models": "cnn-16"}),
        ("fedkd", SMALL),
        ("fml", SMALL),
        ("fedproto", SMALL),
        ("fedmrl", SMALL),
    ],
)
def test_gradients_of_rows_are_those_of_single_rows(method: str, settings: dict[str, Any]) -> None:
    host = make_host(assemble_tiny(method, **settings))
    client = host.client(0)
    client.begin(1, 0, host.method.schedule(1, 2))
    client.set_mode(True)
    positions = torch.arange(4)
    x, y = client.data["train"].take(positions)
    sums = RowSums(client, tuple(client.optimizers))
    from pluribus.privacy.rows import collecting, tallies

    with collecting(tallies(client)):
        found = sums.row_gradients(client, host.method.step, Batch(x, y, positions, 4))
    for b in range(4):
        one = slice(b, b + 1)
        client.tape = tape = Written()
        host.method.step(client, Batch(x[one], y[one], positions[one], 1))
        client.tape = None
        expected = torch.autograd.grad(tape.loss, sums.parameters, allow_unused=True)
        for p, gradient, own in zip(sums.parameters, expected, found, strict=True):
            wanted = torch.zeros_like(p) if gradient is None else gradient
            torch.testing.assert_close(own.gradients()[b].view(p.shape), wanted, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(own.squared_norms()[b], wanted.square().sum(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("clip", [0.01, 0.5, 100.0])
def test_one_row_moves_the_clipped_sum_by_at_most_the_bound(clip: float) -> None:
    host = make_host(assemble_tiny("local", models="cnn-16"))
    client = host.client(0)
    client.begin(0, 0, {})
    client.set_mode(True)
    positions = torch.arange(6)
    x, y = client.data["train"].take(positions)
    sums = RowSums(client, ("model",))
    totals = []
    for last in (1.0, -50.0):  # the same rows but for one, which is far from all others
        sums.start(clip, 0.0, 6)
        changed = torch.cat([x[:-1], last * x[-1:]])
        sums.add(client, host.method.step, Batch(changed, y, positions, 6))
        totals.append(sums.total.clone())
    sums.start(clip, 0.0, 6)
    sums.add(client, host.method.step, Batch(x, y, torch.where(positions < 5, positions, PADDING), 6))
    for total in totals:
        assert float((total - sums.total).norm()) <= clip * (1 + 1e-4)  # with the row, and without it
    assert float((totals[0] - totals[1]).norm()) <= 2 * clip * (1 + 1e-4)


def test_without_bound_and_noise_the_sum_is_the_gradient_of_the_batch() -> None:
    host = make_host(assemble_tiny("local", models="cnn-16"))
    client = host.client(0)
    client.begin(0, 0, {})
    client.set_mode(True)
    positions = torch.arange(8)
    x, y = client.data["train"].take(positions)
    batch = Batch(x, y, positions, 8)
    sums = RowSums(client, ("model",))
    sums.start(math.inf, 0.0, 8)
    sums.add(client, host.method.step, batch)
    expected = torch.autograd.grad(host.method.loss(client, batch), sums.parameters)
    torch.testing.assert_close(sums.total / 8, torch.cat([g.flatten() for g in expected]), atol=1e-5, rtol=1e-4)


def test_clip_factors() -> None:
    assert clip_factors(torch.tensor([0.0, 0.5, 2.0]), 1.0).tolist() == [1.0, 1.0, 0.5]
    assert clip_factors(torch.tensor([0.0, 3.0]), math.inf).tolist() == [1.0, 1.0]


def test_the_noise_of_a_step_is_what_the_accountant_was_told() -> None:
    """Of steps that see no row: the weights move by noise alone."""
    host = private_host(lr=1.0, dp_clip=0.25, dp_noise=2.0, momentum=0.0, rounds=1)
    client = prepared(host)
    before = torch.cat([p.detach().flatten().clone() for p in client.model.parameters()])
    sums = RowSums(client, ("model",))
    sums.start(0.25, 2.0, 10)
    sums.opts = ("model",)
    Randomness(3, CPU).fill_normal(sums.noise)
    sums.finish(client, host.method.step)
    moved = before - torch.cat([p.detach().flatten() for p in client.model.parameters()])
    assert len(moved) > 4000
    assert moved.std() == pytest.approx(2.0 * 0.25 / 10, rel=0.05)
    spent = client.state.spent
    assert spent.sum() == 0  # nothing is charged outside of a fit
    client.fit(host.method.step, steps=3)
    noise, rate, times = client.state.spent[0].tolist()
    assert (noise, times) == (2.0, 3)
    assert rate == pytest.approx(10 / len(client.data["train"]))


# ---- class sums ------------------------------------------------------------------------------------------------------


def test_class_sums_are_clipped_and_noised() -> None:
    host = private_host("fedgh", rounds=1)
    client = prepared(host)
    guard = host._guard
    assert guard is not None
    members = torch.zeros(4000, 10)
    members[:, 3] = 1
    rows = torch.tensor([[3.0, 4.0]]).expand(4000, 2)  # of norm 5, clipped to 1: (0.6, 0.8)
    sums, counts = guard.class_sums(client, members, rows)
    noise = client.state.spent[client.state.spent[:, 1] == 1][0, 0]
    assert sums[3].tolist() == pytest.approx([2400, 3200], abs=10 * float(noise))
    assert float(counts[3]) == pytest.approx(4000, abs=10 * float(noise))


def test_the_noise_of_sums_and_counts_covers_both() -> None:
    """A row is (v / C, 1), so that its norm is sqrt(2): the noise of both has that factor."""
    host = private_host("fedgh", dp_sums_clip=3.0, rounds=1, dp_epsilon=1000.0)
    client = prepared(host)
    guard = host._guard
    assert guard is not None
    members = torch.full((1, 2000), 1e4)  # so that every class is held
    sums, counts = guard.class_sums(client, members, torch.zeros(1, 5))
    noise = float(client.state.spent[client.state.spent[:, 1] == 1][0, 0])
    assert sums.std() == pytest.approx(noise * math.sqrt(2) * 3.0, rel=0.05)
    assert (counts - 1e4).std() == pytest.approx(noise * math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("method", ["fedproto", "fd"])
def test_a_tally_counts_each_row_once(method: str) -> None:
    host = private_host(method, epochs=3, rounds=1, dp_epsilon=1e4, **SMALL)
    client = prepared(host)
    host.method.local_update(client)
    labels = client.data["train"].labels()
    counts = torch.bincount(labels, minlength=10).float()
    torch.testing.assert_close(client.state.seen.counts, counts, atol=0.5, rtol=0)


# ---- runs ------------------------------------------------------------------------------------------------------------

REFUSED = {"per-fedavg", "fedl2g-l", "fedl2g-f", "fedbabu", "fedapen", "fedbn", "fedpac", "heterofl", "fedrolex"}
PUBLIC_LOSS = {"fedmd", "fedh2l", "fccl", "kt-pfl"}  # their last loss is that of public rows
LIBRARY = [name for name, cls in methods().items() if cls.__module__.startswith("pluribus.")]


def suited(method: str) -> dict[str, Any]:
    if method in ("fedhpl", "pfedpg", "hetlora", "flora", "flexlora"):
        return {"models": "tiny-vit-32"}
    if "matched" in method:
        return {"rounds": 15}
    if method == "fedbn":
        return {"models": "cnn-16-32"}
    if takes_one_model(methods()[method]):
        return {"models": "cnn-16"}
    return {"models": "mlp-64,cnn-16", "width": 64}


@pytest.mark.parametrize("method", sorted(set(LIBRARY) - REFUSED))
def test_every_method_keeps_its_budget(method: str) -> None:
    settings = {"pretrain_public": 1, "pretrain_private": 1} if method == "fedmd" else {}
    result = private(method, data=few_digits(160), **(suited(method) | settings))
    assert result.epsilon is not None
    assert 7.5 < result.epsilon <= 8.0 * (1 + 1e-6)
    assert all(record["loss"] is None for record in result.history) or method in PUBLIC_LOSS


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_what_cannot_be_bounded_is_refused(method: str) -> None:
    with refused(MismatchError, method):
        private(method, **suited(method))


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_sub_models_can_be_private_without_the_masked_loss(method: str) -> None:
    result = private(method, masked=False, capacity="1,0.5", **suited(method))
    assert result.epsilon is not None
    assert 7.5 < result.epsilon <= 8.0 * (1 + 1e-6)


@dataclass(frozen=True)
class Sweeps(FedGH):
    """Sends what it makes of private rows by itself, beside class means."""

    def local_update(self, client: Client) -> Message:
        client.sweep(Client.features)
        return super().local_update(client)


def test_rows_that_a_method_reads_by_itself_are_refused() -> None:
    with refused(MismatchError, "client.sweep"):
        private(Sweeps)


def test_a_plain_run_has_no_trace_of_it() -> None:
    result = run_tiny("fedgh")
    assert result.epsilon is None
    assert not any("privacy" in record for record in result.history)


def test_the_same_seed_gives_the_same_bits() -> None:
    one, other = (private("fedgh", **SMALL) for _ in range(2))
    assert [r["clients"] for r in one.history] == [r["clients"] for r in other.history]


def test_noise_of_the_system_gives_other_bits() -> None:
    one, other = (private("fedgh", dp_secure=True, **SMALL) for _ in range(2))
    losses = [r.history[-1]["mean"]["after"]["test_loss"]["mean"] for r in (one, other)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", ["fedgh", "fedproto", "fedgen", "scaffold", "fjord"])
def test_no_bound_and_no_noise_leave_the_bits_of_a_plain_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pluribus.experiment import Experiment

    plain = run_tiny(method, **suited(method))
    endless = Terms(8.0, clip=math.inf, sums_clip=math.inf, noise=0.0)
    monkeypatch.setattr(Experiment, "privacy", lambda self: endless)
    bare = run_tiny(method, **suited(method))
    assert [r["clients"] for r in bare.history] == [r["clients"] for r in plain.history]
    assert bare.bytes == plain.bytes


def test_a_resumed_run_continues_its_account(tmp_path: Any) -> None:
    whole = private("fedgh", rounds=3, **SMALL)
    folder = tmp_path / "run"
    with pytest.raises(StoppedError):
        private("fedgh", rounds=3, out=str(folder), checkpoint_every=1, observers=[StopAfter(0)], **SMALL)
    resumed = pluribus.resume(folder, progress=False)
    assert [r["privacy"] for r in resumed.history] == [r["privacy"] for r in whole.history]
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in whole.history]


def test_a_resumed_run_with_noise_of_the_system_says_so(tmp_path: Any) -> None:
    folder, settings = tmp_path / "run", {"checkpoint_every": 1, "dp_secure": True, **MODEL}
    with pytest.raises(StoppedError):
        private("local", rounds=2, out=str(folder), observers=[StopAfter(0)], **settings)
    assert any("dp_secure" in one or "dp-secure" in one for one in pluribus.resume(folder, progress=False).warnings)


def test_a_budget_that_is_used_up_ends_training() -> None:
    result = private("local", rounds=50, dp_noise=0.9, evaluate_every=100, **MODEL)
    assert 0 < len(result.history) < 50
    assert result.epsilon is not None
    assert result.epsilon <= 8.0
    assert result.history[-1]["clients"]  # what was learned is measured
    assert any("privacy budget" in warning for warning in result.warnings)
    spent = Budgets()
    spent.restore(result.history)
    assert len(spent.spent) == len(result.clients)


def test_work_that_costs_too_much_is_not_done() -> None:
    host = private_host(dp_noise=1.0)
    client = prepared(host)
    before = {name: value.clone() for name, value in client.tensors().items()}
    with refused(BudgetError, "client 0"):
        client.fit(host.method.step, steps=100_000)
    assert all(torch.equal(value, before[name]) for name, value in client.tensors().items())


def test_public_rows_are_free() -> None:
    host = private_host("fedmd", pretrain_public=1, pretrain_private=1)
    client = prepared(host)
    client.fit(host.method.step, on="pool", steps=3)
    assert client.state.spent.sum() == 0
    client.fit(host.method.step, steps=1)
    assert client.state.spent[0, 2] == 1


def test_tables_and_reports_say_what_was_spent(tmp_path: Any) -> None:
    from pluribus.report.numbers import read_runs
    from pluribus.report.page import page

    settings = {"data": "digits", "clients": 2, "rounds": 1, "batch_size": 64, "progress": False, **MODEL}
    rows = {"plain": "local", "private": {"method": "local", "dp_epsilon": 4.0}}
    found = pluribus.compare(rows, seeds=1, out=str(tmp_path), **settings)
    plain, spent = (row.epsilon for row in found.rows)
    assert plain is None
    assert spent == pytest.approx(4.0, rel=0.03)
    assert any("epsilon" in table.columns for table in found.tables)
    runs = read_runs([tmp_path])
    assert [run.epsilon for run in runs if run.epsilon is not None] == [spent]
    assert "<th>epsilon" in page(runs, [])


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_batch_norm_is_refused_with_its_twin() -> None:
    with refused(MismatchError, "cnn-16-32-gn"):
        private("local", models="cnn-16-32")


def test_recurrent_layers_are_refused() -> None:
    with refused(MismatchError, "recurrent"):
        private("local", data="watch", models="gru1d", normalize="none")


@pytest.mark.parametrize(
    ("kind", "fact", "settings"),
    [
        (ConflictError, "normalize", {"data": "watch", "models": "cnn1d-3-gn"}),
        (ConflictError, "class-weights", {"class_weights": "balanced"}),
        (MismatchError, "logits", {"method": "fedhpl", "upload": "full", "models": "tiny-vit-32"}),
    ],
)
def test_what_would_break_the_bound_is_refused(kind: Any, fact: str, settings: dict[str, Any]) -> None:
    settings = MODEL | settings
    with refused(kind, fact):
        private(settings.pop("method", "local"), **settings)


def test_a_setting_of_privacy_needs_a_budget() -> None:
    with refused(ConflictError, "dp-clip"):
        run_tiny("local", dp_clip=2.0)


@pytest.mark.parametrize("model", ["cnn-16-32", "resnet18", "resnet1d"])
def test_a_twin_has_as_many_parameters(model: str) -> None:
    shape = (9, 128) if model == "resnet1d" else (3, 32, 32)
    from pluribus.inputs import Input

    form = Input("signal", shape) if model == "resnet1d" else shape
    twin = twin_of(model)
    assert twin is not None
    with torch.device("meta"):
        one, other = (build(name, shape=form, classes=10) for name in (model, twin))
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in other.parameters())
    assert not any("BatchNorm" in type(layer).__name__ for layer in other.modules())


def test_epsilon_of_a_run_is_the_largest() -> None:
    history = [{"privacy": {"epsilon": {"0": 1.0, "1": 3.0}, "used_up": []}}, {"privacy": {"epsilon": {"0": 2.0}}}]
    assert epsilon_of_run(history) == 3.0
    assert epsilon_of_run([{}]) is None
