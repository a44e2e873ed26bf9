"""Everything that leaves a client is a Message: named tensors, declared in a Schema, checked on receipt, never pickled.

A method declares what may be sent; `encode` refuses to send anything else, and `decode` refuses to accept it.
Class-keyed vectors (`Rows`) are dense with a mask in memory, so that training steps see fixed shapes. A serialized
message has only the held rows, so that no bytes are spent on the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from pluribus.errors import NotFiniteError, SchemaError, UnreadableMessageError

Source = Literal["weights", "class sums", "public", "gradient", "statistic", "rows"]
"""Where a field of an upload comes from: trained weights; sums over the rows of a class; outputs for public rows; a
gradient of private rows that is sent as such; a number about private rows, such as a count; single private rows."""
NOT_DECLARED = "not declared"  # how a field without a source is shown

LARGEST = 2.0**40  # of a number in a message: training with larger ones overflows, and honest clients have none
HEADER = "(header)"  # the name of the bytes that belong to no tensor


@dataclass(frozen=True)
class Dim:
    """A size known only at run time, but never above `most`. Equal names in one message have equal sizes."""

    name: str
    most: int


@dataclass(frozen=True)
class Field:
    """One named value of a message.

    `form="rows"`: class-keyed vectors, shape (classes, ...); only held rows and their class numbers are sent.
    `kept=False`: `Method.receive` uses it and nothing reads it afterwards, so `client.got` has no copy of it.
    `optional=True`: a message may leave it out; such a field is not kept.
    `least` and `most`: bounds of its numbers, such as 0 for counts. A message with others is refused.
    `source`: where it comes from, if a client sends it. That decides what bounds what it tells about private rows.
    """

    shape: tuple[int | Dim, ...]
    dtype: torch.dtype = torch.float32
    form: Literal["tensor", "rows"] = "tensor"
    kept: bool = True
    optional: bool = False
    least: float | None = None
    most: float | None = None
    source: Source | None = None


Schema = Mapping[str, Field]


@dataclass(frozen=True)
class Wire:
    """The schemas of one exchange, in both directions. `once` is the message that a client sends when it enrolls."""

    down: Schema = field(default_factory=dict)
    up: Schema = field(default_factory=dict)
    once: Schema = field(default_factory=dict)


@dataclass
class Rows:
    """Class-keyed vectors: `value` (classes, ...) and `held` (classes,), a mask. Rows that are not held are zero."""

    value: Tensor
    held: Tensor


Value = Tensor | Rows


class Fields(Mapping[str, Value]):
    """Values by name, of either kind."""

    def tensor(self, name: str) -> Tensor:
        value = self[name]
        assert isinstance(value, Tensor), f"'{name}' is class-keyed: use rows()"
        return value

    def rows(self, name: str) -> Rows:
        value = self[name]
        assert isinstance(value, Rows), f"'{name}' is a plain tensor: use tensor()"
        return value


class Message(Fields):
    """Tensors by flat dotted name. A message copies its tensors, so it never aliases a live weight.

    >>> m = Message({"mean": torch.tensor([1.0, 2.0])})
    >>> m["mean"].tolist()
    [1.0, 2.0]
    """

    def __init__(self, fields: Mapping[str, Value]) -> None:
        self._fields = {name: _copy(value) for name, value in fields.items()}

    @classmethod
    def of(cls, module: nn.Module, prefix: str = "") -> Message:
        """All weights and buffers of a module, under a prefix: "head" and "head." both give "head.weight"."""
        start = _add_dot(prefix)
        return cls({start + name: value for name, value in module.state_dict().items()})

    def __getitem__(self, name: str) -> Value:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def part(self, prefix: str = "") -> dict[str, Tensor]:
        """The plain tensors under a prefix, named without it, for `load_state_dict`. "head" is the same as "head."."""
        start = _add_dot(prefix)
        return {n[len(start) :]: v for n, v in self._fields.items() if n.startswith(start) and isinstance(v, Tensor)}


class Parcel:
    """A serialized message in another process: only the bytes of each tensor are known here."""

    layout: dict[str, int]


class Kept(dict[str, Value], Fields):
    """The fields that a client keeps of its downloads: live buffers of fixed shape."""


def _add_dot(prefix: str) -> str:
    """The prefix with one dot at its end, whether or not the caller wrote it."""
    return prefix if not prefix or prefix.endswith(".") else f"{prefix}."


def _copy(value: Value) -> Value:
    if isinstance(value, Rows):
        return Rows(value.value.detach().clone(), value.held.detach().clone())
    return value.detach().clone()


def schema_of(module: nn.Module, prefix: str = "", kept: bool = False) -> dict[str, Field]:
    """The schema of `Message.of(module, prefix)`."""
    start, tensors = _add_dot(prefix), module.state_dict().items()
    return {start + n: Field(tuple(v.shape), v.dtype, kept=kept, source="weights") for n, v in tensors}


def sources_of(wires: Iterable[Wire]) -> dict[str, list[str]]:
    """The sources of all that a client sends, each with the names of its fields."""
    found: dict[str, list[str]] = {}
    for schema in (schema for wire in wires for schema in (wire.once, wire.up)):
        for name, declared in schema.items():
            found.setdefault(declared.source or NOT_DECLARED, []).append(name)
    return found


def payload(schema: Schema, rows: int, sizes: Mapping[str, int]) -> int:
    """Upper bound of the bytes of a message without its header. Class-keyed fields have `rows` rows and class numbers.

    `sizes` has the run-time sizes that are already known, by name. Unknown and larger sizes count as their bound.
    """
    total = 0
    for one in schema.values():
        shape = [min(n.most, sizes.get(n.name, n.most)) if isinstance(n, Dim) else n for n in one.shape]
        if one.form == "rows":
            total += rows * (math.prod(shape[1:]) * one.dtype.itemsize + ID_BYTES)
        else:
            total += math.prod(shape) * one.dtype.itemsize
    return total


class Inbox(NamedTuple):
    """The messages of a student's teachers: the teachers' ids, and each field stacked along a first dimension."""

    ids: tuple[int, ...]
    got: Mapping[str, Tensor]

    @classmethod
    def of(cls, messages: Mapping[int, Message], device: torch.device) -> Inbox:
        """Stack messages of one schema, in the order of their senders."""
        ids = tuple(sorted(messages))
        names = list(messages[ids[0]])
        for name in names:
            if len({messages[k].tensor(name).shape for k in ids}) > 1:
                raise SchemaError(f"'{name}' differs in shape between clients {', '.join(map(str, ids))}.")
        return cls(ids, {name: torch.stack([messages[k].tensor(name) for k in ids]).to(device) for name in names})


IDS = ".ids"  # suffix for the class numbers of a class-keyed field
ID_BYTES = 4  # a class number is an int32
METADATA = "__metadata__"  # the format allows free text here; a message has none


def encode(message: Message, schema: Schema, who: str, checked: bool = True) -> bytes:
    """Serialize a message, after checking that it matches the schema exactly. `checked=False`: a simulated lie."""
    flat: dict[str, Tensor] = {}
    for name, value in _on_cpu(message).items():
        if isinstance(value, Rows):
            rows, mask = tuple(value.value.shape), tuple(value.held.shape)
            if mask != rows[:1]:
                raise SchemaError(f"{who}: '{name}' has rows of shape {rows}, but a mask of shape {mask}.")
            ids = value.held.nonzero().flatten()
            flat[name] = value.value[ids].contiguous()
            flat[name + IDS] = ids.to(torch.int32)
        else:
            flat[name] = value.contiguous()
    if checked:
        _check(flat, schema, who)
    return safetensors.torch.save(flat)


def move_together(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors on another device, in one copy: a GPU makes a thread wait for every copy."""
    kind = torch.device(device).type
    moving = {name: value for name, value in tensors.items() if value.device.type != kind}
    names = sorted(moving, key=lambda name: -moving[name].itemsize)  # so that each starts at a multiple of its size
    copies: dict[str, Tensor] = {}
    if names:
        data = torch.cat([moving[name].detach().contiguous().flatten().view(torch.uint8) for name in names]).to(device)
        for name, part in zip(names, torch.split(data, [moving[name].nbytes for name in names]), strict=True):
            copies[name] = part.view(moving[name].dtype).view(moving[name].shape)
    return {name: copies.get(name, value) for name, value in tensors.items()}


