"""The control plane's decoder: every message survives the wire, and nothing else comes out but ProtocolError."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.errors import ProtocolError
from leafsum.ranks.messages import FROM_RANK, MAX_MESSAGE_BYTES, TO_RANK, Admit, Plan, Run, RunResult, decode, encode
from leafsum.runtime.messages import FROM_COORDINATOR, TO_COORDINATOR, Order

PLAN = Plan(
    step=3,
    releases=(1,),
    admits=(Admit(slot=2, page_ids=(5, 9)),),
    runs=(Run(slot=2, start=0, token_ids=(7, 8), decides=True), Run(slot=0, start=4, token_ids=(), decides=True)),
)
DECODERS = [TO_RANK, FROM_RANK, TO_COORDINATOR, FROM_COORDINATOR]


def test_a_plan_survives_the_wire():
    assert decode(encode(PLAN), TO_RANK) == PLAN


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 2**31},
        {"step": "3"},
        {"extra": 1},
        {"runs": [{"slot": 0, "start": 0, "token_ids": [-1], "decides": True}]},
        {"runs": [{"slot": 0, "start": 0, "token_ids": [1], "decides": 1}]},
        {"type": "Planet"},
        {"admits": None},
    ],
)
def test_a_map_that_is_no_plan_is_refused(change):
    frame = msgspec.msgpack.encode({**msgspec.to_builtins(PLAN), **change})
    with pytest.raises(ProtocolError, match=r"expected a .* message"):
        decode(frame, TO_RANK)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(lambda cut, tail: encode(PLAN)[:cut] + tail, st.integers(0, 80), st.binary(max_size=40)),
    )
)
def test_any_bytes_give_a_message_or_a_protocol_error(frame):
    for decoder in DECODERS:
        try:
            decode(frame, decoder)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 100_000,  # nesting bomb
        b"\xdf\xff\xff\xff\xff",  # a map that claims four billion entries
        b"\xd4\xff\x00",  # extension type
        b"\xd6\xff\x00\x00\x00\x00",  # timestamp extension
        b"\xa2\xc3\x28",  # broken UTF-8
    ],
)
def test_hostile_frames_are_refused(frame):
    for decoder in DECODERS:
        with pytest.raises(ProtocolError):
            decode(frame, decoder)


def test_a_frame_over_the_limit_is_not_decoded_and_not_sent():
    with pytest.raises(ProtocolError, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1), TO_RANK)
    with pytest.raises(ProtocolError, match="send fewer"):
        encode(Order(request_id=0, token_ids=(2**30,) * (MAX_MESSAGE_BYTES // 5 + 1), max_tokens=1, stop_ids=()))


def test_a_hash_of_64_bits_survives_the_wire():
    result = RunResult(slot=0, token_id=-1, residual_hash=2**64 - 1, bad_layer=-1, bad_position=-1, logits_sha256="")
    assert msgspec.msgpack.decode(encode(result), type=RunResult) == result
