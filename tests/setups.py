"""The first words of a pool and of a coordinator, for tests that play their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leafsum.ranks.checkpoint import Checkpoint
from leafsum.ranks.configs.load import load_spec
from leafsum.ranks.messages import Setup
from leafsum.runtime.gang_setup import GangFacts, setup_of
from leafsum.runtime.limits import Limits
from leafsum.runtime.messages import Start
from leafsum.runtime.run_folder import RunFolder
from leafsum.runtime.settings import Settings

RUN_ID = "0123456789ab"
MODEL_DIGEST = "5" * 64


def make_start(settings: Settings, max_context: int = 512) -> Start:
    """The Start of a pool for a model of two layers and `max_context` positions."""
    return Start(
        settings=settings.to_dict(),
        model_dir=settings.model,
        model_digest=MODEL_DIGEST,
        model_stamp=stamp_of(Path(settings.model)),
        model_max_context=max_context,
        num_layers=2,
    )


def stamp_of(model_dir: Path) -> str:
    """Of a folder that may not be there, for coordinators whose ranks are played."""
    return Checkpoint.open(model_dir).stamp() if (model_dir / "config.json").exists() else "stamp"


def make_setup(model_dir: Path, run_path: Path, rank: int = 0, **fields: Any) -> Setup:
    """The Setup of `rank`, for a pool with these settings, whose run folder is `run_path`."""
    settings = Settings(model=str(model_dir), **fields)
    start = make_start(settings, load_spec(model_dir).max_context)
    gang = GangFacts(settings.tp, str(RunFolder(run_path, RUN_ID).store(0)), previous_step=0)
    return setup_of(settings, start, Limits.of(settings, start.model_max_context), RUN_ID, gang, rank)
