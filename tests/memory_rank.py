"""What a rank process of test_family_memory does: it builds a model, runs it, and says how much memory that took."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from leafsum.collectives.process_transport import ProcessTransport
from leafsum.collectives.transport import SingleRank, Transport
from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.context import RankContext
from leafsum.ranks.memory import MemorySizes
from leafsum.ranks.models import build_model
from leafsum.ranks.rows import StepRows

SIZES = MemorySizes(num_slots=1, num_pages=2, page_size=16, dtype="bfloat16")


def peaks(transport: ProcessTransport, folder: str) -> dict[str, int]:
    """Bytes with the other ranks, then alone.

    Alone comes last, and may use memory again that was taken before: what is told of it is rather too little.
    """
    with_others = peak(transport, folder)
    transport.barrier()
    return {"with others": with_others, "alone": peak(SingleRank(), folder)}


def peak(transport: Transport, folder: str) -> int:
    """The most bytes resident at once, above those before, while a model is built and takes 20 rows."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    context = RankContext(transport.rank, transport.num_ranks, "bfloat16", "auto", "contiguous", transport)
    model = build_model(load_spec(Path(folder)), Checkpoint.open(Path(folder)), context)
    model.allocate(SIZES)
    rows = StepRows(
        token_ids=torch.arange(20),
        positions=torch.arange(20, dtype=torch.int32),
        slots=torch.zeros(20, dtype=torch.int32),
        page_table=torch.tensor([[1, 0]], dtype=torch.int32),
        page_size=SIZES.page_size,
    )
    model.logits(model.forward(rows).rows)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Bytes, of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
