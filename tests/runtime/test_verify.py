"""`leafsum verify` over a pool without processes: every way in which it ends."""

import json
import re

import fake_pool
import pytest
from leafsum.runtime.commands.main import run
from leafsum.runtime.receipts.seal import seal_of, to_text
from runtime.fake_receipts import ARMS, install

PROMPTS = ("--prompt", "x", "--prompt", "two words", "--prompt-ids", "1,2,3")


@pytest.fixture
def script(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return install(monkeypatch, tmp_path / "model")


@pytest.fixture
def path(script, tmp_path, capfd):
    """A receipt on disk, made by the fake pool; what pools saw of it is forgotten."""
    found = tmp_path / "receipt.json"
    assert run(["receipt", *ARMS, *PROMPTS, "--out", str(found)]) == 0
    capfd.readouterr()
    script.settings, script.opened, script.submitted = [], 0, []
    return found


def verify(capfd, path, *arguments):
    """Exit code, lines of standard output, and standard error."""
    exit_code = run(["verify", str(path), *arguments])
    out, err = capfd.readouterr()
    return exit_code, out.splitlines(), err


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    document["seal"] = seal_of(document)
    path.write_text(to_text(document))


def test_an_equal_rerun(script, path, capfd):
    exit_code, lines, err = verify(capfd, path)
    assert (exit_code, err) == (0, "")
    assert lines[0].startswith("receipt: tiny, 11 arms, 3 prompts, all equal; leafsum 0.1.0, commit ")
    assert lines[1:6] == [
        "same   weights: the same 2 files",
        "same   other model files: the same 1 files",
        "same   numerics: 1, as there",
        f"same   settings digest: {json.loads(path.read_text())['settings_digest'][:12]}, as there",
        "same   arithmetic: ieee-754, as there",
    ]
    assert re.match("tp 2 auto contiguous transport shared threads 1 chunk 64 concurrency 3 .* equal ", lines[7])
    assert lines[-1] == "1 arms, 3 prompts, compared with the receipt: all equal"
    (settings,) = script.settings
    assert settings.poison
    assert settings.delay_seed
    assert settings.layer_digests


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.usefixtures("script")
def test_the_default_is_two_ranks_where_no_count_of_the_receipt_has_its_cores(num_cores, tmp_path, monkeypatch, capfd):
    path = tmp_path / "receipt.json"
    assert run(["receipt", "--tp", "4,8", "--max-tokens", "6", *PROMPTS, "--out", str(path)]) == 0
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(num_cores)))
    capfd.readouterr()
    exit_code, lines, _ = verify(capfd, path)
    assert exit_code == 0
    assert any(line.startswith("tp 2 auto") for line in lines)


def test_what_the_receipt_has_not_shown_is_said(script, tmp_path, capfd):
    path = tmp_path / "receipt.json"
    assert run(["receipt", *ARMS, *PROMPTS, "--no-controls", "--out", str(path)]) == 0
    assert script.opened
    capfd.readouterr()
    exit_code, lines, _ = verify(capfd, path)
    assert exit_code == 0
    assert lines[6] == "not shown: power: no control was run"
    assert lines[-1].endswith("all equal; not shown: power: no control was run")
    exit_code, (line,), _ = verify(capfd, path, "--json")
    found = json.loads(line)
    assert (exit_code, found["equal"], found["receipt_not_shown"]) == (0, True, ["power: no control was run"])


def test_more_requests_at_once_than_prompts_are_refused(script, path, capfd):
    exit_code, _, err = verify(capfd, path, "--concurrency", "1,4")
    assert (exit_code, script.opened) == (2, 0)
    assert "--concurrency 4 needs at least 4 prompts, there are 3" in err


def test_arms_and_local_settings_of_ones_own(script, path, capfd):
    lists = ("--tp", "1,5", "--exchange", "slots,nodes", "--placement", "random:3", "--threads", "2")
    local = ("--kv-tokens", "4096", "--step-timeout-s", "9")
    exit_code, lines, _ = verify(capfd, path, *lists, "--transport", "gloo", "--prefill-chunk", "5", *local)
    assert exit_code == 0
    assert lines[-1].startswith("3 arms, ")
    assert [(each.tp, each.exchange, each.placement) for each in script.settings[1:]] == [
        (5, "slots", "random:3"),
        (5, "nodes", "random:3"),
    ]
    for settings in script.settings:
        assert (settings.threads, settings.prefill_chunk, settings.kv_tokens) == (2, 5, 4096)
        assert settings.step_timeout_s == 9


