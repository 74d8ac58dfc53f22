"""What a receipt says of itself: its reference arm as a result, and whether it contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ReceiptMismatch
from ..sampling import Completion, token_sha256
from .arms import Arm
from .locate import HASH_BYTES, num_rows
from .records import ArmRecord, PromptRecord, Receipt
from .run import ArmResult


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
    all_equal = all(arm.equal for arm in receipt.arms)
    if receipt.equal and (not all_equal or receipt.differences or receipt.failed or receipt.faults):
        yield "it is called equal, and lists arms that are not, differences, failures or faults"


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