def _on_cpu(message: Message) -> dict[str, Value]:
    """The values of a message on the CPU."""
    parts = {f"{at} {name}": part for name, value in message.items() for at, part in enumerate(_parts(value))}
    moved = move_together(parts, "cpu")
    return {
        name: Rows(moved[f"0 {name}"], moved[f"1 {name}"]) if isinstance(value, Rows) else moved[f"0 {name}"]
        for name, value in message.items()
    }


def _parts(value: Value) -> tuple[Tensor, ...]:
    return (value.value, value.held) if isinstance(value, Rows) else (value,)


def decode(data: bytes, schema: Schema, who: str) -> Message:
    """Read a message from bytes. A MessageError names the sender and the wrong field."""
    try:
        flat = safetensors.torch.load(data)
    # not SafetensorError alone: a dtype that torch lacks is a KeyError, a size above 63 bits a TypeError
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UnreadableMessageError(f"{who}: the message cannot be read ({reason}).") from error
    if METADATA in _header(data):
        raise SchemaError(f"{who}: the message has undeclared {METADATA!r}.")
    _check(flat, schema, who)
    fields: dict[str, Value] = {}
    for name, declared in schema.items():
        if declared.form == "rows":
            fields[name] = _dense(flat[name], flat[name + IDS], declared)
        elif name in flat:
            fields[name] = flat[name]
    return Message(fields)


