"""From a Setup to an engine: checks the machine, meets the peers, reads the weights."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np
import torch

from .. import _C
from ..collectives import Transport
from ..collectives.delays import DelayedTransport
from ..collectives.hazards import HazardCounts
from ..collectives.kinds import TRANSPORTS
from ..collectives.transport import SingleRank
from ..errors import ConfigError, LeafsumError, ModelError
from . import poison
from .checkpoint import Checkpoint
from .configs.load import load_spec
from .context import RankContext
from .engine import Engine
from .journal import Journal
from .machine import cpu_name
from .messages import Ready, Setup
from .models import CausalModel, build_model
from .numerics import settings_digest

NO_TRANSPORT = "none"


def load_engine(setup: Setup, journal: Journal) -> tuple[Engine, Ready]:
    """Build this rank's engine. Raises LeafsumError; whatever else escapes is reported with its traceback."""
    prepare_machine(setup.num_threads)
    poison.set_poison(setup.poison)
    model_dir = Path(setup.model_dir)
    spec = load_spec(model_dir)
    checkpoint = Checkpoint.open(model_dir)
    refuse_other_files(checkpoint, setup.model_stamp)
    journal.note("meeting", num_ranks=setup.num_ranks)
    transport = meet_peers(setup)
    transport_name = name_of(transport)
    journal.note("met", transport=transport_name)
    if setup.delay_seed and setup.num_ranks > 1:
        transport = DelayedTransport(transport, setup.delay_seed)
    hazards = HazardCounts() if setup.hazards else None
    context = RankContext(
        rank=setup.rank,
        num_ranks=setup.num_ranks,
        dtype=setup.dtype,
        exchange=setup.exchange,
        placement=setup.placement,
        transport=transport,
        layer_digests=setup.layer_digests,
        control=setup.control,
        hazards=hazards,
    )
    model = build_model(spec, checkpoint, context)
    refuse_other_files(checkpoint, setup.model_stamp)  # none was replaced while it was read
    engine = make_engine(model, transport, setup, hazards)
    ready = Ready(
        rank=setup.rank,
        device=f"{setup.device}: {cpu_name()}",
        model_digest=checkpoint.digest,
        settings_digest=settings_digest({"control": setup.control, "device": setup.device, "dtype": setup.dtype}),
        exchange=model.exchange_mode,
        transport=transport_name,
        num_threads=_C.num_threads(),
        poison=poison.is_on(),
        versions=versions(),
    )
    return engine, ready


def refuse_other_files(checkpoint: Checkpoint, stamp: str) -> None:
    """Raises ModelError where a file of the model is not the one that the pool has checked.

    Ranks read different weights, and a gang that is started again would go on with others, without a difference
    between its ranks.
    """
    if checkpoint.stamp() != stamp:
        raise ModelError(
            f"a file of {checkpoint.model_dir} was replaced or written since the pool was started: its ranks would not "
            "all have the same model. Leave a folder alone while it serves, and start a new pool for a new model"
        )


def make_engine(model: CausalModel, transport: Transport, setup: Setup, hazards: HazardCounts | None = None) -> Engine:
    try:
        return Engine(model, transport, setup, hazards)
    except RuntimeError as error:  # torch's allocator
        raise ConfigError(
            f"cannot allocate the KV pages of {setup.num_pages * setup.page_size:,} tokens and the state of "
            f"{setup.num_slots} requests: {error}. Lower --kv-tokens or --concurrency"
        ) from error


def prepare_machine(num_threads: int) -> None:
    """Set the kernels' threads and refuse a float environment that would change bits."""
    # torch only moves bytes here; its own pool would be threads that never work.
    torch.set_num_threads(1)
    _C.set_num_threads(num_threads)
    if not _C.subnormals_kept():
        raise LeafsumError(
            "expected subnormal numbers to be kept, but flush-to-zero is on in this process: results would differ from "
            "every other rank's. Look for a library that sets it at load (built with -ffast-math) and remove it"
        )


def meet_peers(setup: Setup) -> Transport:
    if setup.num_ranks == 1:
        return SingleRank()
    kind = TRANSPORTS[setup.transport]
    return kind(setup.rank, setup.num_ranks, setup.store_path, setup.step_timeout_s, setup.start_timeout_s)


def name_of(transport: Transport) -> str:
    """What the setting calls a transport of its kind, "none" where there is one rank."""
    return next((name for name, kind in TRANSPORTS.items() if type(transport) is kind), NO_TRANSPORT)


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which the wire refuses
        "numpy": np.__version__,
        "msgspec": msgspec.__version__,
        "leafsum": own_version(),
        "instruction_set": _C.instruction_set(),
    }


def own_version() -> str:
    try:
        return version("leafsum")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "not installed"