@pytest.mark.parametrize(("num_cores", "tp"), [(1, 2), (2, 2), (3, 3), (64, 5)])
@pytest.mark.usefixtures("script")
def test_the_default_is_the_most_ranks_of_the_receipt_that_have_a_core(num_cores, tp, tmp_path, monkeypatch, capfd):
    path = tmp_path / "receipt.json"
    assert run(["receipt", "--tp", "1,5,3", "--max-tokens", "6", *PROMPTS, "--out", str(path)]) == 0
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(num_cores)))
    capfd.readouterr()
    exit_code, lines, _ = verify(capfd, path)
    assert exit_code == 0
    assert any(line.startswith(f"tp {tp} auto") for line in lines)


def test_the_settings_of_the_receipt_come_before_the_environments(script, path, monkeypatch, capfd):
    monkeypatch.setenv("LEAFSUM_DTYPE", "float32")
    monkeypatch.setenv("LEAFSUM_PAGE_SIZE", "16")
    assert verify(capfd, path)[0] == 0
    assert (script.settings[0].dtype, script.settings[0].page_size) == ("bfloat16", 64)


def test_the_first_difference_is_named(script, path, capfd):
    def spoil(settings, index, completion):
        wrong = fake_pool.with_token(fake_pool.with_layer(completion, 4, 2), 3, 7)
        return wrong if (settings.tp, index) == (2, 1) else completion

    script.spoil = spoil
    exit_code, lines, err = verify(capfd, path)
    assert exit_code == 1
    assert "arm [tp 2 auto contiguous transport shared threads 1 chunk 64 concurrency 3], prompt 2: expected the" in err
    assert "the bits of arm [tp 1 threads 1 chunk whole concurrency 3]; the output differs first at token 3" in err
    assert "the residual differs first at position 4, layer 2, in the prompt" in err
    assert "DIFFERS" in lines[7]
    assert lines[-1].endswith("0 failed requests, 1 differences, 0 faults")


def test_json_has_facts_arms_and_differences(script, path, capfd):
    exit_code, (line,), _ = verify(capfd, path, "--json", "--tp", "2,3")
    found = json.loads(line)
    assert (exit_code, found["equal"], found["receipt_is_equal"]) == (0, True, True)
    assert [fact["what"] for fact in found["facts"] if fact["same"]] == [
        "weights", "other model files", "numerics", "settings digest", "arithmetic",
    ]  # fmt: skip
    assert len({arm["hashes_sha256"] for arm in found["arms"]}) == 1
    script.spoil = lambda settings, _index, found: fake_pool.with_layer(found, 2, 1) if settings.tp == 3 else found
    exit_code, (line,), _ = verify(capfd, path, "--json", "--tp", "2,3")
    found = json.loads(line)
    assert (exit_code, found["equal"], [arm["equal"] for arm in found["arms"]]) == (1, False, [True, False])
    assert [(each["prompt"], each["position"], each["layer"]) for each in found["differences"]] == [
        (1, 2, 1), (2, 2, 1), (3, 2, 1),
    ]  # fmt: skip


def test_a_failed_request_and_a_missing_witness_are_no_equality(script, path, capfd):
    script.silent_rank = 1
    exit_code, _, err = verify(capfd, path)
    assert exit_code == 1
    assert "all hashes are equal, but that proves nothing: arm [tp 2 auto" in err
    script.spoil = lambda _settings, _index, found: fake_pool.replace(found, error="not finite")
    exit_code, _, err = verify(capfd, path)
    assert exit_code == 1
    assert "prompt 1 failed: not finite (3 requests" in err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"other"),
            r"weights: model.safetensors differs: sha256 \w{12} in the receipt, \w{12} here",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "weights: model.safetensors is missing here"),
        (lambda folder: (folder / "b.safetensors").touch(), "weights: b.safetensors is not in the receipt"),
        (lambda folder: (folder / "config.json").write_text("{}"), "weights: config.json differs"),
    ],
)
def test_other_weights_are_named_and_nothing_runs(change, text, script, path, tmp_path, capfd):
    change(tmp_path / "model")
    exit_code, lines, err = verify(capfd, path)
    assert (exit_code, script.opened) == (1, 0)
    assert re.search(f"^OTHER  {text}$", "\n".join(lines), re.MULTILINE) or "config" in text
    assert re.search(f"not run: the bits cannot be expected to be equal here. {text}", err)
    exit_code, (line,), err = verify(capfd, path, "--json")
    assert (exit_code, json.loads(line)["equal"], json.loads(line)["facts"][0]["same"]) == (1, False, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"numerics": 2}, "numerics: 2 in the receipt, 1 here"),
        ({"settings_digest": "0" * 64}, "settings digest: 000000000000 in the receipt, "),
        ({"arithmetic_id": "sm_90"}, "arithmetic: sm_90 in the receipt, ieee-754 here"),
    ],
)
def test_other_numerics_settings_and_arithmetic_are_named_and_nothing_runs(change, said, script, path, capfd):
    edit(path, lambda document: document.update(change))
    exit_code, lines, err = verify(capfd, path)
    assert (exit_code, script.opened) == (1, 0)
    assert f"not run: the bits cannot be expected to be equal here. {said}" in err
    assert any(line.startswith(f"OTHER  {said}") for line in lines)


