"""A receipt and this machine: what decides bits, there and here, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import PromptError, ReceiptMismatch
from ...ranks.numerics import NUMERICS_VERSION
from ..settings import Settings
from ..tokenizer import Tokenizer
from .document import ARITHMETIC_ID
from .hashes import SHOWN_DIGITS, model_files
from .records import Receipt

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing of the receipt beside the same thing here. `decides_bits`: where it differs, so may everything else."""

    what: str
    same: bool
    text: str
    decides_bits: bool = True

    def to_dict(self) -> dict[str, str | bool]:
        return {"what": self.what, "same": self.same, "text": self.text}


def facts_here(receipt: Receipt, settings: Settings, model_dir: Path) -> list[Fact]:
    """What decides bits, in the receipt and here. `settings`: the receipt's, as this installation reads them."""
    files = model_files(model_dir)
    return [
        _files_fact("weights", receipt.model.files, files, is_weight=True),
        _files_fact("other model files", receipt.model.files, files, is_weight=False),
        _fact("numerics", str(receipt.numerics), str(NUMERICS_VERSION)),
        _fact("settings digest", receipt.settings_digest, settings.digest()),
        _fact("arithmetic", receipt.arithmetic_id, ARITHMETIC_ID),
    ]


def require_same(facts: list[Fact]) -> None:
    """ReceiptMismatch where bits need not be equal here."""
    texts = [f"{fact.what}: {fact.text}" for fact in facts if fact.decides_bits and not fact.same]
    if texts:
        raise ReceiptMismatch(f"not run: the bits cannot be expected to be equal here. {'; '.join(texts)}")


TEXTS_NOT_CHECKED = "the texts, since the tokenizer here is not the receipt's: its ids are what is compared"


def texts_can_be_checked(receipt: Receipt, model_dir: Path) -> bool:
    """Whether the tokenizer here is the one that the receipt's texts and ids belong to by."""
    found = model_files(model_dir).get(TOKENIZER_FILE)
    return found is not None and found == receipt.model.files.get(TOKENIZER_FILE)


def require_same_texts(receipt: Receipt, tokenizer: Tokenizer) -> None:
    """ReceiptMismatch where a text, a prompt's or an output's, and its ids do not belong together."""
    for number, prompt in enumerate(receipt.prompts, start=1):
        if prompt.text is not None and not _encodes_to(tokenizer, prompt.text, prompt.token_ids):
            what = "its text has other token ids than it says"
        elif prompt.output_text is not None and tokenizer.decode(prompt.output_token_ids) != prompt.output_text:
            what = "its output ids have another text than it says"
        else:
            continue
        raise ReceiptMismatch(
            f"the receipt contradicts itself: prompt {number}: {what}; it proves nothing, make it again"
        )


def _encodes_to(tokenizer: Tokenizer, text: str, token_ids: tuple[int, ...]) -> bool:
    try:
        return tuple(tokenizer.encode(text)) == token_ids
    except PromptError:  # such as half a surrogate pair: no tokenizer made ids of that
        return False


def _fact(what: str, there: str, here: str) -> Fact:
    shown_there, shown_here = (text[:SHOWN_DIGITS] for text in (there, here))
    same = there == here
    return Fact(what, same, f"{shown_here}, as there" if same else f"{shown_there} in the receipt, {shown_here} here")


def _files_fact(what: str, there: dict[str, str], here: dict[str, str], is_weight: bool) -> Fact:
    names = sorted(name for name in {*there, *here} if _decides_bits(name) is is_weight)
    others = list(_other_files(names, there, here))
    text = "; ".join(others) if others else f"the same {len(names)} files"
    return Fact(what, not others, text, decides_bits=is_weight)


def _other_files(names: list[str], there: dict[str, str], here: dict[str, str]) -> Iterator[str]:
    for name in names:
        if name not in here:
            yield f"{name} is missing here"
        elif name not in there:
            yield f"{name} is not in the receipt"
        elif there[name] != here[name]:
            yield (
                f"{name} differs: sha256 {there[name][:SHOWN_DIGITS]} in the receipt, {here[name][:SHOWN_DIGITS]} here"
            )


def _decides_bits(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES) or name in CONFIG_FILES
