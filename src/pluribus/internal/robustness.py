"""Whether an attack and a defense suit a federation: checked before round 0."""

from __future__ import annotations

from collections import Counter

from pluribus.errors import ConflictError, MismatchError
from pluribus.experiment import Experiment
from pluribus.internal.attacks import MOST_REPLAYED, OF_NUMBERS, Attack, replay_bytes
from pluribus.internal.defenses import FEWEST, SHARED
from pluribus.message import Dim, Field, Schema
from pluribus.method import Method, Wires, name_of
from pluribus.task import Cards, Task


def check_robustness(experiment: Experiment, method: Method, task: Task, cards: Cards) -> list[str]:
    """Refuse an attack or a defense that could not do what its name says. Returns notes about what they do."""
    attack = experiment.lies()
    if attack is None and experiment.defense == "none":
        return []
    wires = Wires(method, task, cards)
    sent = [wire.up for card in cards.firsts() for wire in wires(card.id)]
    notes = []
    if attack is not None:
        _check_attack(attack, method, task, sent)
        notes.append(_describe(attack, task))
    if not any(sent):
        label = name_of(type(method))
        notes.append(f"{label} sends nothing: it needs no defense, and attackers harm only themselves.")
    elif experiment.defense != "none":
        _check_defense(experiment, method, task, cards, wires)
    return notes


def _describe(attack: Attack, task: Task) -> str:
    """Who the attackers are, as a note."""
    shown = ", ".join(map(str, sorted(attack.clients)[:20])) + (", ..." if len(attack.clients) > 20 else "")
    number, honest = len(attack.clients), task.clients - len(attack.clients)
    who = f"client {shown} attacks" if number == 1 else f"clients {shown} attack"
    return f"{who} ({attack.kind}): all figures are of the {honest} honest clients."


def _check_attack(attack: Attack, method: Method, task: Task, sent: list[Schema]) -> None:
    if attack.kind == "label-flip" and task.target.kind == "numbers":
        raise MismatchError("--attack label-flip needs labels, but here numbers are predicted: use another attack.")
    if attack.kind in OF_NUMBERS and any(sent) and not any(_floats(one) for one in sent):
        raise MismatchError(
            f"--attack {attack.kind} changes numbers of messages, and those of {name_of(type(method))} hold none."
        )
    if attack.replays and max(replay_bytes(one, task.classes, {}) for one in sent) > MOST_REPLAYED:
        raise MismatchError(
            f"--attack replay keeps a message of every client, and one of {name_of(type(method))} may take more than "
            f"{MOST_REPLAYED // 2**20} MB: use another attack or a smaller model."
        )


def _check_defense(experiment: Experiment, method: Method, task: Task, cards: Cards, wires: Wires) -> None:
    label, name, defense = name_of(type(method)), experiment.defense, experiment.guard()
    if name not in method.defenses:
        others = f"--defense {' or '.join(method.defenses)}" if method.defenses else "--defense none"
        raise MismatchError(f"--defense {name} does not suit what clients of {label} send: use {others}.")
    chosen = method.participants(task, 0)
    present = experiment.sampled() if chosen is None else len(chosen)
    liars = defense.liars(present)
    needed = 2 * liars + FEWEST if name == "krum" else FEWEST
    if present < needed:
        share = f" if a share of {defense.share:g} may lie" if name in SHARED else ""
        raise ConflictError(
            f"--defense {name} needs the messages of at least {needed} clients{share}, and a round has {present}: use "
            f"more --clients or a larger --participation."
        )
    if not method.defends_itself:
        _check_comparable(label, name, cards, wires)


def _check_comparable(label: str, name: str, cards: Cards, wires: Wires) -> None:
    """Refuse messages that are compared with too few others, or cannot be compared number by number."""
    layouts: Counter[object] = Counter()
    for k in cards:
        for stage, wire in enumerate(wires(k)):
            plain = {n: one.shape for n, one in _floats(wire.up) if one.form == "tensor"}
            if name != "clip" and (sized := [n for n, shape in plain.items() if _varies(shape)]):
                raise MismatchError(
                    f"--defense {name} compares numbers one by one, but the size of '{sized[0]}', which clients of "
                    f"{label} send, differs from client to client: use --defense clip or none."
                )
            if plain:
                layouts[stage, tuple(sorted(plain.items(), key=lambda pair: pair[0]))] += 1
    if layouts and (fewest := min(layouts.values())) < FEWEST:
        raise MismatchError(
            f"--defense {name} compares messages with the same fields and shapes, and here only {fewest} "
            f"{'clients send' if fewest > 1 else 'client sends'} some of them: use fewer architectures (--models), at "
            f"least {FEWEST} clients of each."
        )


def _varies(shape: tuple[int | Dim, ...]) -> bool:
    return any(isinstance(size, Dim) for size in shape)


def _floats(schema: Schema) -> list[tuple[str, Field]]:
    return [(name, one) for name, one in schema.items() if one.dtype.is_floating_point]
