"""Text to token ids and back, by a model folder's own tokenizer.json and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, PromptError
from ..ranks.json_fields import JsonFields

if TYPE_CHECKING:
    import tokenizers

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of one model folder. Stop ids are not its business: they come with the model's spec."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def open(cls, model_dir: Path) -> Tokenizer | None:
        """None when the folder has no tokenizer.json; ModelError when what it has cannot be read."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
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
        config = JsonFields.read(config_path).values if config_path.is_file() else {}
        return cls(backend, _chat_template(model_dir, config), _special_tokens(config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens are those that the file's own post-processor puts around a raw text.

        Raises PromptError for a text that this tokenizer has no ids for.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises bare Exception
            raise PromptError(f"the model folder's tokenizer has no ids for the text: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the whole sequence at once (a character may span several ids), without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The template's text for `messages` (role, content), up to where the model speaks.

        Encode it with add_special_tokens=False: the template writes them itself. A template is code from the model
        folder, so it runs in jinja2's immutable sandbox, and whatever it raises is a PromptError.
        """
        if self._chat_template is None:
            raise PromptError(
                "chat: the model folder has no chat template (expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give the prompt as raw text, without --chat"
            )
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_from_template
        environment.filters["tojson"] = _tojson
        try:
            template = environment.from_string(self._chat_template)
            return template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except Exception as error:
            found = str(error) or type(error).__name__
            raise PromptError(f"chat: the model folder's chat template failed: {found}") from error


def _raise_from_template(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML, which no chat format expects."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _chat_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template of the config: one text, or a list of named ones with a 'default'."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
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
