"""Optimizers: slots that are zeroed in place behave, bit for bit, as torch's optimizers made anew."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pluribus.optim import Opt, Optimizer, Rule, clip_gradients

RULES = [
    Rule("sgd", lr=0.1),
    Rule("sgd", lr=0.1, weight_decay=0.01),
    Rule("sgd", lr=0.1, momentum=0.9),
    Rule("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    Rule("adam", lr=0.01),
    Rule("adam", lr=0.01, weight_decay=0.1),
    Rule("amsgrad", lr=0.01, weight_decay=0.01),
    Rule("adamw", lr=0.01, weight_decay=0.1),
]
SLOTS = {
    "sgd": {"momentum_buffer"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "amsgrad": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
}


def torchs_own(parameters, rule: Rule) -> torch.optim.Optimizer:
    decay = {"lr": rule.lr, "weight_decay": rule.weight_decay}
    if rule.name == "sgd":
        return torch.optim.SGD(parameters, momentum=rule.momentum, **decay)
    if rule.name == "adamw":
        return torch.optim.AdamW(parameters, **decay)
    return torch.optim.Adam(parameters, amsgrad=rule.name == "amsgrad", **decay)


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(model: nn.Module, seed: int) -> list[Tensor]:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.momentum}-{rule.weight_decay}")
class TestAgainstTorch:
    def test_rounds_after_reset_equal_new_optimizers(self, rule):
        mine = small_model()
        theirs = copy.deepcopy(mine)
        optimizer = Optimizer(Opt(mine), rule)
        for t in range(3):
            optimizer.reset()
            fresh = torchs_own(theirs.parameters(), rule)
            for step in range(5):
                optimizer.apply(gradients(mine, 10 * t + step))
                for p, g in zip(theirs.parameters(), gradients(theirs, 10 * t + step), strict=True):
                    p.grad = g
                fresh.step()
                assert_equal(mine, theirs)

    def test_without_reset_equal_one_that_goes_on(self, rule):
        mine = small_model()
        theirs = copy.deepcopy(mine)
        optimizer, other = Optimizer(Opt(mine), rule), torchs_own(theirs.parameters(), rule)
        for step in range(6):
            optimizer.apply(gradients(mine, step))
            for p, g in zip(theirs.parameters(), gradients(theirs, step), strict=True):
                p.grad = g
            other.step()
        assert_equal(mine, theirs)

    def test_slots_keep_their_addresses(self, rule):
        model = small_model()
        optimizer = Optimizer(Opt(model), rule)
        before = {name: value.data_ptr() for name, value in optimizer.slots().items()}
        optimizer.apply(gradients(model, 0))
        optimizer.reset()
        optimizer.apply(gradients(model, 1))
        assert {name: value.data_ptr() for name, value in optimizer.slots().items()} == before

    def test_slots_are_named_by_parameter_from_the_start(self, rule):
        optimizer = Optimizer(Opt(small_model()), rule)
        kinds = SLOTS[rule.name] if rule.momentum or rule.name != "sgd" else set()
        names = ("0.weight", "0.bias", "2.weight", "2.bias")
        assert set(optimizer.slots()) == {f"{name}.{kind}" for name in names for kind in kinds}
        assert all(not value.any() for value in optimizer.slots().values())

    def test_slots_copied_to_another_optimizer_carry_on(self, rule):
        mine = small_model()
        optimizer = Optimizer(Opt(mine), rule)
        for step in range(3):
            optimizer.apply(gradients(mine, step))
        twin = copy.deepcopy(mine)
        resumed = Optimizer(Opt(twin), rule)
        for name, value in resumed.slots().items():
            value.copy_(optimizer.slots()[name])
        for step in range(3, 6):
            optimizer.apply(gradients(mine, step))
            resumed.apply(gradients(twin, step))
        assert_equal(mine, twin)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.momentum}-{rule.weight_decay}")
@pytest.mark.parametrize("norm", [0.01, 0.3, 100.0])
def test_clipped_steps_are_those_of_torch(rule, norm):
    mine = small_model()
    theirs = copy.deepcopy(mine)
    optimizer = Optimizer(Opt(mine), replace(rule, clip_norm=norm))
    other = torchs_own(theirs.parameters(), rule)
    for step in range(5):
        optimizer.apply(gradients(mine, step))
        for p, g in zip(theirs.parameters(), gradients(theirs, step), strict=True):
            p.grad = g
        nn.utils.clip_grad_norm_(theirs.parameters(), norm)
        other.step()
        assert_equal(mine, theirs)


def test_stacked_gradients_are_clipped_as_those_of_single_clients():
    apart = [gradients(small_model(), seed) for seed in range(4)]
    apart = [[g * 10**at for g in some] for at, some in enumerate(apart)]
    stacked = clip_gradients([torch.stack(parts) for parts in zip(*apart, strict=True)], 1.0, stacked=True)
    alone = [clip_gradients(some, 1.0) for some in apart]
    for together, parts in zip(stacked, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(parts))


class TestParameters:
    def test_by_hand(self):
        p = nn.Parameter(torch.tensor([1.0]))
        optimizer = Optimizer(Opt([p], Rule("sgd", lr=0.5, momentum=0.5)), Rule())
        optimizer.apply([torch.tensor([1.0])])  # buffer 1, p = 1 - 0.5
        assert p.item() == 0.5
        optimizer.apply([torch.tensor([1.0])])  # buffer 0.5 + 1, p = 0.5 - 0.75
        assert p.item() == -0.25

    def test_an_own_rule_goes_before_the_experiments(self):
        p = nn.Parameter(torch.tensor([1.0]))
        Optimizer(Opt([p], Rule(lr=0.25)), Rule(lr=1.0)).apply([torch.tensor([1.0])])
        assert p.item() == 0.75

    def test_frozen_parameters_are_left_out(self):
        model = small_model()
        model[0].requires_grad_(False)
        assert list(Optimizer(Opt(model), Rule(momentum=0.9)).parameters) == ["2.weight", "2.bias"]

    def test_a_list_names_by_position(self):
        model = small_model()
        model[0].weight.requires_grad_(False)
        assert list(Opt(list(model.parameters())).named_parameters()) == ["1", "2", "3"]

    @pytest.mark.parametrize("rule", [Rule(momentum=0.9), Rule("adam"), Rule("amsgrad")])
    def test_a_parameter_without_gradient_stays_and_so_do_its_slots(self, rule):
        a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = Optimizer(Opt([a, b], rule), Rule())
        optimizer.apply([torch.ones(2), None])
        assert (a != 1).all()
        assert (b == 1).all()
        assert not any(value.any() for name, value in optimizer.slots().items() if name.startswith("1."))

    def test_the_gradient_of_the_step_before_is_not_used_again(self):
        a = nn.Parameter(torch.ones(1))
        optimizer = Optimizer(Opt([a], Rule(lr=0.5)), Rule())
        optimizer.apply([torch.ones(1)])
        optimizer.apply([None])
        assert a.item() == 0.5
