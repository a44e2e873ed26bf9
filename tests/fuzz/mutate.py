"""Makes wrong input of right input: bytes of a file, and the values of a document such as TOML or JSON.

All choices are drawn by Hypothesis, so a failing case gets smaller and can be repeated.

from mutate import documents, fuzzed, mutated
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tomli_w
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SHORT = 20  # cases of a test in `make test`
CASES = int(os.environ.get("PLURIBUS_FUZZ_CASES", SHORT))
IS_LONG = CASES != SHORT


def fuzzed(share: float = 1.0) -> Any:
    """How many cases a test has: `share` of them if its reader is slow. Short tests have the same cases every time."""
    return settings(
        max_examples=max(1, round(CASES * share)),
        derandomize=not IS_LONG,
        database=None,
        print_blob=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# Values ---------------------------------------------------------------------------------------------------------------

NUMBERS: list[Any] = [0, 1, 2, 3, 7, -1, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64]
NUMBERS += [-(2**31), -(2**63), -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, 1e-9, 5e-324, 1e30, 1.8e308, -1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
TRAP = "this"  # a module that nobody imports
TEXTS = [
    "",
    " ",
    "0",
    "-1",
    "1e999",
    "nan",
    "None",
    "true",
    "auto",
    "none",
    "a,b",
    "a=b",
    "a+b",
    "8:1:1",
    "0:0",
    ":",
    ".",
]
TEXTS += [
    "..",
    "/",
    "../../x",
    "~",
    "~nobody/x",
    "a\0b",
    "\0",
    "\n",
    "\t",
    "\u202e",
    "é",
    "e\u0301",
    "ﬁ",
    "𝟙",
    "½",
    "²",
]
TEXTS += ["\ud800", "\U0001f600", "{0}", "%s", "'", '"', "\\", "[red]", "[/]", "--help", "x" * 5000, "9" * 5000]
TEXTS += [
    f"{TRAP}.s",
    f"{TRAP}.c.d",
    "given:x",
    "label=x",
    "timm:x",
    "digits",
    "fedgh",
    "local",
    "mlp-64",
    "1/0",
    "0.5/0",
]

scalars = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.booleans(), st.none(), st.integers(), st.floats(), st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=4,
)


# Documents ------------------------------------------------------------------------------------------------------------

Path = tuple[Any, ...]


def paths_of(document: Any, at: Path = ()) -> Iterator[Path]:
    """The way to every value of a document, that to the document itself first."""
    yield at
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inside:
        yield from paths_of(value, (*at, key))


def value_at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document


@st.composite
def documents(draw: st.DrawFn, valid: Sequence[Any], most: int = 3) -> Any:
    """One of some valid documents, with a few changes: wrong values at any key, missing, renamed and further keys."""
    document = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, most))):
        paths = [path for path in paths_of(document) if path]
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        draw(st.sampled_from(DOCUMENT_CHANGES))(draw, document, path, paths)
    return document


def _replace(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    value_at(document, path[:-1])[path[-1]] = copy.deepcopy(draw(values))


def _nudge(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    """Another value of the same type, as far as there is one."""
    now = value_at(document, path)
    kind = st.booleans() if isinstance(now, bool) else st.sampled_from(TEXTS) if isinstance(now, str) else None
    if kind is None:
        kind = st.sampled_from(NUMBERS) if isinstance(now, int | float) else values
    value_at(document, path[:-1])[path[-1]] = draw(kind)


def _delete(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    del value_at(document, path[:-1])[path[-1]]


def _swap(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    other = draw(st.sampled_from(paths))
    if path[: len(other)] != other and other[: len(path)] != path:  # neither is inside the other
        one, two = value_at(document, path), value_at(document, other)
        value_at(document, path[:-1])[path[-1]], value_at(document, other[:-1])[other[-1]] = two, one


def _wrap(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    now = value_at(document, path)
    wraps = [[now], {"": now}, [now, copy.deepcopy(now)], repr(now)[:1000]]
    value_at(document, path[:-1])[path[-1]] = draw(st.sampled_from(wraps))


def _add(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    place = value_at(document, path[:-1])
    if isinstance(place, dict):
        place[draw(st.sampled_from(TEXTS) | st.text(max_size=5))] = copy.deepcopy(draw(values))
    else:
        place.insert(path[-1], copy.deepcopy(draw(values)))


def _rename(draw: st.DrawFn, document: Any, path: Path, paths: list[Path]) -> None:
    place = value_at(document, path[:-1])
    if isinstance(place, dict):
        place[draw(st.sampled_from([f"{path[-1]}s", str(path[-1]).upper(), f" {path[-1]}", ""]))] = place.pop(path[-1])


DOCUMENT_CHANGES: list[Callable[..., None]] = [_replace, _replace, _nudge, _nudge, _delete, _swap, _wrap, _add, _rename]


def to_toml_bytes(document: dict[str, Any]) -> bytes:
    """A document as TOML. What TOML lacks is left out; text that UTF-8 lacks makes a file that is no UTF-8."""
    return tomli_w.dumps(_without_null(document)).encode("utf-8", "surrogatepass")


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_null(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_null(one) for one in value if one is not None]
    return value


# Bytes ----------------------------------------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, valid: Sequence[bytes], most: int = 4) -> bytes:
    """One of some valid files, with a few changes of its bytes."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, most))):
        draw(st.sampled_from(BYTE_CHANGES))(draw, data, valid)
    return bytes(data)


