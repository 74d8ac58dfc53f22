"""From results to a receipt's document; it names no user and no folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...ranks.numerics import NUMERICS_VERSION
from ..models import model_name
from ..sampling import Completion, SamplingParams
from ..settings import Settings
from .controls import ControlOutcome
from .facts import code_facts, machine_facts, package_versions
from .hashes import model_files
from .hazards import hazard_totals
from .locate import num_layers, num_rows
from .records import (
    AdverseRecord,
    ArmRecord,
    ArmSettings,
    ControlRecord,
    DifferenceRecord,
    LayerHashes,
    ModelRecord,
    OtherPrompt,
    PromptRecord,
    Receipt,
    SamplingRecord,
    SettingsRecord,
    WitnessRecord,
)
from .run import HASHES, ArmResult, layers_sha256
from .verdict import Difference, Power, Verdict

FORMAT = "leafsum receipt 2"

ARITHMETIC_ID = "ieee-754"
"""Of the CPU: its bits follow from docs/numerics.md alone, whatever the machine, the compiler and the kernels."""

NOT_BUILT = (
    "CUDA devices, CUDA graphs, drafts, sampling with noise: not in this version",
    "more than one machine: not in this version",
)


def receipt_of(
    model_dir: Path,
    settings: Settings,
    sampling: SamplingParams,
    cross: str,
    results: Sequence[ArmResult],
    verdict: Verdict,
    power: Power,
) -> Receipt:
    """The whole receipt. `model_dir`: what settings.model led to; the first result is the reference's."""
    return Receipt(
        format=FORMAT,
        equal=verdict.equal,
        numerics=NUMERICS_VERSION,
        arithmetic_id=ARITHMETIC_ID,
        settings_digest=settings.digest(),
        settings=SettingsRecord(**{name: getattr(settings, name) for name in SettingsRecord.__struct_fields__}),
        sampling=SamplingRecord(max_tokens=sampling.max_tokens, ignore_eos=sampling.ignore_eos),
        cross=cross,
        model=ModelRecord(name=model_name(settings.model, model_dir), files=model_files(model_dir)),
        code=code_facts(),
        packages=package_versions(),
        machine=machine_facts(),
        prompts=tuple(_prompt_record(found) for found in results[0].completions),
        arms=tuple(_arm_record(result, results[0], verdict) for result in results),
        controls=tuple(_control_record(outcome) for outcome in power.controls),
        differences=tuple(difference_record(difference) for difference in verdict.differences),
        failed=tuple(str(failure) for failure in verdict.failures),
        faults=tuple(str(fault) for fault in verdict.faults),
        not_shown=tuple(power.not_shown()),
        not_run=(*power.not_run, *NOT_BUILT),
    )


def _prompt_record(found: Completion) -> PromptRecord:
    layers = LayerHashes(rows=0, layers=0, hashes=b"")
    if not found.error:
        layers = LayerHashes(rows=num_rows(found), layers=num_layers(found), hashes=found.layer_hashes)
    return PromptRecord(
        text=found.prompt,
        token_ids=found.prompt_token_ids,
        output_token_ids=found.token_ids,
        output_text=found.text,
        token_sha256=found.token_sha256,
        logits_sha256=found.logits_sha256,
        residual_hash=found.residual_hash,
        layers=layers,
        error=found.error,
    )


def _arm_record(result: ArmResult, reference: ArmResult, verdict: Verdict) -> ArmRecord:
    arm = result.arm
    return ArmRecord(
        settings=ArmSettings(**arm.to_dict()),  # type: ignore[arg-type]
        adverse=AdverseRecord(poison=True, delay_seed=arm.delay_seed, order_seed=arm.order_seed)
        if arm.adverse
        else None,
        equal=verdict.is_equal(arm),
        hashes_sha256=result.hashes_sha256,
        witness=_witness_record(result),
        other_prompts=tuple(
            _other_prompt(number, theirs)
            for number, (mine, theirs) in enumerate(
                zip(reference.completions, result.completions, strict=True), start=1
            )
            if any(getattr(mine, name) != getattr(theirs, name) for name in HASHES)
        ),
    )


def _other_prompt(number: int, found: Completion) -> OtherPrompt:
    return OtherPrompt(
        prompt=number,
        output_token_ids=found.token_ids,
        token_sha256=found.token_sha256,
        logits_sha256=found.logits_sha256,
        residual_hash=found.residual_hash,
        layers_sha256=layers_sha256(found),
        error=found.error,
    )


def _witness_record(result: ArmResult) -> WitnessRecord:
    witness = result.witness
    assert witness is not None, "a receipt is made of arms that ran here"
    return WitnessRecord(
        steps=witness.steps,
        most_rows=witness.most_rows,
        most_live_requests=witness.most_live_requests,
        exchange=witness.ranks[0].exchange_mode,
        transport=witness.ranks[0].transport_name,
        threads=witness.ranks[0].num_threads,
        poison=witness.ranks[0].poison,
        calls=tuple(sum(rank.transport.values()) for rank in witness.ranks),
        delays=tuple(rank.num_delays for rank in witness.ranks),
        exchanges=tuple(rank.exchanges for rank in witness.ranks),
        bytes_sent=tuple(rank.bytes_sent for rank in witness.ranks),
        bytes_received=tuple(rank.bytes_received for rank in witness.ranks),
        hazards=hazard_totals(result),
    )


def _control_record(outcome: ControlOutcome) -> ControlRecord:
    return ControlRecord(
        control=outcome.arm.control,
        arm=outcome.arm.name,
        differ=outcome.differ,
        same=outcome.same,
        ended=outcome.ended,
    )


def difference_record(difference: Difference) -> DifferenceRecord:
    place = difference.place
    return DifferenceRecord(
        arm=difference.arm.name,
        prompt=difference.prompt,
        hashes=difference.hashes,
        first_differing_token=difference.token_index,
        position=place.position if place else None,
        layer=place.layer if place else None,
        text=difference.text,
    )
