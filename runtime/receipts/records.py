"""The records of a receipt's document, typed alike for who writes and who reads one.

Prompts are numbered from 1, tokens, positions and layers from 0. Bytes are base64 in JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
ResidualHash = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]
Value = str | int | float | bool | None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: what a receipt does not name is refused."""


class ArmSettings(Record, frozen=True):
    """What an arm crosses with others (arms.ARM_FIELDS)."""

    tp: Count
    exchange: str
    placement: str
    transport: str
    threads: Count
    prefill_chunk: Count | Literal["whole"]
    concurrency: Count


class LayerHashes(Record, frozen=True):
    """`hashes`: U64 little-endian [rows, layers], one hash of the residual for each position and layer."""

    rows: Count
    layers: Count
    hashes: bytes


class PromptRecord(Record, frozen=True):
    """One prompt and what the reference arm made of it; `error` says why it failed, and is empty otherwise."""

    text: str | None
    token_ids: tuple[TokenId, ...]
    output_token_ids: tuple[TokenId, ...]
    output_text: str | None
    token_sha256: Sha256
    logits_sha256: Sha256 | None
    residual_hash: ResidualHash
    layers: LayerHashes
    error: str


class AdverseRecord(Record, frozen=True):
    """Under what an arm ran that was made hard on purpose: seeds of the delays and of the prompts' order."""

    poison: bool
    delay_seed: Count
    order_seed: Count


class WitnessRecord(Record, frozen=True):
    """Counts of one arm. Lists have an entry a rank; `hazards` are added over the ranks.

    `exchange`, `transport`, `threads` and `poison` are what the ranks said that they do; ranks that are not alike never
    run. `calls` are collective calls of all kinds, `delays` the sleeps before them.
    """

    steps: Count
    most_rows: Count
    most_live_requests: Count
    exchange: str
    transport: str
    threads: Count
    poison: bool
    calls: tuple[Count, ...]
    delays: tuple[Count, ...]
    exchanges: tuple[Count, ...]
    bytes_sent: tuple[Count, ...]
    bytes_received: tuple[Count, ...]
    hazards: dict[str, Count]


class OtherPrompt(Record, frozen=True):
    """A prompt of an arm that is not as the reference's."""

    prompt: Count
    output_token_ids: tuple[TokenId, ...]
    token_sha256: Sha256
    logits_sha256: Sha256 | None
    residual_hash: ResidualHash
    layers_sha256: Sha256
    error: str


class ArmRecord(Record, frozen=True, omit_defaults=True):
    """One arm. `hashes_sha256` is over all hashes of all prompts; prompts are named only where they are others.

    It has no name of its own: the texts of a receipt name arms by their settings.
    """

    settings: ArmSettings
    adverse: AdverseRecord | None
    equal: bool
    hashes_sha256: Sha256
    witness: WitnessRecord
    other_prompts: tuple[OtherPrompt, ...] = ()


class ControlRecord(Record, frozen=True):
    """One run that was wrong on purpose: the prompts whose residual differs and does not, or how the run ended."""

    control: str
    arm: str
    differ: tuple[Count, ...]
    same: tuple[Count, ...]
    ended: str


class DifferenceRecord(Record, frozen=True):
    """Where one prompt of one arm parts from the reference; null where it does not."""

    arm: str
    prompt: Count
    hashes: tuple[str, ...]
    first_differing_token: Count | None
    position: Count | None
    layer: Count | None
    text: str


class SettingsRecord(Record, frozen=True):
    """Settings that all arms have in common; how long to wait and what to log is no part of a receipt."""

    device: str
    dtype: str
    max_context: Count
    kv_tokens: Count
    page_size: Count


class SamplingRecord(Record, frozen=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    ignore_eos: bool


class ModelRecord(Record, frozen=True):
    """`name`: tiny, a hub id, or a folder's own name. `files`: SHA-256 by file name."""

    name: str
    files: dict[str, Sha256]


class Receipt(Record, frozen=True):
    """The whole document but its seal. `arithmetic_id`: what decides bits besides numerics, settings and weights."""

    format: str
    equal: bool
    numerics: Count
    arithmetic_id: str
    settings_digest: Sha256
    settings: SettingsRecord
    sampling: SamplingRecord
    cross: str
    model: ModelRecord
    code: dict[str, Value]
    packages: dict[str, str]
    machine: dict[str, Value]
    prompts: Annotated[tuple[PromptRecord, ...], msgspec.Meta(min_length=1)]
    arms: Annotated[tuple[ArmRecord, ...], msgspec.Meta(min_length=1)]
    controls: tuple[ControlRecord, ...]
    differences: tuple[DifferenceRecord, ...]
    failed: tuple[str, ...]
    faults: tuple[str, ...]
    not_shown: tuple[str, ...]
    not_run: tuple[str, ...]

    @property
    def reference(self) -> ArmRecord:
        """The arm that ran plainly; `prompts` are its results."""
        return self.arms[0]