def tensor_bytes(data: bytes) -> dict[str, int]:
    """Bytes of each tensor of an encoded message; `(header)` has the bytes of the header."""
    entries = {name: entry for name, entry in _header(data).items() if name != METADATA}
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()}
    return sizes | {HEADER: _header_end(data)}


def _header(data: bytes) -> dict[str, Any]:
    """Dtype, shape and offsets of each tensor."""
    return json.loads(data[8 : _header_end(data)])  # type: ignore[no-any-return]


def _header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")  # the format: length of the header, header in JSON, tensors


def _dense(held: Tensor, ids: Tensor, declared: Field) -> Rows:
    classes = _classes(declared)
    value = held.new_zeros((classes, *held.shape[1:]))
    value[ids.long()] = held
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[ids.long()] = True
    return Rows(value, mask)


def _check(flat: Mapping[str, Tensor], schema: Schema, who: str) -> None:
    """Check names, dtypes, shapes and finite values of the tensors as they are sent."""
    expected = _sent_fields(schema)
    required = {name for name, declared in expected.items() if not declared.optional}
    differences = {"lacks": required - flat.keys(), "has undeclared": flat.keys() - expected.keys()}
    if any(differences.values()):
        parts = [f"{verb} {', '.join(map(repr, sorted(names)))}" for verb, names in differences.items() if names]
        raise SchemaError(f"{who}: the message {' and '.join(parts)}.")
    sizes: dict[str, int] = {}
    for name, value in sorted(flat.items()):
        declared = expected[name]
        shape = tuple(value.shape)
        if value.dtype != declared.dtype:
            kinds = [str(dtype).removeprefix("torch.") for dtype in (value.dtype, declared.dtype)]
            raise SchemaError(f"{who}: '{name}' is {kinds[0]}, declared as {kinds[1]}.")
        if not _fits(shape, declared.shape, sizes):
            raise SchemaError(f"{who}: '{name}' has shape {shape}, declared as {_shape_text(declared.shape)}.")
        if (value.is_floating_point() or value.is_complex()) and not bool(torch.isfinite(value).all()):
            raise NotFiniteError(f"{who}: '{name}' holds NaN or infinity.")
        _check_bounds(value, declared, f"{who}: '{name}'")
    for name, declared in schema.items():
        if declared.form == "rows":
            ids, classes = flat[name + IDS].tolist(), _classes(declared)
            if any(not 0 <= number < classes for number in ids):
                raise SchemaError(f"{who}: '{name}' names a class outside 0..{classes - 1}.")
            if len(set(ids)) != len(ids):
                raise SchemaError(f"{who}: '{name}' names a class twice.")


def _check_bounds(value: Tensor, declared: Field, what: str) -> None:
    if declared.least is not None and value.numel() and (least := value.min().item()) < declared.least:
        raise SchemaError(f"{what} holds {least}, and {declared.least} is the least that it may hold.")
    if declared.most is not None and value.numel() and (most := value.max().item()) > declared.most:
        raise SchemaError(f"{what} holds {most}, and {declared.most} is the most that it may hold.")


def _sent_fields(schema: Schema) -> dict[str, Field]:
    flat: dict[str, Field] = {}
    for name, declared in schema.items():
        if declared.form == "rows":
            held = Dim(f"{name} rows", _classes(declared))
            flat[name] = Field((held, *declared.shape[1:]), declared.dtype, least=declared.least, most=declared.most)
            flat[name + IDS] = Field((held,), torch.int32)
        else:
            flat[name] = declared
    return flat


def _fits(shape: tuple[int, ...], declared: tuple[int | Dim, ...], sizes: dict[str, int]) -> bool:
    return len(shape) == len(declared) and all(
        size == want if isinstance(want, int) else size <= want.most and sizes.setdefault(want.name, size) == size
        for size, want in zip(shape, declared, strict=True)
    )


def _classes(declared: Field) -> int:
    classes = declared.shape[0]
    assert isinstance(classes, int), "the number of classes is fixed"
    return classes


def _shape_text(shape: tuple[int | Dim, ...]) -> str:
    return "(" + ", ".join(str(s) if isinstance(s, int) else f"{s.name} <= {s.most}" for s in shape) + ")"
