"""What a pool and its coordinator say to each other: the same kind of messages as between coordinator and ranks.

pool -> coordinator   Start, then Submit, Cancel, Drain, and numbered questions; the end is a closed death pipe
coordinator -> pool   Started, then Advance and Finished for every request, Answer for every question;
                      GangLost, GangRecovered and CatchingUp where a gang was started again; Fatal, and then silence
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..ranks.messages import MAX_NAMES, Count, Index, IndexOrNone, Message, Name, Ready, Seconds, Traffic

ExitStatus = Annotated[int, msgspec.Meta(ge=-1024, lt=2**31)]
"""An exit code, or a signal's number below zero."""


class Start(Message, frozen=True):
    """The first word of a pool: its settings, and what it read in the model folder."""

    settings: Annotated[dict[Name, str | Count | Seconds | bool], msgspec.Meta(max_length=MAX_NAMES)]
    model_dir: str
    model_digest: Name
    model_stamp: Name
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


class Drain(Message, frozen=True):
    """Requests that have not begun end now, as cancelled; those under way go on to their end."""


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


class CatchingUp(Message, frozen=True):
    """A step in which a new gang computed only what a lost one had: nothing to tell, but it goes on."""

    step: Index


class Finished(Message, frozen=True):
    """One request's end. `error` is empty, or says why it failed or was refused (`reason` "failed" or "refused").

    `num_output_tokens` counts what Advance has carried: the pool must have them all. `stop_string` is the one that
    ended it, or empty. The hashes are of the rows that were computed: those of a cancelled request are what they would
    be if its limit had been the tokens it has; before the first token, the pool tells its caller none.
    `layer_hashes`: as in RunResult, over all rows of the request. `num_ranks` had part in its last step, 0
    if it never began;
    `num_recoveries` is how many gangs were lost while they computed it.
    """

    request_id: Index
    reason: Literal["stop", "length", "cancelled", "failed", "refused"]
    num_output_tokens: Count
    residual_hash: Annotated[int, msgspec.Meta(ge=0)]
    logits_sha256: Name
    error: str
    stop_string: str = ""
    layer_hashes: bytes = b""
    num_ranks: Index = 0
    num_recoveries: Count = 0


class GangLost(Message, frozen=True):
    """The gang has ended, and another one is about to be started: no word of a request for at most `timeout_s`.

    `cause` is the text of the error that it would have been without a recovery; `rank` -1 where several or none is
    meant, `step` -1 where none was under way. `number` counts the gangs of the run that were lost, from 1.
    """

    number: Index
    cause: str
    rank: IndexOrNone
    step: IndexOrNone
    num_open: Count
    timeout_s: Seconds


class GangRecovered(Message, frozen=True):
    """A new gang is ready; the open requests go on. `seconds`: since the loss was seen. `pids` by rank."""

    number: Index
    num_ranks: Index
    pids: tuple[Index, ...]
    seconds: Seconds


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

    kind: Name
    text: str
    rank: IndexOrNone = -1
    step: IndexOrNone = -1
    traceback_text: str = ""
    role: str = ""
    exit_status: ExitStatus | None = None
    what: str = ""
    timeout_s: Seconds = 0.0
    events: tuple[str, ...] = ()


ToCoordinator = Start | Submit | Cancel | Drain | Reconfigure | AskWitness
FromCoordinator = Started | Advance | CatchingUp | Finished | Answer | GangLost | GangRecovered | Fatal

TO_COORDINATOR: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
FROM_COORDINATOR: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)
