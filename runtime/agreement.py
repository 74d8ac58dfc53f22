"""Whether ranks are alike, and came to the same: the rule that all answer alike or none goes on."""

from __future__ import annotations

from ..errors import ProtocolError, RankMismatch
from ..ranks.messages import PROTOCOL_VERSION, Hello, Plan, Ready, Run, RunResult, StepResult
from .layer_hashes import first_difference, num_layers_of


def agreed(plan: Plan, results: list[StepResult], run_id: str) -> StepResult:
    """The one result that all ranks came to. Raises RankMismatch that names the first difference."""
    for result in results:
        slots = [run.slot for run in result.runs]
        if result.step != plan.step or slots != [run.slot for run in plan.runs]:
            raise RankMismatch(
                f"run {run_id}: rank {result.rank} answered step {plan.step} as step {result.step} with slots {slots}; "
                f"the plan has slots {[run.slot for run in plan.runs]}",
                rank=result.rank,
                step=plan.step,
            )
    first = results[0]
    for other in results[1:]:
        for run, mine, theirs in zip(plan.runs, first.runs, other.runs, strict=True):
            if mine != theirs:
                raise RankMismatch(
                    f"run {run_id}: ranks disagree at step {plan.step}, slot {mine.slot}"
                    f"{_where_layers_differ(mine, theirs, run)}: rank {first.rank} has token "
                    f"{mine.token_id}, residual {mine.residual_hash:016x}; rank {other.rank} has token "
                    f"{theirs.token_id}, residual {theirs.residual_hash:016x}. No token of this step was released",
                    rank=other.rank,
                    step=plan.step,
                )
    return first


def _where_layers_differ(mine: RunResult, theirs: RunResult, run: Run) -> str:
    """', position P, layer L': the first layer of the first row that differs; empty without layer hashes."""
    num_layers = num_layers_of(mine.layer_hashes, len(run.token_ids))
    place = first_difference(mine.layer_hashes, theirs.layer_hashes, num_layers)
    if place is None:
        return ""
    row, layer = place
    return f", position {run.start + row}, layer {layer}"


def check_hellos(hellos: list[Hello], run_id: str) -> None:
    for hello in hellos:
        if hello.protocol != PROTOCOL_VERSION or hello.run_id != run_id:
            raise ProtocolError(
                f"expected rank {hello.rank} of run {run_id} at protocol {PROTOCOL_VERSION}, got run {hello.run_id} at "
                f"protocol {hello.protocol}"
            )


def check_ready(readies: list[Ready], settings_digest: str, model_digest: str) -> None:
    """All ranks read the model that the pool read, with its settings. Raises RankMismatch with both sides."""
    first = readies[0]
    for ready in readies:
        for name, expected, found in (
            ("model digest", model_digest, ready.model_digest),
            ("settings digest", settings_digest, ready.settings_digest),
            ("device", first.device, ready.device),
            ("exchange", first.exchange, ready.exchange),
            ("transport", first.transport, ready.transport),
            ("number of threads", str(first.num_threads), str(ready.num_threads)),
            ("poison", str(first.poison), str(ready.poison)),
            ("versions", str(first.versions), str(ready.versions)),
        ):
            if expected != found:
                raise RankMismatch(
                    f"before the first step, rank {ready.rank} has another {name}: expected {expected}, got {found}",
                    rank=ready.rank,
                    step=-1,
                )
