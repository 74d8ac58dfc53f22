"""A receipt as a file: its layout and size, its seal, and what is refused when one is read."""

import json
import subprocess

import pytest
from leafsum.errors import ConfigError, ReceiptMismatch
from leafsum.runtime.commands.main import run
from leafsum.runtime.receipts import file
from leafsum.runtime.receipts.file import read_text
from leafsum.runtime.receipts.seal import from_text, seal_of, to_document, to_text
from runtime.fake_receipts import ARMS, install


@pytest.fixture
def script(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path)


@pytest.fixture
def path(script, tmp_path):
    """A receipt on disk."""
    found = tmp_path / "receipt.json"
    assert run(["receipt", *ARMS, "--prompt", "x", "--prompt", 'Zwölf\n"quoted"', "--out", str(found)]) == 0
    assert script.opened
    return found


def read(path):
    return from_text(read_text(path), str(path))


def edit(path, change, sealed=True):
    """Change the document in the file, and seal it again as an honest writer would."""
    document = json.loads(path.read_text())
    change(document)
    if sealed:
        document["seal"] = seal_of(document)
    path.write_text(to_text(document))


def test_what_is_written_is_read(path):
    receipt = read(path)
    assert [prompt.text for prompt in receipt.prompts] == ["x", 'Zwölf\n"quoted"']
    assert to_text(to_document(receipt)) == path.read_text()
    assert len(receipt.arms) == 11


def test_an_arm_and_a_prompt_are_one_line_each(path):
    lines = path.read_text().splitlines()
    receipt = read(path)
    assert sum('"hashes_sha256"' in line for line in lines) == len(receipt.arms)
    assert sum('"output_token_ids"' in line for line in lines) == len(receipt.prompts)
    arm_lines = [json.loads(line.strip(" ,")) for line in lines if '"hashes_sha256"' in line]
    assert [arm["settings"]["tp"] for arm in arm_lines] == [arm.settings.tp for arm in receipt.arms]


@pytest.mark.usefixtures("script")
def test_a_receipt_of_the_whole_matrix_is_small(tmp_path):
    path = tmp_path / "receipt.json"
    lists = ("--tp", "1,2,3,4,5,8", "--placement", "contiguous,strided,random", "--threads", "1,2")
    cuts = ("--prefill-chunk", "whole,1,5,64", "--concurrency", "4,1,8", "--cross", "full", "--max-tokens", "64")
    assert run(["receipt", *lists, *cuts, "--out", str(path)]) == 0
    assert len(read(path).arms) == 744
    assert path.stat().st_size < 600_000


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(equal=False),
        lambda document: document["prompts"][0].update(token_sha256="0" * 64),
        lambda document: document["arms"][3]["witness"].update(steps=7),
        lambda document: document["not_run"].pop(),
        lambda document: document.update(seal="0" * 64),
        lambda document: document.pop("seal"),
    ],
)
def test_an_edited_receipt_is_caught(change, path):
    edit(path, change, sealed=False)
    with pytest.raises(ReceiptMismatch, match=r"receipt.json was edited after it was written: its seal is \w+, its"):
        read(path)


def test_another_layout_of_the_same_values_is_no_edit(path):
    expected = read(path)
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), indent=4))
    assert read(path) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.pop("prompts"), "missing required field `prompts`"),
        (lambda found: found.update(note=1), "unknown field `note`"),
        (lambda found: found.update(equal="yes"), r"Expected `bool`, got `str` - at `\$.equal`"),
        (lambda found: found.update(prompts=[]), r"length >= 1 - at `\$.prompts`"),
        (lambda found: found.update(arms=[]), r"length >= 1 - at `\$.arms`"),
        (lambda found: found["prompts"][1].update(token_ids=[1, -1]), r"at `\$.prompts\[1\].token_ids\[1\]`"),
        (lambda found: found["prompts"][1].update(token_ids=[2**32]), r"at `\$.prompts\[1\].token_ids\[0\]`"),
        (lambda found: found["prompts"][0].update(residual_hash="xyz"), r"at `\$.prompts\[0\].residual_hash`"),
        (lambda found: found["prompts"][0]["layers"].update(hashes="*"), r"base64 .* `\$.prompts\[0\].layers.hashes`"),
        (
            lambda found: found["prompts"][0]["layers"].update(hashes="\ud800"),
            "receipt.json: no receipt that this version reads",
        ),
        (lambda found: found["arms"][0]["settings"].update(prefill_chunk="all"), r"at `\$.arms\[0\].settings"),
        (lambda found: found["arms"][0]["settings"].pop("tp"), r"field `tp` - at `\$.arms\[0\].settings`"),
        (lambda found: found["arms"][0].update(hashes_sha256="0" * 63), r"at `\$.arms\[0\].hashes_sha256`"),
        (lambda found: found["sampling"].update(max_tokens=0), r"at `\$.sampling.max_tokens`"),
        (lambda found: found["model"].update(files={"a": "b"}), r"at `\$.model.files"),
    ],
)
def test_missing_and_ill_typed_fields_are_named(change, said, path):
    edit(path, change)
    with pytest.raises(ConfigError, match=said):
        read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a receipt in JSON: Expecting value"),
        ("{", "expected a receipt in JSON"),
        ("[" * 100_000, "expected a receipt in JSON"),
        ('{"equal": NaN}', "expected a receipt in JSON: NaN is no number of JSON"),
        ('{"equal": true, "equal": false}', "the name 'equal' stands twice"),
        ("9" * 5000, "expected a receipt in JSON"),
        ("[1]", "an object in JSON, found list"),
        ("{}", "expected a receipt .format 'leafsum receipt 2'., found format None; make it again"),
        ('{"format": "leafsum receipt 1"}', "found format 'leafsum receipt 1'; make it again"),
    ],
)
def test_what_is_no_receipt_is_refused(text, said, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"r.json: .*{said}"):
        read(path)


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="expected a receipt file, found something else"):
        read_text(tmp_path)
    with pytest.raises(ConfigError, match="expected a receipt file, found nothing"):
        read_text(tmp_path / "missing.json")
    fifo = tmp_path / "fifo"
    subprocess.run(["mkfifo", str(fifo)], check=True)
    with pytest.raises(ConfigError, match="expected a receipt file, found something else"):
        read_text(fifo)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path / ("n" * 300))
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"text": "\xfc"}')
    with pytest.raises(ConfigError, match="expected a receipt in JSON: 'utf-8' codec"):
        read_text(latin)
    monkeypatch.setattr(file, "MAX_RECEIPT_BYTES", 10)
    with pytest.raises(ConfigError, match="expected a receipt of at most 10 bytes, found 13"):
        read_text(latin)