def test_another_tokenizer_is_said_and_the_receipts_ids_run(script, path, tmp_path, capfd):
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    exit_code, lines, err = verify(capfd, path)
    assert (exit_code, err, script.opened) == (0, "", 1)
    assert lines[2].startswith("OTHER  other model files: tokenizer.json differs: sha256 ")
    assert "all equal; not shown: the texts, since the tokenizer here is not the receipt's" in lines[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["prompts"][0]["output_token_ids"].__setitem__(0, 7), "prompt 1: its output ids have the"),
        (lambda found: found["prompts"][0]["token_ids"].append(7), "prompt 1: 2 and 6 tokens are not 6 rows"),
        (lambda found: found["prompts"][1]["layers"].update(layers=5), "prompt 2: 448 bytes are not the hashes of 14"),
        (lambda found: found["prompts"][1].update(residual_hash="0" * 16), "is the reference, and the hashes of all"),
        (lambda found: found["arms"][0].update(hashes_sha256="0" * 64), "is the reference, and the hashes of all"),
        (lambda found: found["arms"][5].update(hashes_sha256="0" * 64), "] is called equal, and its hashes are not"),
        (lambda found: found["arms"][5].update(equal=False), "it is called equal, and lists arms that are not"),
        (lambda found: found["faults"].append("x"), "it is called equal, and lists arms that are not"),
        (lambda found: found["prompts"][0].update(text="y"), "prompt 1: its text has other token ids"),
        (lambda found: found["prompts"][0].update(text="\ud800"), "prompt 1: its text has other token ids"),
        (lambda found: found["prompts"][1].update(output_text="Paris"), "prompt 2: its output ids have another text"),
        (lambda found: all_same(found), "equal, and control pick-order [tp 2 slots contiguous"),
        (
            lambda found: found["controls"][4].update(differ=[1, 2]),
            "control dropped-row [tp 2 nodes contiguous transport",
        ),
        (lambda found: found["controls"][0].update(ended="RankLost"), "] did not do as it must"),
        (lambda found: found["controls"][-1].update(ended=""), "control flipped-bit [tp 2 slots contiguous"),
        (lambda found: found["controls"][-1].update(ended="RankMismatch: no place"), "control flipped-bit [tp 2 slots"),
        (lambda found: found["controls"].clear(), "has no control, and does not say 'power: no control was run'"),
        (lambda found: no_controls(found), "control pick-order [tp 2 slots contiguous"),
        (lambda found: found["controls"].pop(4), "control dropped-row [tp 2 nodes contiguous transport shared"),
        (lambda found: found["controls"][4].update(arm="tp 2"), "control dropped-row [tp 2 nodes contiguous"),
        (lambda found: found["arms"][3].update(adverse=None), "it did not run under adverse conditions"),
        (lambda found: found["arms"][3]["adverse"].update(poison=False), "it did not run under adverse conditions"),
        (lambda found: found["arms"][3]["adverse"].update(delay_seed=0), "it did not run under adverse conditions"),
        (lambda found: found["arms"][0].update(adverse=found["arms"][1]["adverse"]), "and did not run plainly"),
        (
            lambda found: no_witnesses(found),
            "arm [tp 1 threads 1 chunk whole concurrency 3]: expected at least one step",
        ),
        (lambda found: witness(found, exchange="slots"), "rank 0: expected exchange nodes, found slots"),
        (lambda found: witness(found, transport="gloo"), "rank 0: expected transport shared, found gloo"),
        (lambda found: witness(found, threads=2), "rank 0: expected 1 threads, found 2"),
        (lambda found: witness(found, poison=False), "rank 0: expected poison, found none"),
        (lambda found: witness(found, delays=[0, 0]), "expected random delays, found none before 160 collective calls"),
        (lambda found: witness(found, bytes_sent=[1]), "its witness has not one count a rank in every list"),
        (lambda found: witness(found, most_live_requests=1), "expected 3 requests at once, found 1"),
    ],
)
def test_a_receipt_that_contradicts_itself_is_caught_though_sealed_again(change, said, script, path, capfd):
    edit(path, change)
    exit_code, _, err = verify(capfd, path)
    assert (exit_code, script.opened) == (1, 0)
    assert "the receipt contradicts itself: " in err
    assert said in err


