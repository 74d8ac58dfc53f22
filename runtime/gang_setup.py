"""What every rank of a gang is told before its first slow step."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..ranks.messages import PROTOCOL_VERSION, Setup
from .limits import Limits
from .messages import Start
from .settings import Settings

RANK_GRACE_S = 30.0
"""How much longer ranks wait for one another than the coordinator for a step: it can name the one that hangs."""


@dataclass(frozen=True, slots=True)
class GangFacts:
    """What differs between one gang of a run and the next."""

    num_ranks: int
    store_path: str
    previous_step: int


def setup_of(settings: Settings, start: Start, limits: Limits, run_id: str, gang: GangFacts, rank: int) -> Setup:
    return Setup(
        protocol=PROTOCOL_VERSION,
        run_id=run_id,
        rank=rank,
        num_ranks=gang.num_ranks,
        model_dir=start.model_dir,
        device=settings.device,
        dtype=settings.dtype,
        exchange=settings.exchange,
        placement=settings.placement,
        page_size=settings.page_size,
        num_pages=limits.num_pages,
        num_slots=limits.num_slots,
        max_pages_per_slot=-(-limits.max_context // settings.page_size),
        num_threads=settings.threads or max(1, len(os.sched_getaffinity(0)) // gang.num_ranks),
        transport=settings.transport,
        digests=settings.digests,
        layer_digests=settings.layer_digests,
        control=settings.control,
        poison=settings.poison,
        hazards=settings.hazards,
        delay_seed=settings.delay_seed,
        store_path=gang.store_path,
        start_timeout_s=settings.start_timeout_s,
        step_timeout_s=settings.step_timeout_s + RANK_GRACE_S,
        model_stamp=start.model_stamp,
        previous_step=gang.previous_step,
    )
