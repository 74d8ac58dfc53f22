"""Whether a plan fits the slots of a rank. A plan is checked whole before any of it is done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ProtocolError
from .messages import Admit, Plan, Run, Setup


@dataclass(slots=True)
class Slot:
    """The state of one open slot. `length` counts the positions whose keys and values are stored.

    `last_token_id` is the one it drew last, -1 before the first; `logits_sha256` runs over the rows that decided.
    """

    page_ids: tuple[int, ...]
    length: int = 0
    last_token_id: int = -1
    logits_sha256: hashlib._Hash = field(default_factory=hashlib.sha256)


class PlanRules:
    """What a plan may name: fixed by the Setup and the model."""

    def __init__(self, setup: Setup, vocab_size: int) -> None:
        self.setup = setup
        self.vocab_size = vocab_size

    def check(self, plan: Plan, previous_step: int, slots: Mapping[int, Slot]) -> None:
        """Raise ProtocolError for a plan that does not follow from the state that `slots` are in."""
        if plan.step != previous_step + 1:
            raise ProtocolError(f"expected step {previous_step + 1}, got a plan for step {plan.step}")
        after = {slot_id: Slot(slot.page_ids, slot.length, slot.last_token_id) for slot_id, slot in slots.items()}
        for slot_id in plan.releases:
            if after.pop(slot_id, None) is None:
                raise ProtocolError(f"step {plan.step}: slot {slot_id} is not open and cannot be released")
        for admit in plan.admits:
            self._admit(admit, after)
        for run in plan.runs:
            self._run(run, after)

    def _admit(self, admit: Admit, after: dict[int, Slot]) -> None:
        if admit.slot in after or admit.slot >= self.setup.num_slots:
            raise ProtocolError(f"slot {admit.slot} is not free to admit; open: {sorted(after)}")
        taken = {page_id for slot in after.values() for page_id in slot.page_ids}
        pages = set(admit.page_ids)
        if len(pages) < len(admit.page_ids) or pages & taken or max(pages, default=0) >= self.setup.num_pages:
            raise ProtocolError(
                f"slot {admit.slot}: expected free pages below {self.setup.num_pages}, each once, got {admit.page_ids}"
            )
        if len(pages) > self.setup.max_pages_per_slot:
            raise ProtocolError(
                f"slot {admit.slot}: expected at most {self.setup.max_pages_per_slot} pages, got {len(pages)}"
            )
        after[admit.slot] = Slot(admit.page_ids)

    def _run(self, run: Run, after: dict[int, Slot]) -> None:
        slot = after.get(run.slot)
        if slot is None:
            raise ProtocolError(f"slot {run.slot} is not open; open: {sorted(after)}")
        if not run.token_ids and slot.last_token_id < 0:
            raise ProtocolError(f"slot {run.slot} has drawn no token to go on from")
        if max(run.token_ids, default=0) >= self.vocab_size:
            raise ProtocolError(
                f"slot {run.slot}: expected token ids below {self.vocab_size}, got {max(run.token_ids)}"
            )
        num_rows = max(1, len(run.token_ids))
        num_positions = len(slot.page_ids) * self.setup.page_size
        if run.start != slot.length or run.start + num_rows > num_positions:
            raise ProtocolError(
                f"slot {run.slot} has {slot.length} of {num_positions} positions filled; a run of {num_rows} rows from "
                f"position {run.start} does not follow"
            )
        slot.length += num_rows
        slot.last_token_id = -1  # a second run of the slot in this step has nothing to go on from
