"""The tokenizer of a model folder: text both ways, chat templates in their sandbox, damaged files named."""

import json

import fake_pool
import pytest
import tokenizers
from leafsum.errors import ModelError, PromptError
from leafsum.runtime.tokenizer import Tokenizer

TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'tool' %}{{ raise_exception('no role ' + message.role) }}{% endif %}\n"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    tokenizer = fake_pool.byte_level_tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def opened(folder):
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


def test_no_file_is_no_tokenizer(tmp_path):
    assert Tokenizer.open(tmp_path) is None


def test_text_both_ways_as_a_whole(folder):
    tokenizer = opened(folder)
    ids = tokenizer.encode("größer")
    assert ids[0] == 256
    assert len(ids) == 1 + len("größer".encode())
    assert tokenizer.encode("größer", add_special_tokens=False) == ids[1:]
    # ids by id, each half of a two-byte character would be a replacement character
    assert tokenizer.decode([*ids, 257]) == "größer"


def test_limits_for_training_do_not_act(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(opened(folder).encode("a" * 20, add_special_tokens=False)) == 20


def test_chat_template_of_the_configuration(folder):
    text = opened(folder).chat([{"role": "user", "content": "hi <b>"}])
    assert text == "<user>hi <b><eos><assistant>"
    assert opened(folder).encode("<eos>", add_special_tokens=False) == [257]


def test_chat_template_file_comes_first_and_named_lists_have_a_default(folder):
    config = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "list"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert opened(folder).chat([]) == "list"
    (folder / "chat_template.jinja").write_text("file")
    assert opened(folder).chat([]) == "file"


def test_tojson_writes_plain_json(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    assert opened(folder).chat([{"role": "user", "content": "<'ß'>"}]) == "\"<'ß'>\""


def test_a_template_that_refuses_or_breaks_is_a_prompt_error(folder):
    with pytest.raises(PromptError, match="chat template failed: no role tool"):
        opened(folder).chat([{"role": "tool", "content": "x"}])
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(PromptError, match="chat template failed"):
        opened(folder).chat([])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ none() }}", "object is not callable"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
    ],
)
def test_whatever_a_template_raises_is_a_prompt_error(template, text, folder):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(PromptError, match=f"chat: the model folder's chat template failed: .*{text}"):
        opened(folder).chat([{"role": "user", "content": "x"}])


def test_a_text_without_ids_is_a_prompt_error(folder):
    with pytest.raises(PromptError, match="tokenizer has no ids for the text"):
        opened(folder).encode("a\udcff")
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    word_level.save(str(folder / "tokenizer.json"))
    with pytest.raises(PromptError, match="tokenizer has no ids for the text: WordLevel"):
        opened(folder).encode("b")


def test_a_template_cannot_leave_its_sandbox(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(PromptError, match="chat template failed"):
        opened(folder).chat([])


def test_no_template_is_a_prompt_error(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(PromptError, match="no chat template"):
        opened(folder).chat([{"role": "user", "content": "x"}])


def test_damaged_files_are_named(folder):
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"expected a JSON object in .*tokenizer_config\.json, got list"):
        Tokenizer.open(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"expected JSON in .*tokenizer_config\.json"):
        Tokenizer.open(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: expected a chat template in UTF-8: .* 0xff"):
        Tokenizer.open(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: expected a tokenizer"):
        Tokenizer.open(folder)