def _at(draw: st.DrawFn, data: bytearray) -> int:
    """A place in a file: often in its first or last bytes, where headers are."""
    ends = st.integers(0, min(64, len(data))) | st.integers(max(0, len(data) - 64), len(data))
    return draw(ends | st.integers(0, len(data)))


def _flip(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    at = _at(draw, data)
    if at < len(data):
        data[at] ^= 1 << draw(st.integers(0, 7))


def _set(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    at = _at(draw, data)
    data[at : at + 1] = bytes([draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 10, 34, 44, 91, 123]))])


def _cut(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    del data[_at(draw, data) :]


def _remove(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    at = _at(draw, data)
    del data[at : at + draw(st.integers(1, 40))]


def _repeat(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    at = _at(draw, data)
    data[at:at] = data[at : at + draw(st.integers(1, 60))] * draw(st.sampled_from([1, 2, 50]))


def _insert(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    at = _at(draw, data)
    data[at:at] = draw(
        st.binary(max_size=20) | st.sampled_from([text.encode("utf-8", "surrogatepass") for text in TEXTS])
    )


def _number(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    """A length or an offset that is much too large, or negative."""
    at, size = _at(draw, data), draw(st.sampled_from([2, 4, 8]))
    number = draw(st.sampled_from([0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])) % 2 ** (
        8 * size
    )
    data[at : at + size] = number.to_bytes(size, draw(st.sampled_from(["little", "big"])))


def _digits(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    """Another number where the file has one as text, as headers of npy files have."""
    places = [at for at, byte in enumerate(data[:4096]) if 48 <= byte <= 57]
    if places:
        at = draw(st.sampled_from(places))
        data[at : at + 1] = str(draw(st.sampled_from([0, -1, 9, 99999, 2**31, 2**60, 2**64, 10**30]))).encode()


def _splice(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    other = draw(st.sampled_from(valid))
    data[_at(draw, data) :] = other[_at(draw, bytearray(other)) :]


def _exchange(draw: st.DrawFn, data: bytearray, valid: Sequence[bytes]) -> None:
    """Swap two pieces."""
    one, two, size = *sorted((_at(draw, data), _at(draw, data))), draw(st.integers(1, 40))
    if one + size <= two and two + size <= len(data):
        data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]


BYTE_CHANGES: list[Callable[..., None]] = [
    _flip, _flip, _set, _cut, _remove, _repeat, _insert, _number, _digits, _splice, _exchange,
]  # fmt: skip
