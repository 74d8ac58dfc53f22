"""Strategies for messages, made from the types of their fields: what a decoder takes, and what it must not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

MAX_INT = 2**64 - 1


def messages_of(decoder: msgspec.msgpack.Decoder) -> st.SearchStrategy[Any]:
    """Every message that the decoder may give, with any values of its fields."""
    return values_of(inspect.type_info(decoder.type))


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.UnionType():
            return st.one_of([values_of(each) for each in kind.types])
        case inspect.StructType():
            fields = {field.name: values_of(field.type) for field in kind.fields}
            return st.builds(kind.cls, **fields)
        case inspect.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case inspect.IntType():
            most = MAX_INT if kind.lt is None else kind.lt - 1
            return st.integers(-(2**63) if kind.ge is None else int(kind.ge), int(most))
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=kind.ge is None)
        case inspect.StrType(pattern=str() as pattern):
            return st.from_regex(pattern)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case _:
            return SIMPLE[type(kind)]()


SIMPLE: dict[type, Callable[[], st.SearchStrategy[Any]]] = {
    inspect.StrType: lambda: st.text(max_size=8),
    inspect.BytesType: lambda: st.binary(max_size=8),
    inspect.BoolType: st.booleans,
    inspect.NoneType: st.none,
}


def small_values(kind: inspect.Type) -> Iterator[Any]:
    """Valid values of a type with as few bytes as they may have, in the form that is encoded; at least one."""
    match kind:
        case inspect.UnionType():
            for each in kind.types:
                yield from small_values(each)
        case inspect.StructType(fields=fields):
            required = {field.encode_name: next(small_values(field.type)) for field in fields if field.required}
            yield required | ({kind.tag_field: kind.tag} if kind.tag_field else {})
        case inspect.VarTupleType():
            yield ()
        case inspect.DictType():
            yield {}
        case inspect.IntType():
            yield from (1000, 0)
        case inspect.FloatType():
            yield 1.0
        case inspect.LiteralType():
            yield kind.values[0]
        case inspect.StrType(pattern=str() as pattern):
            yield re.sub(r"^\^\(?|\|.*|\)?\\Z$", "", pattern)
        case inspect.StrType():
            yield from ("ab", "")
        case inspect.BytesType():
            yield b""
        case inspect.BoolType():
            yield True
        case inspect.NoneType():
            yield None
        case _:
            raise AssertionError(f"no small value of {kind}")


def junk() -> st.SearchStrategy[Any]:
    """Any value that MessagePack can carry, extensions and timestamps among them."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), MAX_INT),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=12)),
        st.just(datetime(2000, 1, 1, tzinfo=UTC)),
        st.sampled_from(HOSTILE_VALUES).map(msgspec.Raw),
    )
    keys = st.one_of(st.text(max_size=4), st.integers(0, 9))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
    )


HOSTILE_VALUES = (
    b"\xdd\xff\xff\xff\xff",  # arrays, maps, strings, bytes and extensions that claim 4 GiB
    b"\xdd\x7f\xff\xff\xff\x01",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff\xa1a",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xd4\x01\x00",  # extension types
    b"\xd6\xff\x00\x00\x00\x00",  # timestamps of 32, 64 and 96 bits
    b"\xd7\xff" + bytes(8),
    b"\xc7\x0c\xff" + bytes(12),
    b"\xc7\x00\x05",
    b"\x91" * 5000,  # nesting bombs
    b"\x81\xa1a" * 5000,
    b"\xdc\x00\x01" * 5000 + b"\x01",
    b"\xa2\xc3\x28",  # no UTF-8: a broken sequence, a surrogate, an overlong zero
    b"\xa3\xed\xa0\x80",
    b"\xa2\xc0\x80",
    b"\xc1",  # a byte that begins nothing
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN, infinities, a float beyond every bound
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xcb\xff\xf0\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xe0\x00\x00\x00\x00\x00\x00",
    b"\xca\x7f\xc0\x00\x00",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",  # the least integer
)
"""None of them is a value of any field of any message."""


@st.composite
def with_junk(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> bytes:
    """A message with one value, at any depth, replaced, or with a field more."""
    value = msgspec.to_builtins(draw(messages), builtin_types=(bytes,))
    parent, key = value, draw(st.sampled_from([*value, "extra"]))
    while (
        isinstance(child := parent[key] if key != "extra" else None, dict | list | tuple)
        and child
        and draw(st.booleans())
    ):
        if isinstance(child, tuple):
            child = parent[key] = list(child)
        parent = child
        key = draw(st.sampled_from(list(child)) if isinstance(child, dict) else st.integers(0, len(child) - 1))
    parent[key] = draw(junk())
    return msgspec.msgpack.encode(value)


@st.composite
def damaged(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> bytes:
    """The frames of messages after a few accidents."""
    frame = msgspec.msgpack.encode(draw(messages))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(frame)))
        end = draw(st.integers(begin, len(frame)))
        accident = draw(st.sampled_from(["flip", "cut", "lose", "double", "splice", "insert"]))
        match accident:
            case "flip" if begin < len(frame):
                frame = frame[:begin] + bytes([frame[begin] ^ (1 << draw(st.integers(0, 7)))]) + frame[begin + 1 :]
            case "cut":
                frame = frame[:begin]
            case "lose":
                frame = frame[:begin] + frame[end:]
            case "double":
                frame = frame[:end] + frame[begin:]
            case "splice":
                other = msgspec.msgpack.encode(draw(messages))
                frame = frame[:begin] + other[draw(st.integers(0, len(other))) :]
            case "insert":
                frame = frame[:begin] + draw(st.sampled_from(HOSTILE_VALUES) | st.binary(max_size=6)) + frame[begin:]
    return frame
