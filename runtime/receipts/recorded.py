"""What a receipt says of itself: its reference arm as a result, and whether it contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from ...collectives.control_names import FLIPPED_BIT
from ...errors import ReceiptMismatch
from ..layer_hashes import HASH_BYTES
from ..sampling import Completion, token_sha256
from ..witness import RankWitness, Witness
from .arms import Arm
from .controls import FEWEST_PICKS, LEFT_OUT, NAMED_PLACE, ControlPlan, not_run_prefix
from .locate import num_rows
from .records import ArmRecord, ControlRecord, PromptRecord, Receipt, WitnessRecord
from .run import ArmResult
from .verdict import NO_POWER
from .witness import missing_witnesses


def reference_result(receipt: Receipt) -> ArmResult:
    """The reference arm as it was recorded: what a run here is compared with."""
    arm = arm_of(receipt.reference)
    return ArmResult(arm, tuple(_completion(prompt, arm.tp) for prompt in receipt.prompts), witness=None)


def arm_of(record: ArmRecord) -> Arm:
    settings = record.settings
    return Arm(
        tp=settings.tp,
        exchange=settings.exchange,
        placement=settings.placement,
        transport=settings.transport,
        threads=settings.threads,
        prefill_chunk=0 if settings.prefill_chunk == "whole" else settings.prefill_chunk,
        concurrency=settings.concurrency,
        adverse=record.adverse is not None,
    )


def require_consistent(receipt: Receipt) -> None:
    """ReceiptMismatch that names the first thing in which the receipt contradicts itself."""
    for text in _contradictions(receipt):
        raise ReceiptMismatch(f"the receipt contradicts itself: {text}; it proves nothing, make it again")


def require_whole_reference(receipt: Receipt) -> None:
    """ReceiptMismatch where a prompt of the reference failed: it has nothing that a rerun could be compared with."""
    for number, prompt in enumerate(receipt.prompts, start=1):
        if prompt.error:
            raise ReceiptMismatch(
                f"prompt {number} failed when the receipt was made ({prompt.error}): there is nothing to compare with"
            )


def _contradictions(receipt: Receipt) -> Iterator[str]:
    for number, prompt in enumerate(receipt.prompts, start=1):
        yield from (f"prompt {number}: {text}" for text in _contradictions_of(prompt))
    reference = reference_result(receipt)
    if receipt.reference.hashes_sha256 != reference.hashes_sha256:
        yield (
            f"arm [{reference.arm.name}] is the reference, and the hashes of all prompts make "
            f"{reference.hashes_sha256}, not {receipt.reference.hashes_sha256}"
        )
    for arm in receipt.arms:
        if arm.equal and (arm.hashes_sha256 != reference.hashes_sha256 or arm.other_prompts):
            yield f"arm [{arm_of(arm).name}] is called equal, and its hashes are not the reference's"
    if receipt.equal:
        yield from (f"it is called equal, and {text}" for text in _unequal(receipt))


def _unequal(receipt: Receipt) -> Iterator[str]:
    """What of a receipt's own records speaks against its being equal."""
    if not all(arm.equal for arm in receipt.arms) or receipt.differences or receipt.failed or receipt.faults:
        yield "lists arms that are not, differences, failures or faults"
    lengths = [len(prompt.token_ids) for prompt in receipt.prompts]
    for number, record in enumerate(receipt.arms):
        arm = arm_of(record)
        yield from (f"arm [{arm.name}]: {text}" for text in _unfit_conditions(record, is_reference=number == 0))
        witness = _witness_of(record.witness)
        if witness is None:
            yield f"arm [{arm.name}]: its witness has not one count a rank in every list"
        else:
            yield from (f"arm [{arm.name}]: {text}" for text in missing_witnesses(arm, witness, lengths))
    yield from _unfit_controls(receipt)


