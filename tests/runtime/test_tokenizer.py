"""The tokenizer of a model folder: text both ways, chat templates in their sandbox, damaged files named."""

import json
import os
import time
from datetime import datetime

import fake_pool
import pytest
import tokenizers
from leafsum.errors import ModelError, PromptError
from leafsum.runtime import chat_template
from leafsum.runtime.tokenizer import MOST_CHARACTERS_AT_ONCE, Tokenizer

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


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_long_text_has_the_ids_of_its_parts(folder, add_special_tokens):
    tokenizer = opened(folder)
    text = "größer " * 20_000
    assert len(text) > MOST_CHARACTERS_AT_ONCE
    ids = [byte_id for _ in range(20_000) for byte_id in tokenizer.encode("größer ", add_special_tokens=False)]
    assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == [256] * add_special_tokens + ids


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


def test_what_published_templates_use(folder):
    path = folder / "chat_template.jinja"
    path.write_text("{{ strftime_now('%Y') }}{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}")
    assert opened(folder).chat([{"content": "ß"}]) == f'{datetime.now().year}[{{"content":"\\u00df"}}]'
    path.write_text("{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}")
    assert opened(folder).chat([{"content": "a"}, {"content": "b"}]) == "<a><b>"


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LOOPS.replace("BODY", ""), "within 0.2 s of CPU time"),
        (LOOPS.replace("range(99999)", "messages").replace("BODY", ""), "within 0.2 s of CPU time"),
        (LOOPS.replace("BODY", "x"), "within 0.2 s of CPU time"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "within 0.2 s"),
        ("{{ 9 ** 9999999999 }}", "at most 4,096 bits from"),
        ("{{ 'x' * 99999999999 }}", "at most 1,000 items from"),
        ("{{ 10 * 10 * [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] }}", "at most 1,000 items from"),
        ("{% for a in range(99) %}{{ 'x' * 11 }}{% endfor %}", "at most 1,000 characters of text"),
    ],
)
def test_a_template_without_end_is_stopped(template, text, folder, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.2)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 10**9 if "CPU" in text else 1_000)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer, begin_s = opened(folder), time.thread_time()
    with pytest.raises(PromptError, match=f"chat template failed: expected .*{text}"):
        tokenizer.chat([{"role": "user", "content": "x"}] * 10_000)
    assert time.thread_time() - begin_s < 5


def test_products_within_bounds_are_computed(folder):
    (folder / "chat_template.jinja").write_text("{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 2 ** 0.5 > 1 }}{{ 2 ** -1 }}")
    assert opened(folder).chat([]) == "===61024True0.5"


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
    with pytest.raises(PromptError, match="tokenizer has no ids for the text"):
        opened(folder).encode("a\udcff" * MOST_CHARACTERS_AT_ONCE)
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    word_level.save(str(folder / "tokenizer.json"))
    with pytest.raises(PromptError, match="tokenizer has no ids for the text: WordLevel"):
        opened(folder).encode("b")


def test_a_template_cannot_leave_its_sandbox(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(PromptError, match="chat template failed"):
        opened(folder).chat([])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_named(name, make, folder):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ModelError, match=f"expected a regular file at .*{name}, found"):
        Tokenizer.open(folder)


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
