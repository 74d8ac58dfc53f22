"""From what --model says to a folder on this machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..errors import ModelError

TINY = "tiny"
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
EXPECTED = f"expected a folder with config.json and safetensors files, '{TINY}', or a hub id such as owner/name"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(text: str) -> Path:
    """Folder of the model: 'tiny', an existing folder, or a hub id such as owner/name, fetched into the hub's cache.

    A folder comes before a hub id of the same name; one called tiny is ./tiny. ModelError when there is none, or when
    its name is not UTF-8: messages, receipts and the libraries that open files carry it as text.
    """
    if text == TINY:
        from ..ranks.tiny import ensure_tiny

        return ensure_tiny()
    try:
        folder = Path(text).expanduser()
        if folder.is_dir():
            (folder / "config.json").exists()  # raises where the folder may not be entered
            return _as_text(folder.resolve())
        if folder.exists():
            raise ModelError(f"model: expected a folder, found the file {folder}; name the one that holds config.json")
        looked_in = Path.cwd()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user that there is not
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"model: cannot look for the folder {text}: {reason}; {EXPECTED}") from error
    if HUB_ID.fullmatch(text):
        return _fetch_from_hub(text, looked_in)
    raise ModelError(f"model: there is no folder {folder} (looked in {looked_in}); {EXPECTED}")


def _as_text(folder: Path) -> Path:
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ModelError(f"model: expected a folder with a name in UTF-8, got {str(folder)!r}; rename it") from None
    return folder


def model_name(text: str, model_dir: Path) -> str:
    """What a receipt calls the model: 'tiny', a hub id, or the folder's name alone. `model_dir`: what `text` led to."""
    is_folder = text != TINY and Path(text).expanduser().is_dir()
    return model_dir.name if is_folder else text


def _fetch_from_hub(hub_id: str, looked_in: Path) -> Path:
    """Safetensors, configuration and tokenizer files only: nothing that would have to be unpickled or run."""
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the client raises its own, its transport's and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model: there is no folder {hub_id} (looked in {looked_in}), and fetching the hub id {hub_id} failed: "
            f"{reason}"
        ) from error
