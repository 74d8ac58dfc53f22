"""Whatever bytes a decoder gets: a message that survives the wire, or ProtocolError; and memory stays bounded."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leafsum.errors import ProtocolError
from leafsum.ranks.messages import FROM_RANK, MAX_MESSAGE_BYTES, MAX_NAMES, TO_RANK, decode, encode
from leafsum.runtime.messages import FROM_COORDINATOR, TO_COORDINATOR, Fatal
from message_makers import HOSTILE_VALUES, damaged, messages_of, small_values, with_junk
from msgspec import inspect

TESTS = Path(__file__).resolve().parent.parent
DECODERS: dict[str, msgspec.msgpack.Decoder] = {
    "to a rank": TO_RANK,
    "from a rank": FROM_RANK,
    "to a coordinator": TO_COORDINATOR,
    "from a coordinator": FROM_COORDINATOR,
}
EVERY_DECODER = pytest.mark.parametrize("name", DECODERS)

MAX_ERROR_CHARACTERS = 2000

MEMORY_FACTOR = 32
"""Bytes that a decoder takes for one byte of a frame, at most: a string of two characters is three bytes there, and 59
and a pointer here."""

MEMORY_OFFSET_BYTES = 1 << 16

quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
long = settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))


def check(frame: bytes, decoder: msgspec.msgpack.Decoder) -> None:
    found = outcome(frame, decoder)
    if isinstance(found, ProtocolError):
        assert len(str(found)) < MAX_ERROR_CHARACTERS
    else:
        assert decode(encode(found), decoder) == found


def outcome(frame: bytes, decoder: msgspec.msgpack.Decoder) -> Any:
    """The message in a frame, or the one error that may come of it."""
    try:
        return decode(frame, decoder)
    except ProtocolError as error:
        return error


def frames_for(name: str) -> st.SearchStrategy[bytes]:
    messages = messages_of(DECODERS[name])
    others = st.one_of([messages_of(decoder) for decoder in DECODERS.values()])
    return st.one_of(with_junk(messages), damaged(messages), damaged(others), st.binary(max_size=200))


@EVERY_DECODER
def test_every_message_survives_the_wire(name):
    decoder = DECODERS[name]

    @quick
    @given(messages_of(decoder))
    def survives(message: Any) -> None:
        assert decode(encode(message), decoder) == message

    survives()


@EVERY_DECODER
@pytest.mark.parametrize("effort", [quick, pytest.param(long, marks=pytest.mark.full)], ids=["quick", "long"])
def test_any_frame_is_a_message_or_a_protocol_error(name, effort):
    effort(given(frames_for(name))(lambda frame: check(frame, DECODERS[name])))()


def hostile_frames(decoder: msgspec.msgpack.Decoder) -> Iterator[bytes]:
    """Every hostile value by itself, and in the place of every value at any depth of every message, last and first."""
    yield from HOSTILE_VALUES
    for message in struct_types(inspect.type_info(decoder.type)):
        for hostile in hostile_variants(message):
            frame = msgspec.msgpack.encode(hostile)
            yield frame
            if isinstance(hostile, dict):
                yield msgspec.msgpack.encode(dict(reversed(hostile.items())))


def hostile_variants(kind: inspect.Type) -> Iterator[Any]:
    """Small values of a type, each with one hostile value in it."""
    yield from map(msgspec.Raw, HOSTILE_VALUES)
    match kind:
        case inspect.UnionType():
            for each in kind.types:
                yield from hostile_variants(each)
        case inspect.StructType(fields=fields):
            whole = next(small_values(kind))
            for field in fields:
                others = {name: value for name, value in whole.items() if name != field.encode_name}
                yield from ({**others, field.encode_name: hostile} for hostile in hostile_variants(field.type))
        case inspect.VarTupleType():
            yield from ([hostile] for hostile in hostile_variants(kind.item_type))
        case inspect.DictType():
            yield from ({"a": hostile} for hostile in hostile_variants(kind.value_type))
            yield from (
                {f"{number}": value for number in range(MAX_NAMES + 1)} for value in small_values(kind.value_type)
            )


def struct_types(kind: inspect.Type) -> list[inspect.StructType]:
    """The messages that a decoder knows."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [each for each in kinds if isinstance(each, inspect.StructType)]


@EVERY_DECODER
def test_hostile_values_are_refused_in_every_field(name):
    for frame in hostile_frames(DECODERS[name]):
        assert isinstance(outcome(frame, DECODERS[name]), ProtocolError), f"{frame[:500]!r} was taken"


def test_claims_of_four_gigabytes_take_no_memory():
    """In a process that may have 64 MiB more than it has."""
    program = """
import resource, sys
from leafsum.errors import ProtocolError
from ranks.test_message_fuzz import DECODERS, hostile_frames, outcome
frames = [(decoder, frame) for decoder in DECODERS.values() for frame in hostile_frames(decoder)]
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for decoder, frame in frames:
    if not isinstance(outcome(frame, decoder), ProtocolError):
        sys.exit(f"{frame[:60]!r} was taken")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def dense_values(kind: inspect.Type, num_bytes: int) -> Iterator[Any]:
    """Values of a type whose frames have about so many bytes, in ever so many small objects."""
    match kind:
        case inspect.VarTupleType():
            for item in small_values(kind.item_type):
                yield [item] * (num_bytes // len(msgspec.msgpack.encode(item)))
        case inspect.DictType():
            for value in small_values(kind.value_type):
                yield {f"{number:04x}": value for number in range(num_bytes // 6)}
        case inspect.StrType():
            yield "ü" * (num_bytes // 2)
        case inspect.BytesType():
            yield bytes(num_bytes)


@EVERY_DECODER
def test_memory_is_bounded_by_the_frame(name):
    decoder = DECODERS[name]
    num_bytes = 1 << 18
    for message in struct_types(inspect.type_info(decoder.type)):
        whole = next(small_values(message))
        for field in message.fields:
            for dense in dense_values(field.type, num_bytes):
                frame = msgspec.msgpack.encode({**whole, field.encode_name: dense})
                tracemalloc.start()
                try:
                    outcome(frame, decoder)
                    _, peak_bytes = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
                assert peak_bytes < MEMORY_FACTOR * len(frame) + MEMORY_OFFSET_BYTES, f"{message.tag}.{field.name}"


@EVERY_DECODER
def test_a_frame_over_the_limit_is_refused_unread(name):
    with pytest.raises(ProtocolError, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1), DECODERS[name])


@pytest.mark.parametrize("value", [{"type": "x" * 100_000}, {"x" * 100_000: 1}])
def test_an_error_is_short_though_the_frame_is_long(value):
    check(msgspec.msgpack.encode(value), TO_RANK)


def test_a_text_that_utf8_does_not_take_is_refused_by_its_sender():
    with pytest.raises(ProtocolError, match="UTF-8"):
        encode(Fatal(kind="ModelError", text="model-\udcff.safetensors"))
