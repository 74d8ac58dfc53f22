"""What a pool and its coordinator say to each other: the same kind of messages as between coordinator and ranks.

pool -> coordinator   Start, then Submit, Cancel, and numbered questions; the end is a closed death pipe
coordinator -> pool   Started, then Advance and Finished for every request, Answer for every question;
                      Fatal, and then silence
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..ranks.messages import Count, Index, IndexOrNone, Message, Ready, Traffic


class Start(Message, frozen=True):
    """The first word of a pool: its settings, and what it read in the model folder."""

    settings: dict[str, str | int | float | bool]
    model_dir: str
    model_digest: str
    model_max_context: Index
    num_layers: Index


class Order(Message, frozen=True):
    """One request. `stop_ids` end it; the one that does is its last token. So does the token whose text completes one
    of `stop_strings`."""

    request_id: Index
    token_ids: tuple[Index, ...]
    max_tokens: Index
    stop_ids: tuple[Index, ...]
    stop_strings: tuple[str, ...] = ()


class Submit(Message, frozen=True):
    """Requests that arrive together: the next step sees all of them."""

    orders: tuple[Order, ...]


class Cancel(Message, frozen=True):
    """These requests end before the next step; each that is still open says so in a Finished."""

    request_ids: tuple[Index, ...]


class Reconfigure(Message, frozen=True):
    """A question: may these limits, which keep every bit, hold from now on? Refused while requests are open."""

    question: Index
    prefill_chunk: Index
    concurrency: Index


class AskWitness(Message, frozen=True):
    """A question: what has run so far?"""

    question: Index


class Started(Message, frozen=True):
    """All ranks are ready and alike."""


class Advance(Message, frozen=True):
    """One request's progress: prompt rows done since the last word, tokens drawn (none, or one)."""

    request_id: Index
    num_prompt_rows: Index
    token_ids: tuple[Index, ...]


class Finished(Message, frozen=True):
    """One request's end. `error` is empty, or says why it failed or was refused (`reason` "failed" or "refused").

    `num_output_tokens` counts what Advance has carried: the pool must have them all. `stop_string` is the one that
    ended it, or empty. The hashes are of the rows that were computed: those of a cancelled request are what they would
    be if its limit had been the tokens it has; before the first token, the pool tells its caller none.
    `layer_hashes`: as in RunResult, over all rows of the request.
    """

    request_id: Index
    reason: Literal["stop", "length", "cancelled", "failed", "refused"]
    num_output_tokens: Count
    residual_hash: Annotated[int, msgspec.Meta(ge=0)]
    logits_sha256: str
    error: str
    stop_string: str = ""
    layer_hashes: bytes = b""


class RankReport(Message, frozen=True):
    """`ready`: what the rank said of itself once it had its weights."""

    rank: Index
    pid: Index
    ready: Ready
    traffic: Traffic


class Answer(Message, frozen=True):
    """The answer to one question: what has run so far, and why a Reconfigure was refused (`error`, else empty)."""

    question: Index
    error: str
    num_steps: Count
    most_rows: Count
    most_live_requests: Count
    ranks: tuple[RankReport, ...]


class Fatal(Message, frozen=True):
    """The gang has ended. `kind` names a class of errors.py; the other fields are its arguments."""

    kind: str
    text: str
    rank: IndexOrNone = -1
    step: IndexOrNone = -1
    traceback_text: str = ""
    role: str = ""
    exit_status: int | None = None
    what: str = ""
    timeout_s: float = 0.0


ToCoordinator = Start | Submit | Cancel | Reconfigure | AskWitness
FromCoordinator = Started | Advance | Finished | Answer | Fatal

TO_COORDINATOR: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
FROM_COORDINATOR: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)
