"""Promises about messages: bytes as declared, one schema per model, a pure download, no field for nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from pluribus.conformance.bits import tensor_difference
from pluribus.conformance.by_hand import Sent
from pluribus.conformance.cases import Case
from pluribus.conformance.hands import server_of, worked
from pluribus.conformance.promise import BrokenError
from pluribus.host import Host, make_host
from pluribus.internal.ledger import Entry
from pluribus.internal.state import restore
from pluribus.internal.views import SERVER_VIEWS
from pluribus.message import HEADER, Dim, Field, Schema, Wire, schema_of, tensor_bytes
from pluribus.method import PeerMethod, Sizes


def bytes_as_declared(case: Case) -> None:
    """The ledger has what was serialized, and each tensor has the bytes that the schema comes to."""
    result, hand = case.result, case.once(worked).hand
    for one in hand.messages:
        _check_fits(one, tensor_bytes(one.data), _schemas(hand.host, one.client, one.direction))
    entries = list(result.ledger.entries())
    for way, total in result.bytes.items():
        booked = sum(entry.bytes for entry in entries if entry.direction == way)
        recorded = sum(record["bytes"][way] for record in result.history)
        if not total == booked == recorded:
            raise BrokenError(f"the run counts {total} bytes '{way}', its ledger {booked}, its rounds {recorded}")
    serialized = Counter(
        Entry(*one[:4], name, size) for one in hand.messages for name, size in tensor_bytes(one.data).items()
    )
    counted = Counter(entry for entry in entries if entry.direction != "evaluation")
    if counted != serialized:
        odd = next(iter((counted - serialized) or (serialized - counted)))
        raise BrokenError(
            f"round {odd.round}, client {odd.client}: {odd.bytes} bytes of '{odd.tensor}' go {odd.direction} in only "
            f"one of two equal runs",
            "Let messages depend on the client, its data, its state and the round alone.",
        )
    for (t, k, view), sizes in _evaluations(entries).items():
        schema = hand.host.wires(k)[0].down
        if view:
            schema = schema_of(hand.parts.task.shape_of(hand.method.server_model(hand.server, view, k).model), view)
        _check_fits(Sent(t, 0, k, "evaluation", b""), sizes, [schema])


def _evaluations(entries: Iterable[Entry]) -> dict[tuple[int, int, str], dict[str, int]]:
    """Bytes per tensor of the downloads for evaluation, by round, client and view of the server."""
    found: dict[tuple[int, int, str], dict[str, int]] = {}
    for entry in entries:
        if entry.direction == "evaluation" and entry.tensor != HEADER:
            view = entry.tensor.partition(".")[0]
            key = entry.round, entry.client, view if view in SERVER_VIEWS else ""
            found.setdefault(key, {})[entry.tensor] = entry.bytes
    return found


def _check_fits(one: Sent, sizes: dict[str, int], schemas: list[Schema]) -> None:
    if one.data and sum(sizes.values()) != len(one.data):
        raise BrokenError(f"a message has {len(one.data)} bytes, but its tensors have {sum(sizes.values())}")
    if not any(_fits(sizes, schema) for schema in schemas):
        named = {name: size for name, size in sizes.items() if name != HEADER}
        declared = [", ".join(schema) or "nothing" for schema in schemas]
        raise BrokenError(
            f"round {one.round}, client {one.client}, {one.direction}: {named} was sent, but the schema has "
            f"{' or '.join(declared)}"
        )


def _schemas(host: Host, client: int, direction: str) -> list[Schema]:
    """What may go this way: of a peer method what comes down is what another sent up."""
    wires = host.wires(client)
    if direction == "up":
        return [schema for wire in wires for schema in (wire.up, wire.once)]
    if isinstance(host.method, PeerMethod):
        return [wire.up for k in host.cards for wire in host.wires(k)]
    return [wire.down for wire in wires]


def _fits(sizes: dict[str, int], schema: Schema) -> bool:
    """Whether each tensor has exactly the bytes that its declared shape and dtype come to."""
    sizes = {name: size for name, size in sizes.items() if name != HEADER}
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
    return math.prod(size for size in field.shape if isinstance(size, int)) * field.dtype.itemsize


def traffic_within_bound(case: Case) -> None:
    """No client sends or gets more in a round than `Method.traffic` says."""
    parts = case.seen_parts
    wires = make_host(parts, lambda k: None).wires
    counts = {k: parts.data.counts(k) for k in parts.cards}
    known = {label for held in counts.values() for label, count in enumerate(held) if count}
    found = Counter[tuple[str, int, int]]()
    for entry in case.result.ledger.entries():
        if entry.tensor != HEADER and not _is_enrolment(wires(entry.client)[0], entry):
            found[entry.direction, entry.client, entry.round] += entry.bytes
    for (direction, k, t), size in found.items():
        held = sum(count > 0 for count in counts[k])
        most = parts.method.traffic(parts.task, parts.cards[k], Sizes(held, len(known), parts.local.batch))
        if direction in most._fields and size > getattr(most, direction):
            raise BrokenError(
                f"round {t}, client {k}: {size} bytes go {direction}, but traffic says at most "
                f"{getattr(most, direction):g}"
            )


def _is_enrolment(wire: Wire, entry: Entry) -> bool:
    """Whether this went up when the client enrolled, which is once."""
    return entry.direction == "up" and entry.tensor.removesuffix(".ids") in wire.once


def one_schema_per_model(case: Case) -> None:
    """All clients with the same model have the same schema."""
    parts = case.parts()
    first: dict[str, tuple[int, tuple[Wire, ...]]] = {}
    for k, card in parts.cards.items():
        wires = parts.method.wires(parts.task, card)
        other, known = first.setdefault(card.model, (k, wires))
        for one, two in zip(known, wires, strict=False):
            for way in ("down", "up", "once"):
                a, b = getattr(one, way), getattr(two, way)
                for name in [name for name in {**a, **b} if a.get(name) != b.get(name)]:
                    raise BrokenError(
                        f"clients {other} and {k} both have {card.model}, but '{name}' ({way}) is {_shape(a.get(name))}"
                        f" and {_shape(b.get(name))}"
                    )


def _shape(field: Field | None) -> str:
    return "not declared" if field is None else f"{tuple(field.shape)} {str(field.dtype).removeprefix('torch.')}"


def pure_download(case: Case) -> None:
    """Called twice, `download` gives equal bytes and leaves the server as it was."""
    hand = case.once(worked).hand
    before = server_of(hand)
    try:
        calls = [(stage, k) for stage in range(len(hand.method.exchanges)) for k in hand.parts.cards]
        first = {call: hand.download(*call) for call in calls}
        if changed := tensor_difference(before, server_of(hand)):
            raise BrokenError(f"download changes the server: server.state {changed}")
        for stage, k in reversed(calls):
            if hand.download(stage, k) != first[stage, k]:
                raise BrokenError(f"the second download for client {k} differs from the first one")
    finally:
        restore(hand.server.state.state_dict(), before, "the server")


def every_field_is_used(case: Case) -> None:
    """The server reads every field of uploads, and every field of downloads makes a difference to some client."""
    hand = case.once(worked).hand
    if hand.is_unstable:
        raise BrokenError(
            "the same download twice leaves different clients, so its fields cannot be tried",
            "Take random numbers from client.draw, and keep all that changes in client.state.",
        )
    if ignored := hand.ignored("up"):
        raise BrokenError(f"no function of the server reads {_names(ignored)} of the uploads")
    if ignored := hand.ignored("down"):
        raise BrokenError(f"other numbers in {_names(ignored)} of the downloads change nothing for any client")
    tried = {name for (direction, _), name in hand.sent if direction == "down"}
    wires = [wire for k in hand.parts.cards for wire in hand.host.wires(k)]
    downs = [wire.up for wire in wires] if isinstance(hand.method, PeerMethod) else [wire.down for wire in wires]
    declared = {name for schema in downs for name, field in schema.items() if not field.optional}
    if missing := sorted(declared - tried):
        raise BrokenError(f"{_names(missing)} is declared as a download, but nothing came down in the last round")


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in fields)
