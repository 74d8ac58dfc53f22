"""A published config.json: the fields of its text model, which some families wrap in those of a whole one."""

from __future__ import annotations

from dataclasses import dataclass

from ..json_fields import JsonFields, is_regular_file


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """`text` holds the text model's fields, `whole` the file's; one and the same where nothing is wrapped."""

    family: str
    text: JsonFields
    whole: JsonFields
    tensor_prefix: str

    def eos_fields(self) -> JsonFields:
        """Where the ids that end a text are: generation_config.json if it has any, else the outermost that has."""
        generation_path = self.whole.path.parent / "generation_config.json"
        if is_regular_file(generation_path):
            generation = JsonFields.read(generation_path)
            if generation.has("eos_token_id"):
                return generation
        return self.whole if self.whole.has("eos_token_id") else self.text

    def tied_embeddings(self) -> bool:
        """A wrapped config ties its head in its outer fields alone, as transformers reads it."""
        return self.whole.boolean("tie_word_embeddings", False)


def plain(family: str, fields: JsonFields) -> PublishedConfig:
    return PublishedConfig(family, fields, fields, "model.")


def wrapped(family: str, fields: JsonFields) -> PublishedConfig:
    """A text model beside others (vision), its fields in `text_config`."""
    text = fields.fields("text_config")
    if text is None:
        raise fields.wrong("text_config", f"an object with the fields of the text model, as model_type {family} has")
    if text.text("model_type", f"{family}_text") not in (family, f"{family}_text"):
        raise text.wrong("model_type", f"{family}_text")
    return PublishedConfig(family, text, fields, "model.language_model.")
