"""What the coordinator and a rank say to each other: typed, frozen, MessagePack on the wire.

    coordinator -> rank   Setup, then Plan after Plan
    rank -> coordinator   Hello, Ready, one StepResult for every Plan; Failure instead of either, and then silence

There is no word for the end: a rank leaves when its death pipe closes. Every rank answers every plan, and a token
leaves the coordinator only after all answers to its plan are equal. A plan holds nothing that only the rank knows: a
decode run names no token, the rank continues from the one it drew last.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ..errors import ProtocolError
from .journal import NUM_EVENTS_KEPT, Event

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 32 * 2**20
"""The largest frame that is decoded. A prompt of a million ids takes five million bytes."""

MAX_TEXT_CHARACTERS = 1 << 16
"""Of a rank's error and of its traceback; the sender cuts what is longer."""

MAX_WHY_CHARACTERS = 300
"""Of what is wrong with a frame. It may quote a name from there, which may be as long as the frame."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Hash64 = Annotated[int, msgspec.Meta(ge=0)]
IndexOrNone = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A finite number: a wait for NaN or infinity would be none, or an error far from its cause."""

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARACTERS)]

MAX_NAMES = 256
"""In one table. An entry of a few bytes takes some hundred once it is decoded."""

Counts = Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_NAMES)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of every message; the class name is the tag on the wire."""


class Setup(Message, frozen=True):
    """What a rank needs before its first slow step. `store_path` is the rendezvous file of the data plane.

    `model_stamp` says which files the pool has checked (Checkpoint.stamp): no rank may read others, nor may one that is
    started later. `previous_step` is the last step of the gang before, 0 for the run's first: steps are numbered
    through a run.
    """

    protocol: Index
    run_id: Name
    rank: Index
    num_ranks: Index
    model_dir: str
    device: Annotated[str, msgspec.Meta(pattern=r"^cpu\Z")]
    dtype: Annotated[str, msgspec.Meta(pattern=r"^(bfloat16|float16|float32)\Z")]
    exchange: Annotated[str, msgspec.Meta(pattern=r"^(auto|slots|nodes)\Z")]
    placement: Name
    page_size: Index
    num_pages: Index
    num_slots: Index
    max_pages_per_slot: Index
    num_threads: Index
    transport: Annotated[str, msgspec.Meta(pattern=r"^(shared|gloo)\Z")]
    digests: bool
    layer_digests: bool
    control: Name
    poison: bool
    hazards: bool
    delay_seed: Index
    store_path: str
    start_timeout_s: Seconds
    step_timeout_s: Seconds
    model_stamp: str
    previous_step: Index = 0


class Admit(Message, frozen=True):
    """Opens a free slot with the KV pages it may write, in position order."""

    slot: Index
    page_ids: tuple[Index, ...]


class Run(Message, frozen=True):
    """Consecutive rows of one slot, from position `start`.

    `token_ids` empty: one row, the token that the rank drew last. `decides`: the last row's logits draw the next token.
    """

    slot: Index
    start: Index
    token_ids: tuple[Index, ...]
    decides: bool


class Plan(Message, frozen=True):
    """One step: slots are released first, then admitted, then the runs are computed as one batch."""

    step: Index
    releases: tuple[Index, ...]
    admits: tuple[Admit, ...]
    runs: tuple[Run, ...]


class Hello(Message, frozen=True):
    """The first word of a rank, before it imports anything slow."""

    protocol: Index
    run_id: Name
    rank: Index
    pid: Index


class Ready(Message, frozen=True):
    """The rank has its weights and has met its peers; it says what it is, so that unequal ranks are refused.

    `settings_digest` is the rank's own, made from its Setup and the version of the numeric contract it was built with.
    `device` is the kind that computes and its name, `versions` are of the packages it runs. The rest is what it does,
    not what it was asked for: `exchange` "slots" or "nodes" (or of which sums it is which), `transport` by its
    setting's name or "none", threads of the kernels, whether memory is poisoned.
    """

    rank: Index
    device: Name
    model_digest: Name
    settings_digest: Name
    exchange: Name
    transport: Name
    num_threads: Index
    poison: bool
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_NAMES)]


class RunResult(Message, frozen=True):
    """What one run came to. All fields are equal on all ranks, or the run of the whole gang ends.

    `token_id` is -1 where nothing was decided. `residual_hash` is the sum, mod 2^64, of the hashes of the run's final
    residual rows (docs/numerics.md section 8). `bad_layer` is the first layer whose output is not finite (the number of
    layers where only the logits are not), -1 when all is finite. `logits_sha256` is the running digest of the slot's
    decided rows, empty unless digests are on. `layer_hashes`: U64 little-endian [rows, layers], the hash of the
    residual after every layer, empty unless layer digests are on.
    """

    slot: Index
    token_id: IndexOrNone
    residual_hash: Hash64
    bad_layer: IndexOrNone
    bad_position: IndexOrNone
    logits_sha256: Name
    layer_hashes: bytes = b""


class Traffic(Message, frozen=True):
    """What this rank has exchanged since it started: collective calls by kind, payload bytes, nanoseconds in calls and
    in whole exchanges.

    `hazards`: what its rows held that a careless sum would treat otherwise, by name; empty unless they are counted.
    `cpu_ns`: CPU time of all threads of its process, `kernel_cpu_ns`: what kernels used of it.
    """

    calls: Counts
    bytes_sent: Count
    bytes_received: Count
    num_exchanges: Count
    wait_ns: Count = 0
    exchange_ns: Count = 0
    hazards: Counts = {}
    num_delays: Count = 0
    cpu_ns: Count = 0
    kernel_cpu_ns: Count = 0


class StepResult(Message, frozen=True):
    rank: Index
    step: Index
    runs: tuple[RunResult, ...]
    traffic: Traffic


LEFT_WITH_FAILURE = 70
"""Exit code of a rank that has sent its Failure: whoever sees it knows that the cause was told (EX_SOFTWARE)."""

LEFT_UNHEARD = 69
"""Exit code of a rank that lost its control socket, or could not send its Failure: the cause is on its standard error
alone (EX_UNAVAILABLE)."""


class Failure(Message, frozen=True):
    """An exception ended the rank's work. `step` is -1 before the first plan; `transport`: the data plane reported it,
    so that the cause may be another rank's death. `events`: what the rank did last, oldest first."""

    rank: Index
    step: IndexOrNone
    kind: Name
    text: Text
    traceback_text: Text
    transport: bool
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=NUM_EVENTS_KEPT)] = ()


ToRank = Setup | Plan
FromRank = Hello | Ready | StepResult | Failure

M = TypeVar("M")


def encode(message: Message) -> bytes:
    """One MessagePack map. Raises ProtocolError where the receiver would refuse it for its size, or a text for its
    characters.
    """
    try:
        frame = msgspec.msgpack.encode(message)
    except UnicodeEncodeError as error:
        raise ProtocolError(
            f"a {type(message).__name__} message holds a text that UTF-8 does not take: {error}. Look for a name or a "
            "text with bytes that are no character"
        ) from None
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} message takes {len(frame):,} bytes; the control plane carries at most "
            f"{MAX_MESSAGE_BYTES:,}: send fewer or shorter prompts at once"
        )
    return frame


def decode(frame: bytes, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """The typed message in a frame. Whatever is wrong with it comes out as ProtocolError."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"expected a message of at most {MAX_MESSAGE_BYTES:,} bytes, got {len(frame):,}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = str(error)[:MAX_WHY_CHARACTERS]
        raise ProtocolError(
            f"expected a {decoder.type} message, got {len(frame):,} bytes that are none: {why}"
        ) from None


TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
