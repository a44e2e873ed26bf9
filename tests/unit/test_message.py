"""Messages: what goes in comes out, and whatever is not declared is refused with the sender's and the field's name."""

from __future__ import annotations

import json
import re

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pluribus.errors import MessageError, NotFiniteError, SchemaError, UnreadableMessageError
from pluribus.message import Dim, Field, Inbox, Message, Rows, decode, encode, move_together, schema_of, tensor_bytes
from refusals import Kind, refused

examples = settings(deadline=None, max_examples=100)

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def numbers(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, tuple(shape), generator=generator).to(dtype)


@st.composite
def schemas_with_messages(draw) -> tuple[dict[str, Field], Message]:
    """A schema, and a message that follows it."""
    limits = {name: draw(st.integers(0, 4)) for name in ("b", "c")}
    sizes = {name: draw(st.integers(0, most)) for name, most in limits.items()}
    dims = st.one_of(st.integers(0, 3), st.sampled_from([Dim(name, most) for name, most in limits.items()]))
    schema, fields = {}, {}
    for name in draw(st.lists(st.sampled_from(["a", "head.weight", "ω", "p q", "z"]), unique=True)):
        dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000))
        form = draw(st.sampled_from(["tensor", "rows"]))
        declared = draw(st.lists(dims, max_size=3))
        if form == "rows":
            classes = draw(st.integers(1, 5))
            declared = [classes, *declared]
        shape = [size if isinstance(size, int) else sizes[size.name] for size in declared]
        value = numbers(shape, dtype, seed)
        schema[name] = Field(tuple(declared), dtype, form)
        if form == "rows":
            held = torch.tensor(draw(st.lists(st.booleans(), min_size=classes, max_size=classes)))
            value[~held] = 0
            fields[name] = Rows(value, held)
        else:
            fields[name] = value
    return schema, Message(fields)


def assert_same(one: Message, other: Message) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        pairs = [(value, other[name])]
        if isinstance(value, Rows):
            pairs = [(value.value, other.rows(name).value), (value.held, other.rows(name).held)]
        for mine, theirs in pairs:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


def refuses(message: Message, schema, kind: Kind, *facts: object) -> str:
    """The sentence for a message that cannot be sent."""
    with refused(kind, "client 3", *facts) as caught:
        encode(message, schema, "client 3")
    return str(caught.value)


def refuses_bytes(data: bytes, schema, kind: Kind, *facts: object) -> str:
    """The sentence for bytes that cannot be accepted."""
    with refused(kind, "client 3", *facts) as caught:
        decode(data, schema, "client 3")
    return str(caught.value)