def _unfit_conditions(record: ArmRecord, is_reference: bool) -> Iterator[str]:
    adverse = record.adverse
    if is_reference and adverse is not None:
        yield "it is the reference, and did not run plainly"
    if not is_reference and (adverse is None or not adverse.poison or not adverse.delay_seed):
        yield "it did not run under adverse conditions"


def _witness_of(record: WitnessRecord) -> Witness | None:
    """The counts as a run's; pids are not recorded, ranks have their numbers instead. None where lists do not fit."""
    lists = (record.exchanges, record.bytes_sent, record.bytes_received, record.calls, record.delays)
    if len({len(each) for each in lists}) != 1 or not record.calls:
        return None
    ranks = tuple(
        RankWitness(
            rank=rank,
            pid=rank,
            exchanges=exchanges,
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            transport={"all": calls},
            exchange_mode=record.exchange,
            transport_name=record.transport,
            num_threads=record.threads,
            poison=record.poison,
            num_delays=delays,
        )
        for rank, (exchanges, bytes_sent, bytes_received, calls, delays) in enumerate(zip(*lists, strict=True))
    )
    return Witness(record.steps, record.most_rows, record.most_live_requests, ranks)


def _unfit_controls(receipt: Receipt) -> Iterator[str]:
    """Every control that these arms allow did as it must, or `not_run` says why it was not run."""
    if not receipt.controls and NO_POWER not in receipt.not_shown:
        yield f"has no control, and does not say {NO_POWER!r}"
    if LEFT_OUT in receipt.not_run and not receipt.controls:
        return
    planned = {(arm.control, arm.name): arm for arm in ControlPlan.of(_arms(receipt), FEWEST_PICKS).arms}
    recorded = {(record.control, record.arm): record for record in receipt.controls}
    for key, arm in planned.items():
        if key not in recorded:
            if not any(text.startswith(not_run_prefix(arm.control)) for text in receipt.not_run):
                yield f"control {arm.control} [{arm.name}] is missing, and it does not say why"
        elif not _did_as_it_must(recorded[key], arm, len(receipt.prompts)):
            yield f"control {arm.control} [{arm.name}] did not do as it must"
    for control, name in sorted(recorded.keys() - planned.keys()):
        yield f"control {control} [{name}] is not one that its arms allow"


def _arms(receipt: Receipt) -> list[Arm]:
    return [arm_of(record) for record in receipt.arms]


def _did_as_it_must(record: ControlRecord, arm: Arm, num_prompts: int) -> bool:
    if record.control != FLIPPED_BIT:
        return record.differ == tuple(range(1, num_prompts + 1)) and not record.same and not record.ended
    place = NAMED_PLACE.match(record.ended)
    return place is not None and place.group(2) == str(arm.tp - 1)


def _contradictions_of(prompt: PromptRecord) -> Iterator[str]:
    digest = token_sha256(prompt.output_token_ids)
    if digest != prompt.token_sha256:
        yield f"its output ids have the token_sha256 {digest}, not {prompt.token_sha256}"
    if prompt.error:
        return
    rows, layers = prompt.layers.rows, prompt.layers.layers
    if rows != num_rows(_completion(prompt, tp=1)):
        yield f"{len(prompt.token_ids)} and {len(prompt.output_token_ids)} tokens are not {rows} rows"
    if len(prompt.layers.hashes) != rows * layers * HASH_BYTES:
        yield f"{len(prompt.layers.hashes)} bytes are not the hashes of {rows} rows after {layers} layers"


def _completion(prompt: PromptRecord, tp: int) -> Completion:
    return Completion(
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        token_ids=prompt.output_token_ids,
        text=prompt.output_text,
        finish_reason="failed" if prompt.error else "length",
        token_sha256=prompt.token_sha256,
        logits_sha256=prompt.logits_sha256,
        residual_hash=prompt.residual_hash,
        tp=tp,
        error=prompt.error,
        layer_hashes=prompt.layers.hashes,
    )
