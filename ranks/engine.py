"""The engine of one rank: executes step plans over its slots. It knows slots and rows, and no requests."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch

from .. import _C
from ..collectives.hazards import HazardCounts
from ..collectives.transport import Transport
from . import ops
from .memory import MemorySizes
from .messages import Plan, Run, RunResult, Setup, StepResult, Traffic
from .models import CausalModel
from .numerics import HASH_MODULUS
from .plan_rules import PlanRules, Slot
from .rows import StepRows

NO_ROW_ID = 2**31 - 1
"""The id that a rank without vocabulary rows offers: above every real one."""

BEST = np.dtype([("value", np.float32), ("token_id", np.int32), ("is_finite", np.int32)])
"""What a rank sends of a decided row: its largest logit, the id of that, and whether all its logits are finite."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The token that one decided row draws. `row_bits`: its whole FP32 logits, where digests are on."""

    token_id: int
    finite: bool
    row_bits: bytes


class Engine:
    """Executes plans on one rank. Every rank gets the same plans and comes to equal results."""

    def __init__(
        self, model: CausalModel, transport: Transport, setup: Setup, hazards: HazardCounts | None = None
    ) -> None:
        self.model = model
        self.hazards = hazards
        self.transport = transport
        self.setup = setup
        self.rules = PlanRules(setup, model.spec.vocab_size)
        self.step = setup.previous_step
        self.slots: dict[int, Slot] = {}
        self.page_table = torch.zeros((setup.num_slots, setup.max_pages_per_slot), dtype=torch.int32)
        self.memory = model.allocate(MemorySizes(setup.num_slots, setup.num_pages, setup.page_size, setup.dtype))
        if setup.poison:
            self.memory.fill_nan()

    def execute(self, plan: Plan) -> StepResult:
        """Compute one plan. Raises ProtocolError, before any of it is done, for a plan that does not fit the slots."""
        self.rules.check(plan, self.step, self.slots)
        self.step = plan.step
        for slot_id in plan.releases:
            released = self.slots.pop(slot_id)
            if self.setup.poison:
                self.memory.fill_nan_in(slot_id, released.page_ids)
        for admit in plan.admits:
            self.page_table[admit.slot, : len(admit.page_ids)] = torch.tensor(admit.page_ids, dtype=torch.int32)
            self.slots[admit.slot] = Slot(admit.page_ids)
        runs = self._compute(plan.runs) if plan.runs else ()
        return StepResult(rank=self.setup.rank, step=plan.step, runs=runs, traffic=self._traffic())

    def _compute(self, runs: tuple[Run, ...]) -> tuple[RunResult, ...]:
        rows = self._rows(runs)
        residual = self.model.forward(rows)
        row_hashes = ops.residual_hash(residual.rows, rows.positions).tolist()
        bad_layers = residual.first_bad_layer.tolist()
        ends = list(itertools.accumulate(max(1, len(run.token_ids)) for run in runs))
        decided = [end - 1 for run, end in zip(runs, ends, strict=True) if run.decides]
        decisions = iter(self._decide(residual.rows[decided])) if decided else iter(())
        results = []
        for run, end in zip(runs, ends, strict=True):
            begin = end - max(1, len(run.token_ids))
            run_hash = sum(row_hashes[begin:end]) % HASH_MODULUS
            decision = next(decisions) if run.decides else None
            layer_hashes = b""
            if self.setup.layer_digests:
                layer_hashes = residual.layer_hashes[begin:end].astype("<u8").tobytes()
            results.append(self._conclude(run, end - begin, run_hash, layer_hashes, bad_layers[begin:end], decision))
        return tuple(results)

    def _rows(self, runs: tuple[Run, ...]) -> StepRows:
        token_ids: list[int] = []
        positions: list[int] = []
        slot_ids: list[int] = []
        for run in runs:
            run_tokens = run.token_ids or (self.slots[run.slot].last_token_id,)
            token_ids.extend(run_tokens)
            positions.extend(range(run.start, run.start + len(run_tokens)))
            slot_ids.extend([run.slot] * len(run_tokens))
        return StepRows(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.tensor(slot_ids, dtype=torch.int32),
            page_table=self.page_table,
            page_size=self.setup.page_size,
        )

    def _conclude(
        self,
        run: Run,
        num_rows: int,
        run_hash: int,
        layer_hashes: bytes,
        bad_layers: list[int],
        decision: Decision | None,
    ) -> RunResult:
        slot = self.slots[run.slot]
        slot.length += num_rows
        bad_row = next((row for row, layer in enumerate(bad_layers) if layer >= 0), -1)
        bad_layer = bad_layers[bad_row] if bad_row >= 0 else -1
        bad_position = run.start + bad_row if bad_row >= 0 else -1
        if decision is not None:
            slot.last_token_id = decision.token_id
            slot.logits_sha256.update(decision.row_bits)
            if bad_layer < 0 and not decision.finite:
                bad_layer, bad_position = self.model.spec.num_layers, run.start + num_rows - 1
        return RunResult(
            slot=run.slot,
            token_id=decision.token_id if decision else -1,
            residual_hash=run_hash,
            bad_layer=bad_layer,
            bad_position=bad_position,
            logits_sha256=slot.logits_sha256.hexdigest() if self.setup.digests and decision else "",
            layer_hashes=layer_hashes,
        )

    def _decide(self, residual_rows: torch.Tensor) -> list[Decision]:
        logits = self.model.logits(residual_rows)
        return self._decide_by_whole_rows(logits) if self.setup.digests else self._decide_by_best(logits)

    def _decide_by_whole_rows(self, logits: torch.Tensor) -> list[Decision]:
        """Every rank gets the whole vocabulary's logits: [D, own] -> [D, vocab_size]."""
        counts = [end - begin for begin, end in self.model.vocab_ranges]
        with self.transport.stats.exchanging():
            parts = self.transport.all_gather_unequal(logits.T.contiguous(), counts)
        whole = torch.cat(list(parts)).T.contiguous()
        _, token_ids = ops.argmax(whole)
        finite = (~ops.nonfinite_rows(whole)).tolist()
        rows = [row.astype("<f4").tobytes() for row in whole.numpy()]
        return [Decision(*each) for each in zip(token_ids.tolist(), finite, rows, strict=True)]

    def _decide_by_best(self, logits: torch.Tensor) -> list[Decision]:
        """Every rank sends its best (value, id) a row; ranks hold ascending ids, so the first of equal values wins."""
        first_id, _ = self.model.vocab_ranges[self.setup.rank]
        num_rows = logits.shape[0]
        best = np.empty(num_rows, dtype=BEST)
        best["value"], best["token_id"], best["is_finite"] = np.nan, NO_ROW_ID, 1  # NaN loses to every number
        if logits.shape[1]:
            values, local_ids = ops.argmax(logits)
            best["value"], best["token_id"] = values.numpy(), local_ids.numpy() + first_id
            best["is_finite"] = ~ops.nonfinite_rows(logits)
        with self.transport.stats.exchanging():
            gathered = self.transport.all_gather(torch.from_numpy(best.view(np.int32))).numpy().view(BEST)
        _, winners = ops.argmax(torch.from_numpy(np.ascontiguousarray(gathered["value"].T)))
        token_ids = gathered["token_id"][winners.numpy(), np.arange(num_rows)]
        token_ids[token_ids == NO_ROW_ID] = 0  # a row of NaN, as argmax has it
        finite: list[bool] = np.all(gathered["is_finite"], axis=0).tolist()
        return [
            Decision(token_id, is_finite, b"") for token_id, is_finite in zip(token_ids.tolist(), finite, strict=True)
        ]

    def _traffic(self) -> Traffic:
        stats = self.transport.stats
        return Traffic(
            calls=stats.calls,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            num_exchanges=self.model.num_exchanges,
            wait_ns=stats.wait_ns,
            exchange_ns=stats.exchange_ns,
            hazards={} if self.hazards is None else self.hazards.as_dict(),
            num_delays=stats.num_delays,
            cpu_ns=time.process_time_ns(),
            kernel_cpu_ns=_C.kernel_cpu_ns(),
        )