def all_same(found):
    for control in found["controls"][:-1]:
        control.update(differ=[], same=[1, 2, 3])


def no_controls(found):
    found["controls"].clear()
    found["not_shown"].append("power: no control was run")


def no_witnesses(found):
    for arm in found["arms"]:
        counts = arm["witness"]
        counts.update(steps=0, most_rows=0, most_live_requests=0)
        counts.update({name: [0] * arm["settings"]["tp"] for name in ("exchanges", "bytes_sent", "bytes_received")})


def witness(found, **changed):
    """Of the last arm, two ranks with nodes."""
    found["arms"][-1]["witness"].update(changed)


def test_an_edited_receipt_ends_before_anything_else(script, path, capfd):
    path.write_text(path.read_text().replace('"equal": true', '"equal": false'))
    exit_code, lines, err = verify(capfd, path)
    assert (exit_code, lines, script.opened) == (1, [], 0)
    assert "was edited after it was written" in err


def test_a_receipt_that_is_not_equal_itself_is_never_verified(script, path, capfd):
    script.spoil = lambda settings, _index, found: fake_pool.with_token(found, 0, settings.tp)
    assert run(["receipt", *ARMS, *PROMPTS, "--out", str(path)]) == 1
    script.spoil = lambda _settings, _index, found: found
    capfd.readouterr()
    script.spoil = lambda _settings, _index, found: fake_pool.with_token(found, 0, 1)
    exit_code, lines, err = verify(capfd, path)
    assert exit_code == 1
    assert "NOT equal by its own account" in lines[0]
    assert lines[-1].endswith("compared with the receipt: all equal")
    assert "by its own account the receipt is not equal: arm [tp 2 slots contiguous" in err


def test_a_reference_with_a_failed_prompt_has_nothing_to_compare_with(script, path, capfd):
    script.spoil = lambda _settings, index, found: fake_pool.replace(found, error="not finite") if index == 1 else found
    assert run(["receipt", *ARMS, *PROMPTS, "--out", str(path)]) == 1
    capfd.readouterr()
    exit_code, _, err = verify(capfd, path)
    assert exit_code == 1
    assert "prompt 2 failed when the receipt was made (not finite): there is nothing to compare with" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tp", "0"), "--tp: expected an integer of at least 1"),
        (("--tp", "2,2"), "--tp: expected different values"),
        (("--exchange", "tree"), "--exchange: expected one of"),
        (("--kv-tokens", "0"), "leafsum: --kv-tokens: expected an integer"),
        (("--kv-tokens", "64", "--max-tokens", "3"), "No such option"),
    ],
)
def test_wrong_use_is_refused(arguments, said, script, path, capfd):
    exit_code, _, err = verify(capfd, path, *arguments)
    assert (exit_code, script.opened) == (2, 0)
    assert said in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["settings"].update(device="cuda"), "its settings cannot be had here: device: 'cuda'"),
        (lambda found: found["settings"].update(page_size=0), "its settings cannot be had here: --page-size: expected"),
        (lambda found: found["settings"].update(pages=1), "unknown field `pages` - at `$.settings`"),
        (lambda found: found["settings"].update(dtype="int8"), "its settings cannot be had here: --dtype: expected"),
        (lambda found: found["sampling"].update(max_tokens=40000), "prompt 1 ("),
        (lambda found: found["model"].update(name="my-model"), "made from the local model folder 'my-model'; say"),
    ],
)
def test_what_cannot_be_run_here_is_wrong_use(change, said, script, path, capfd):
    edit(path, change)
    exit_code, _, err = verify(capfd, path)
    assert (exit_code, script.opened) == (2, 0)
    assert said in err


def test_a_local_folder_is_found_by_model(script, path, capfd):
    edit(path, lambda found: found["model"].update(name="my-model"))
    assert verify(capfd, path, "--model", "anywhere")[0] == 0
    assert script.settings[0].model == "anywhere"


def test_a_missing_file_is_wrong_use(script, tmp_path, capfd):
    exit_code, _, err = verify(capfd, tmp_path / "none.json")
    assert (exit_code, script.opened) == (2, 0)
    assert "none.json: expected a receipt file, found nothing" in err