def crafted(header: object, body: bytes = b"") -> bytes:
    """A message as somebody without this library could write it."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


class TestRoundTrip:
    @examples
    @given(schemas_with_messages())
    def test_decode_gives_back_what_was_encoded(self, drawn):
        schema, message = drawn
        assert_same(decode(encode(message, schema, "me"), schema, "me"), message)

    @examples
    @given(schemas_with_messages())
    def test_every_byte_belongs_to_a_tensor_or_to_the_header(self, drawn):
        schema, message = drawn
        data = encode(message, schema, "me")
        parts = tensor_bytes(data)
        assert sum(parts.values()) == len(data)
        for name, value in message.items():
            if isinstance(value, Rows):
                held = int(value.held.sum())
                assert parts[name] == value.value[value.held].nbytes
                assert parts[name + ".ids"] == 4 * held
            else:
                assert parts[name] == value.nbytes

    @pytest.mark.parametrize("held", [[], [0], [2], [0, 1, 2]])
    def test_only_held_rows_travel(self, held):
        schema = {"means": Field((3, 4), form="rows")}
        mask = torch.tensor([c in held for c in range(3)])
        message = Message({"means": Rows(torch.arange(12.0).view(3, 4), mask)})
        data = encode(message, schema, "me")
        assert tensor_bytes(data)["means"] == len(held) * 4 * 4
        got = decode(data, schema, "me").rows("means")
        assert got.held.tolist() == mask.tolist()
        assert torch.equal(got.value, torch.arange(12.0).view(3, 4) * mask[:, None])

    def test_strides_do_not_matter(self):
        value = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last).transpose(2, 3)
        schema = {"a": Field((1, 2, 4, 3))}
        assert torch.equal(decode(encode(Message({"a": value}), schema, "me"), schema, "me").tensor("a"), value)

    def test_one_tensor_under_two_names(self):
        value = torch.arange(3.0)
        schema = {"a": Field((3,)), "b": Field((3,))}
        message = Message({"a": value, "b": value})
        assert_same(decode(encode(message, schema, "me"), schema, "me"), message)


class TestMessage:
    def test_a_module_trained_afterwards_does_not_change_it(self):
        module = nn.BatchNorm1d(2)
        message = Message.of(module, "bn.")
        with torch.no_grad():
            for value in module.state_dict().values():
                value.add_(1)
        assert message.tensor("bn.weight").tolist() == [1, 1]
        assert message.tensor("bn.running_mean").tolist() == [0, 0]
        assert message.tensor("bn.num_batches_tracked").item() == 0

    def test_rows_are_copied_too(self):
        rows = Rows(torch.ones(2, 2), torch.tensor([True, False]))
        message = Message({"r": rows})
        rows.value.zero_()
        rows.held.fill_(True)
        assert message.rows("r").value.sum() == 4
        assert message.rows("r").held.tolist() == [True, False]

    def test_it_has_no_gradient(self):
        weight = torch.ones(2, requires_grad=True)
        assert not Message({"a": weight * 2}).tensor("a").requires_grad

    def test_part_takes_plain_tensors_under_a_prefix(self):
        message = Message({"a.x": torch.ones(1), "b.x": torch.zeros(1), "a.r": Rows(torch.ones(1, 1), torch.ones(1))})
        assert list(message.part("a.")) == ["x"]
        assert list(message.part()) == ["a.x", "b.x"]

    def test_a_module_and_its_schema_fit(self):
        module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        schema = schema_of(module, "m.")
        copy = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        copy.load_state_dict(decode(encode(Message.of(module, "m."), schema, "me"), schema, "me").part("m."))
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), copy.parameters(), strict=True))
        assert not any(field.kept for field in schema.values())

    @pytest.mark.parametrize("prefix", ["head", "head."])
    def test_a_prefix_and_its_names_have_one_dot_between_them(self, prefix):
        module = nn.Linear(2, 3)
        message = Message({**Message.of(module, prefix), "header.weight": torch.ones(1)})
        assert list(schema_of(module, prefix)) == ["head.weight", "head.bias"]
        assert set(message) == {"head.weight", "head.bias", "header.weight"}
        for asked in ("head", "head."):
            part = message.part(asked)
            assert list(part) == ["weight", "bias"], "header.weight is no part of the head"
            assert torch.equal(part["weight"], module.weight)

    def test_no_prefix_leaves_names_as_they_are(self):
        module = nn.Linear(2, 3)
        assert list(schema_of(module)) == list(Message.of(module)) == list(Message.of(module).part())
        assert list(schema_of(module)) == ["weight", "bias"]

    def test_inbox_stacks_by_sender(self):
        messages = {5: Message({"p": torch.tensor([5.0])}), 2: Message({"p": torch.tensor([2.0])})}
        inbox = Inbox.of(messages, torch.device("cpu"))
        assert inbox.ids == (2, 5)
        assert inbox.got["p"].tolist() == [[2], [5]]


class TestRefusals:
    """`encode` and `decode` refuse alike; each case is tried both ways where the wire format allows it."""

    def both(self, tensors: dict[str, torch.Tensor], schema, kind: Kind, *facts: object) -> None:
        sent = refuses(Message(tensors), schema, kind, *facts)
        assert refuses_bytes(safetensors.torch.save(tensors), schema, kind, *facts) == sent

    def test_missing(self):
        self.both({"a": torch.ones(1)}, {"a": Field((1,)), "b": Field((1,))}, SchemaError, "lacks 'b'")

    def test_undeclared(self):
        tensors = {"a": torch.ones(1), "secret": torch.ones(1)}
        self.both(tensors, {"a": Field((1,))}, SchemaError, "undeclared 'secret'")

    def test_missing_and_undeclared(self):
        self.both({"b": torch.ones(1)}, {"a": Field((1,))}, SchemaError, "lacks 'a'", "undeclared 'b'")

    def test_nothing_is_declared(self):
        self.both({"a": torch.ones(1)}, {}, SchemaError, "undeclared 'a'")

    def test_dtype(self):
        tensors = {"a": torch.ones(2, dtype=torch.float64)}
        self.both(tensors, {"a": Field((2,))}, SchemaError, "'a'", "float64", "float32")

    @pytest.mark.parametrize("shape", [(), (3,), (2, 1), (1, 2)])
    def test_shape(self, shape):
        self.both({"a": torch.ones(shape)}, {"a": Field((2,))}, SchemaError, "'a'", f"shape {shape}", "(2)")

    def test_more_than_most(self):
        schema = {"a": Field((Dim("b", 4), 2))}
        self.both({"a": torch.ones(5, 2)}, schema, SchemaError, "'a'", "(5, 2)", "(b <= 4, 2)")

    def test_dims_of_one_name_with_two_sizes(self):
        schema = {"a": Field((Dim("b", 4),)), "c": Field((2, Dim("b", 4)))}
        tensors = {"a": torch.ones(3), "c": torch.ones(2, 2)}
        self.both(tensors, schema, SchemaError, "'c'", "(2, 2)", "(2, b <= 4)")

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
    def test_not_finite(self, bad, dtype):
        self.both({"a": torch.tensor([0, bad]).to(dtype)}, {"a": Field((2,), dtype)}, NotFiniteError, "'a'")

    def test_not_finite_in_a_held_row_only(self):
        schema = {"r": Field((2, 1), form="rows")}
        value = torch.tensor([[float("nan")], [1.0]])
        refuses(Message({"r": Rows(value, torch.tensor([True, False]))}), schema, NotFiniteError, "'r'")
        encode(Message({"r": Rows(value, torch.tensor([False, True]))}), schema, "me")

    @pytest.mark.parametrize("number", [-1, 10, -(2**31), 2**31 - 1])
    def test_numbers_beyond_their_bounds(self, number):
        schema = {"a": Field((2,), torch.int32, least=0, most=9), "n": Field((Dim("n", 3),), least=0)}
        tensors = {"a": torch.tensor([0, 9], dtype=torch.int32), "n": torch.zeros(0)}
        encode(Message(tensors), schema, "me")
        wrong = torch.tensor([0, number], dtype=torch.int32)
        self.both(tensors | {"a": wrong}, schema, SchemaError, "'a'", number)

    def test_held_rows_beyond_their_bounds(self):
        schema = {"r": Field((2, 1), form="rows", most=1)}
        value = torch.tensor([[2.0], [1.0]])
        refuses(Message({"r": Rows(value, torch.tensor([True, False]))}), schema, SchemaError, "'r'", 2.0)
        encode(Message({"r": Rows(value, torch.tensor([False, True]))}), schema, "me")

    def test_rows_where_a_tensor_is_declared_and_the_other_way_round(self):
        rows = Message({"a": Rows(torch.ones(2, 1), torch.tensor([True, True]))})
        refuses(rows, {"a": Field((2, 1))}, SchemaError, "undeclared 'a.ids'")
        tensor = Message({"a": torch.ones(2, 1)})
        refuses(tensor, {"a": Field((2, 1), form="rows")}, SchemaError, "lacks 'a.ids'")

    @pytest.mark.parametrize(("rows", "mask"), [((2, 1), (3,)), ((3, 1), (2,)), ((3, 1), (3, 1)), ((), (3,))])
    def test_a_mask_that_does_not_fit_its_rows(self, rows, mask):
        message = Message({"r": Rows(torch.ones(rows), torch.ones(mask, dtype=torch.bool))})
        schema = {"r": Field((3, 1), form="rows")}
        refuses(message, schema, SchemaError, "'r'", f"rows of shape {rows}", f"mask of shape {mask}")

    @pytest.mark.parametrize(
        ("ids", "what"),
        [([1, 1], "twice"), ([0, 3], "outside 0..2"), ([-1, 2], "outside 0..2"), ([0, 2**31 - 1], "outside 0..2")],
    )
    def test_class_ids(self, ids, what):
        data = safetensors.torch.save({"r": torch.ones(2, 4), "r.ids": torch.tensor(ids, dtype=torch.int32)})
        refuses_bytes(data, {"r": Field((3, 4), form="rows")}, SchemaError, "'r'", "class", what)

    @pytest.mark.parametrize("rows", [1, 3, 4])
    def test_other_number_of_rows_than_ids(self, rows):
        data = safetensors.torch.save({"r": torch.ones(rows, 4), "r.ids": torch.tensor([0, 2], dtype=torch.int32)})
        refuses_bytes(data, {"r": Field((3, 4), form="rows")}, SchemaError, "shape")

    def test_ids_of_another_dtype(self):
        data = safetensors.torch.save({"r": torch.ones(1, 4), "r.ids": torch.tensor([0])})
        refuses_bytes(data, {"r": Field((3, 4), form="rows")}, SchemaError, "'r.ids'", "int64", "int32")


SCHEMA = {"a": Field((2, 2)), "r": Field((3, 2), form="rows"), "n": Field((), torch.int64)}


def sample_bytes() -> bytes:
    rows = Rows(torch.ones(3, 2), torch.tensor([True, False, True]))
    return encode(Message({"a": torch.ones(2, 2), "r": rows, "n": torch.tensor(7)}), SCHEMA, "me")


class TestHostileBytes:
    """Whatever arrives, the answer is a message or a MessageError that names the sender."""

    def test_cut_at_every_length(self):
        data = sample_bytes()
        for length in range(len(data)):
            refuses_bytes(data[:length], SCHEMA, UnreadableMessageError)

    def test_one_byte_more(self):
        refuses_bytes(sample_bytes() + b"\0", SCHEMA, UnreadableMessageError)

    @examples
    @given(st.binary(max_size=200))
    def test_garbage(self, data):
        with pytest.raises(MessageError):
            decode(data, SCHEMA, "client 3")

    @examples
    @given(st.binary(max_size=100), st.integers(0, 120))
    def test_garbage_behind_an_honest_length(self, text, length):
        with pytest.raises(MessageError):
            decode(length.to_bytes(8, "little") + text, SCHEMA, "client 3")

    @settings(deadline=None, max_examples=500)
    @given(st.data())
    def test_flipped_bytes_are_read_or_refused(self, data):
        raw = bytearray(sample_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        try:
            message = decode(bytes(raw), SCHEMA, "client 3")
        except MessageError:
            return
        assert set(message) == set(SCHEMA)

    @pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "F8_E8M0", "F8_E4M3", "BF16", "C64", "U64", "I8", "F128", ""])
    @pytest.mark.parametrize("size", [0, 8])
    def test_every_dtype_the_format_knows(self, kind, size):
        bits = {"F4": 4, "F6_E2M3": 6, "BF16": 16, "C64": 64, "U64": 64, "F128": 128}.get(kind, 8)
        length = size * bits // 8
        data = crafted({"a": {"dtype": kind, "shape": [size], "data_offsets": [0, length]}}, bytes(length))
        with pytest.raises((SchemaError, UnreadableMessageError), match="client 3"):
            decode(data, {"a": Field((8,))}, "client 3")

    @pytest.mark.parametrize(
        "shape", [[2**63, 0], [0, 2**64 - 1], [2**62, 4, 0], [2**40, 0], [2**32, 2**32], [-1], [2.5], "2", None]
    )
    def test_impossible_shapes(self, shape):
        data = crafted({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
        with pytest.raises((SchemaError, UnreadableMessageError)) as caught:
            decode(data, {"a": Field((Dim("b", 4), 0))}, "client 3")
        assert re.fullmatch(r"client 3: .+\.", str(caught.value)), "one line, one sentence"

    def test_text_hidden_in_the_header(self):
        data = safetensors.torch.save({"a": torch.ones(1)}, metadata={"note": "what nobody declared"})
        refuses_bytes(data, {"a": Field((1,))}, SchemaError, "undeclared '__metadata__'")
        assert sum(tensor_bytes(data).values()) == len(data)


def test_tensors_that_move_together_keep_dtypes_and_shapes_and_the_others_stay():
    values = {str(dtype): numbers((2, 3), dtype, 0) for dtype in DTYPES} | {
        "one": torch.tensor(5),
        "none": torch.ones(0, 2),
    }
    here = move_together(values, "cpu")
    assert all(here[name] is value for name, value in values.items())
    there = move_together(values, "meta")
    assert {name: (value.dtype, value.shape) for name, value in there.items()} == {
        name: (value.dtype, value.shape) for name, value in values.items()
    }
    assert {value.device.type for value in there.values()} == {"meta"}
