"""Text to token ids and back, by a model folder's own tokenizer.json and chat template."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, PromptError
from ..ranks.json_fields import JsonFields, is_regular_file

if TYPE_CHECKING:
    import tokenizers

MOST_CHARACTERS_AT_ONCE = 1 << 16
"""A longer text is encoded on a thread of its own: at a few hundred kilobytes a second, a Ctrl-C would wait for it."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of one model folder. Stop ids are not its business: they come with the model's spec."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens)
        self._skipped = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self.has_byte_fallback = self.join(["<0x41>"]) == "A"
        """Whether tokens such as <0x41> are bytes, and a run of them becomes text as one."""

    @classmethod
    def open(cls, model_dir: Path) -> Tokenizer | None:
        """None when the folder has no tokenizer.json; ModelError when what it has cannot be read."""
        path = model_dir / "tokenizer.json"
        if not is_regular_file(path):
            return None
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path}: expected a tokenizer that the tokenizers library reads: {error}") from error
        # A file may carry a length limit or padding for training; here both would change prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        config_path = model_dir / "tokenizer_config.json"
        config = JsonFields.read(config_path).values if is_regular_file(config_path) else {}
        return cls(backend, _chat_template(model_dir, config), _special_tokens(config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens are those that the file's own post-processor puts around a raw text.

        Raises PromptError for a text that this tokenizer has no ids for. A KeyboardInterrupt comes through at once,
        however long the text is.
        """
        try:
            if len(text) <= MOST_CHARACTERS_AT_ONCE:
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            return _interruptible(lambda: self._encode_long(text, add_special_tokens))
        except Exception as error:  # the library raises bare Exception
            raise PromptError(f"the model folder's tokenizer has no ids for the text: {error}") from error

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same ids; encode_batch lets other threads run meanwhile, encode holds the interpreter to its end."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the whole sequence at once (a character may span several ids), without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """An id's token, in the tokenizer's own spelling; None for special and unknown ones: decode leaves them out."""
        token = self._backend.id_to_token(token_id)
        return None if token in self._skipped else token

    def join(self, tokens: Sequence[str]) -> str:
        """Text of tokens: decode(ids) is join of their tokens."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The template's text for `messages` (role, content), up to where the model speaks.

        Encode it with add_special_tokens=False: the template writes them itself. A template is code from the model
        folder, so it runs in a sandbox within bounds (`chat_template`), and whatever it raises is a PromptError.
        """
        if self._chat_template is None:
            raise PromptError(
                "chat: the model folder has no chat template (expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give the prompt as raw text, without --chat"
            )
        from .chat_template import render

        try:
            return render(self._chat_template, messages, self._special_tokens)
        except Exception as error:
            found = str(error) or type(error).__name__
            raise PromptError(f"chat: the model folder's chat template failed: {found}") from error


def _interruptible(call: Callable[[], list[int]]) -> list[int]:
    """The result of `call`, made on a daemon thread: an interrupt leaves it behind, and no exit waits for it."""
    result: Future[list[int]] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="leafsum-encode", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    return result.result()


def _chat_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template of the config: one text, or a list of named ones with a 'default'."""
    path = model_dir / "chat_template.jinja"
    if is_regular_file(path):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: expected a chat template in UTF-8: {error}. Fetch the file again") from error
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; a token is written as its text or as an object with its text in 'content'."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
