"""Every method under attack and with a defense: runs end, attackers are not counted, wrong mixes are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import assemble_tiny, new_folder, run_tiny
from pluribus.conformance.bits import run_difference
from pluribus.conformance.cases import Case
from pluribus.errors import ConfigError, ConflictError, MismatchError, NotFiniteError, RangeError
from pluribus.experiment import Experiment
from pluribus.host import make_host
from pluribus.internal.attacks import ATTACKS, Kind
from pluribus.internal.defenses import DEFENSES
from pluribus.message import Message, Rows, decode
from pluribus.method import methods
from pluribus.request import Reply, Work
from pluribus.server_half import ServerHalf
from refusals import refused

NAMES = list(methods())
ONE_MODEL = "mlp-64", "tiny-vit-32"  # of methods without and with pretrained backbones


def case(name: str, **settings: Any) -> Case:
    return Case(name, Path(new_folder())).but(**settings)


@pytest.mark.parametrize("name", NAMES)
def test_figures_under_attack_are_of_honest_clients(name: str) -> None:
    """One attack each, in turn: every attack meets several methods."""
    result = case(name, attack=ATTACKS[NAMES.index(name) % len(ATTACKS)], attackers=1).result
    (liar,) = result.history[-1]["attackers"]
    evaluated = [record["clients"].keys() for record in result.history if record["clients"]]
    assert evaluated
    assert all(clients == {str(k) for k in range(4) if k != liar} for clients in evaluated)
    assert math.isfinite(result.score)
    assert any("honest" in note for note in result.warnings)


@pytest.mark.parametrize("name", NAMES)
def test_a_defense_runs_or_is_refused_before_round_0(name: str) -> None:
    """One defense each, in turn: every defense meets several methods."""
    defense = DEFENSES[NAMES.index(name) % len(DEFENSES)]
    same = "4" if methods()[name].capacity == "rank" else ""
    here = case(name, clients=5, attack="scale", attackers=1, defense=defense, models=ONE_MODEL, capacity=same)
    if defense not in here.cls.defenses:
        with refused(MismatchError, f"--defense {defense}", name):
            here.parts()
    else:
        assert math.isfinite(here.result.score)


# ---- what attackers send ---------------------------------------------------------------------------------------------


def sent(method: str, t: int = 0, **settings: Any) -> tuple[list[Message], int]:
    """What the four clients of a tiny federation send in round t, and who of them may be an attacker."""
    parts = assemble_tiny(method, **settings)
    host, found = make_host(parts, lambda k: None), []
    for k in range(4):
        for now in range(t + 1):
            reply = host.answer(Work(k, now))
            assert isinstance(reply, Reply)
        assert isinstance(reply.up, bytes)
        found.append(decode(reply.up, host.wires(k)[0].up, f"client {k}"))
    (liar,) = Experiment(clients=4, attack="scale", attackers=1).lies().clients  # type: ignore[union-attr]
    return found, liar


def means(messages: list[Message]) -> list[Rows]:
    return [one.rows("means") for one in messages]


@pytest.mark.parametrize(("attack", "factor"), [("sign-flip", -1.0), ("scale", 3.0)])
def test_attackers_alone_send_lies(attack: str, factor: float) -> None:
    honest, liar = sent("fedgh")
    strength = {"attack_strength": factor} if attack == "scale" else {}
    lies, _ = sent("fedgh", attack=attack, attackers=1, **strength)
    for k, (true, told) in enumerate(zip(means(honest), means(lies), strict=True)):
        assert torch.equal(true.held, told.held)
        assert torch.equal(told.value, true.value * factor if k == liar else true.value)


def test_noise_is_as_strong_as_it_should_be() -> None:
    honest, liar = sent("fedgh")
    lies, _ = sent("fedgh", attack="noise", attackers=1, attack_strength=5.0)
    true, told = means(honest)[liar], means(lies)[liar]
    size = float(true.value[true.held].square().mean().sqrt())
    noise = (told.value - true.value)[true.held]
    assert float(noise.std()) == pytest.approx(5 * size, rel=0.15)
    assert not told.value[~told.held].any()


def test_weights_are_falsified_relative_to_the_download() -> None:
    """A client that got w and has w + d sends w - d."""
    settings = {"models": "mlp-64"}
    parts = [assemble_tiny("fedavg", **settings, **more) for more in ({}, {"attack": "sign-flip", "attackers": 1})]
    (liar,) = Experiment(clients=4, attack="scale", attackers=1).lies().clients  # type: ignore[union-attr]
    down = ServerHalf(parts[0].method, parts[0].task, parts[0].cards).download(0, liar)
    start, ups = None, []
    for one in parts:
        host = make_host(one, lambda k: None)
        reply = host.answer(Work(liar, 0, 0, down))
        assert isinstance(reply, Reply)
        assert isinstance(reply.up, bytes)
        assert down is not None
        start = decode(down, host.wires(liar)[0].down, "server").part()
        ups.append(decode(reply.up, host.wires(liar)[0].up, "client").part())
    assert start is not None
    true, told = ups
    for name, value in start.items():
        assert torch.allclose(told[name] - value, value - true[name], atol=1e-6), name
    assert any(not torch.equal(told[name], true[name]) for name in true)


def test_nan_is_no_valid_message() -> None:
    with pytest.raises(NotFiniteError):
        sent("fedgh", attack="nan", attackers=1)
    result = run_tiny(attack="nan", attackers=1)
    (liar,) = result.history[0]["attackers"]
    assert all(record["left_out"].keys() == {str(liar)} for record in result.history)
    assert all(record["answered"] == 3 for record in result.history)


def test_replay_sends_the_first_message_again() -> None:
    first, liar = sent("fedgh")
    third, _ = sent("fedgh", t=2)
    lies, _ = sent("fedgh", t=2, attack="replay", attackers=1)
    for k in range(4):
        expected = first if k == liar else third
        assert torch.equal(means(lies)[k].value, means(expected)[k].value)
    assert not torch.equal(means(first)[liar].value, means(third)[liar].value)


def test_attackers_train_on_flipped_labels() -> None:
    honest, lying = assemble_tiny(), assemble_tiny(attack="label-flip", attackers=1)
    attack = lying.experiment.lies()
    assert attack is not None
    for k in range(4):
        for part in ("train", "val", "test"):
            true, told = (one.data.sets(k)[part].labels() for one in (honest, lying))
            flipped = k in attack.clients and part == "train"
            assert torch.equal(told, 9 - true if flipped else true), (k, part)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["label-flip", "noise", "nan", "replay"])
@pytest.mark.parametrize("method", ["fedgh", "fedh2l"])
def test_a_resumed_run_under_attack_has_the_same_bits(method: str, attack: Kind) -> None:
    here = case(method, attack=attack, attackers=1, rounds=3)
    assert run_difference(here.result, here.run_in_two_parts(1)) is None


@pytest.mark.parametrize("attack", ["noise", "replay"])
def test_workers_send_the_same_lies(attack: Kind) -> None:
    here = case("fedgh", attack=attack, attackers=1, defense="median", rounds=3)
    assert run_difference(here.result, here.but(workers=2).result) is None


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "facts", "settings"),
    [
        (ConflictError, ["--attackers", "--attack"], {"attackers": 0.2}),
        (RangeError, ["--attackers", "1.5"], {"attack": "nan", "attackers": 1.5}),
        (RangeError, ["--attackers", "0"], {"attack": "nan", "attackers": 0}),
        (ConflictError, ["--attackers", "4"], {"attack": "nan", "attackers": 4}),
        (ConflictError, ["--attackers", "0.9"], {"attack": "nan", "attackers": 0.9}),
        (ConflictError, ["--attack-strength", "scale"], {"attack": "sign-flip", "attack_strength": 2.0}),
        (ConflictError, ["--defense-share", "krum"], {"defense": "median", "defense_share": 0.1}),
        (RangeError, ["--defense-share", "0.5"], {"defense": "krum", "defense_share": 0.5}),
        (ConflictError, ["krum", "5", "4"], {"defense": "krum"}),
        (ConflictError, ["median", "3", "2"], {"defense": "median", "participation": 0.5}),
        (ConflictError, ["label-flip", "fedhpl"], {"attack": "label-flip", "partition": "fedhpl-dir"}),
    ],
)
def test_wrong_mixes_are_refused_before_round_0(
    kind: type[ConfigError], facts: list[object], settings: dict[str, Any]
) -> None:
    with refused(kind, *facts):
        assemble_tiny(**settings)


def test_a_method_that_asks_one_client_at_a_time_has_no_defense() -> None:
    with refused(ConflictError, "median", 3, 1):
        assemble_tiny("fedhe", mode="async", defense="median")


def test_messages_need_others_of_their_form() -> None:
    """Heads of one shape, but one architecture of the four has a width of its own."""
    with refused(MismatchError, "median", "--models"):
        case("fedhpl", defense="median", share_prompts=True).parts()


def test_numbers_have_no_labels_to_flip() -> None:
    with refused(MismatchError, "label-flip", "numbers"):
        assemble_tiny("local", data="diabetes", models="mlp-64", clients=4, attack="label-flip")


def test_a_method_that_sends_nothing_is_no_mistake() -> None:
    """It is the baseline of comparisons under attack."""
    result = run_tiny("local", attack="sign-flip", attackers=1, defense="median")
    assert any("sends nothing" in note for note in result.warnings)
    assert result.score == run_tiny("local", attack="nan", attackers=1).score


# ---- words -----------------------------------------------------------------------------------------------------------


def test_figures_say_whose_they_are() -> None:
    lying, honest = run_tiny(attack="noise", attackers=1), run_tiny()
    assert "honest clients" in repr(lying)
    assert "honest" not in repr(honest)
    assert "attackers" not in honest.history[0]


def test_a_clipped_model_stays_near_the_model_that_was_sent() -> None:
    """The server clips updates, not weights: with a huge factor, the new model is no further away than honest ones."""
    moved = {}
    lies = {"attack": "scale", "attack_strength": 1000.0, "attackers": 1}
    for name, settings in {"honest": {}, "clipped": lies}.items():
        parts = assemble_tiny("fedavg", models="mlp-64", defense="clip", **settings)
        half = ServerHalf(parts.method, parts.task, parts.cards, defense=parts.experiment.guard())
        host = make_host(parts, lambda k: None)
        half.begin(0)
        before = {n: v.clone() for n, v in half.state().items()}
        replies = {k: host.answer(Work(k, 0, 0, half.download(0, k))) for k in range(4)}
        half.aggregate(0, {k: half.read(0, k, reply.up) for k, reply in replies.items()})  # type: ignore[union-attr, arg-type]
        moved[name] = sum(float((half.state()[n] - v).square().sum()) for n, v in before.items()) ** 0.5
    assert 0.5 < moved["clipped"] / moved["honest"] < 2
