"""Receipts over a pool without processes: what is equal, what differs and where, and what must have run."""

import json
import os
import re
from dataclasses import replace

import fake_pool
import pytest
from leafsum.runtime.commands.main import run
from leafsum.runtime.receipts import facts, hashes
from leafsum.runtime.receipts.arms import Arm
from leafsum.runtime.receipts.locate import first_difference
from leafsum.runtime.receipts.prompts import BUILT_IN_PROMPTS
from leafsum.runtime.receipts.witness import missing_witnesses
from leafsum.runtime.witness import RankWitness, Witness
from runtime.fake_receipts import ARMS, NUM_CONTROLS, NUM_GANGS, install, receipt


@pytest.fixture
def script(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path)


@pytest.mark.usefixtures("script")
def test_equal_arms_make_a_whole_receipt(capfd):
    exit_code, found, err = receipt(capfd)
    assert (exit_code, err, found["equal"]) == (0, "", True)
    assert {"format", "numerics", "settings_digest", "code", "packages", "machine", "model", "not_run"} <= set(found)
    assert found["numerics"] == 1
    assert found["model"]["name"] == "tiny"
    assert list(found["model"]["files"]) == ["config.json", "tokenizer.json"]
    assert [prompt["text"] for prompt in found["prompts"]] == list(BUILT_IN_PROMPTS)
    assert len(found["arms"]) == 4 + (4 + 4 - 1)
    assert all(re.fullmatch("[0-9a-f]{64}", prompt["logits_sha256"]) for prompt in found["prompts"])
    assert [prompt["layers"]["rows"] for prompt in found["prompts"]] == [
        len(text.encode()) + 6 - 1 for text in BUILT_IN_PROMPTS
    ]
    for arm in found["arms"]:
        num_ranks = arm["settings"]["tp"]
        assert arm["witness"]["exchanges"] == [int(num_ranks > 1)] * num_ranks
        assert "other_prompts" not in arm
    assert len({arm["hashes_sha256"] for arm in found["arms"]}) == 1
    assert (found["failed"], found["faults"], found["differences"], found["not_shown"]) == ([], [], [], [])


def test_a_pool_serves_all_arms_that_it_can_be_changed_to(script, capfd):
    assert receipt(capfd)[0] == 0
    assert script.opened == script.closed == NUM_GANGS + NUM_CONTROLS
    assert all(each.digests and each.layer_digests and each.hazards for each in script.settings)


def test_all_arms_but_the_reference_run_under_adverse_conditions(script, capfd):
    _, found, _ = receipt(capfd)
    reference, *others = script.settings[:NUM_GANGS]
    assert (reference.poison, reference.delay_seed, script.submitted[0]) == (False, 0, list(range(8)))
    assert found["arms"][0]["adverse"] is None
    assert all(each.poison for each in others)
    assert 0 not in {each.delay_seed for each in others}
    assert len({each.delay_seed for each in others}) == len(others)
    orders = script.submitted[1 : len(found["arms"])]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert list(range(8)) not in orders
    assert len({tuple(order) for order in orders}) > 1
    seeds = [arm["adverse"]["delay_seed"] for arm in found["arms"][1:]]
    assert set(seeds) == {each.delay_seed for each in others}
    assert len({arm["adverse"]["order_seed"] for arm in found["arms"][1:]}) == len(orders)


def test_one_wrong_token_is_named_with_arm_prompt_and_position(script, capfd):
    def spoil(settings, index, completion):
        wrong = (settings.tp, settings.exchange, settings.placement, index) == (2, "nodes", "strided", 5)
        return fake_pool.with_token(completion, 3, 7) if wrong else completion

    script.spoil = spoil
    exit_code, found, err = receipt(capfd)
    assert (exit_code, found["equal"]) == (1, False)
    assert (
        "arm [tp 2 nodes strided transport shared threads 1 chunk whole concurrency 4], prompt 6: expected the bits of "
        "arm [tp 1" in err
    )
    assert re.search(r"differs first at token 3: expected id \d+, found id 7", err)
    (difference,) = found["differences"]
    assert (difference["prompt"], difference["first_differing_token"], difference["hashes"]) == (6, 3, ["token_sha256"])
    (other,) = [arm for arm in found["arms"] if not arm["equal"]]
    assert (other["settings"]["exchange"], other["settings"]["placement"]) == ("nodes", "strided")
    assert [(each["prompt"], each["output_token_ids"][3]) for each in other["other_prompts"]] == [(6, 7)]


@pytest.mark.parametrize(
    ("position", "layer", "part"), [(0, 0, "prompt"), (10, 3, "prompt"), (11, 2, "output"), (15, 3, "output")]
)
def test_a_difference_is_located_by_position_and_layer(position, layer, part, script, capfd):
    """The second prompt has 11 tokens, and 6 more make 16 rows."""

    def spoil(settings, index, completion):
        return fake_pool.with_layer(completion, position, layer) if (settings.tp, index) == (2, 1) else completion

    script.spoil = spoil
    exit_code, found, err = receipt(capfd)
    assert exit_code == 1
    assert "prompt 2: expected the bits of arm [tp 1 threads 1 chunk whole concurrency 4]; " in err
    where = f"the residual differs first at position {position}, layer {layer}, in the {part}"
    assert f"the same 6 tokens, but residual_hash and layer_hashes differ; {where}" in err
    assert {(each["position"], each["layer"]) for each in found["differences"]} == {(position, layer)}


@pytest.mark.parametrize("name", ["logits_sha256", "residual_hash"])
def test_equal_tokens_with_other_bits_differ(name, script, capfd):
    def spoil(settings, index, completion):
        return fake_pool.replace(completion, **{name: "0" * 16}) if settings.tp == 2 and index == 0 else completion

    script.spoil = spoil
    exit_code, found, err = receipt(capfd)
    assert exit_code == 1
    assert "prompt 1: expected the bits of arm [tp 1 threads 1 chunk whole concurrency 4]; " in err
    assert f"the output has the same 6 tokens, but {name} differ; no layer's residual differs" in err
    assert all(difference["first_differing_token"] is None for difference in found["differences"])


def test_a_rank_that_exchanged_nothing_fails_an_equal_receipt(script, capfd):
    script.silent_rank = 1
    exit_code, found, err = receipt(capfd)
    assert (exit_code, found["equal"], found["differences"]) == (1, False, [])
    assert "all hashes are equal, but that proves nothing: arm [tp 2 slots contiguous" in err
    assert "rank 1: expected exchanges and bytes both ways, found 0 exchanges" in err


def test_requests_that_never_ran_together_fail_a_receipt(script, capfd):
    script.live_limit = 1
    exit_code, _, err = receipt(capfd)
    assert exit_code == 1
    assert "concurrency 4], expected 4 requests at once, found 1" in err


def test_a_failed_request_fails_a_receipt_with_its_text(script, capfd):
    def spoil(settings, index, completion):
        failed = {"finish_reason": "failed", "text": "", "token_ids": (), "logits_sha256": None, "error": "not finite"}
        return fake_pool.replace(completion, **failed) if (settings.tp, index) == (2, 3) else completion

    script.spoil = spoil
    exit_code, found, err = receipt(capfd, "--no-controls")
    assert (exit_code, found["equal"], found["differences"], found["faults"]) == (1, False, [], [])
    assert re.search(r"arm \[tp 2 [^]]*\], prompt 4 failed: not finite \(7 requests of all arms failed\)", err)
    assert len(found["failed"]) == 7
    for arm in found["arms"]:
        failed = arm["settings"]["tp"] == 2
        assert arm["equal"] is not failed
        assert [prompt["error"] for prompt in arm.get("other_prompts", [])] == ["not finite"] * failed
    assert run(["receipt", *ARMS]) == 1
    assert all("FAILED" in line for line in capfd.readouterr().out.splitlines() if line.startswith("tp 2"))


@pytest.mark.parametrize(("name", "nothing"), [("logits_sha256", None), ("layer_hashes", b"")])
def test_missing_digests_fail_a_receipt(name, nothing, script, capfd):
    script.spoil = lambda _settings, _index, completion: fake_pool.replace(completion, **{name: nothing})
    exit_code, _, err = receipt(capfd)
    assert exit_code == 1
    assert f"prompt 1 has no {name}: digests were not on" in err


@pytest.mark.usefixtures("script")
def test_the_table_is_plain_in_a_pipe(capfd, tmp_path):
    out_file = tmp_path / "receipt.json"
    assert run(["receipt", *ARMS, "--prompt", "x", "--concurrency", "1", "--out", str(out_file)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["arm", "hash", "equal"]
    assert "reference" in lines[1]
    arms = [line for line in lines if line.startswith("tp ")]
    assert len({line.split("concurrency 1")[1].split()[0] for line in arms}) == 1
    controls = lines[1 + len(arms) : -2]
    assert len(controls) == NUM_CONTROLS
    assert all(line.startswith("as it must: control ") for line in controls)
    assert lines[-2].startswith("7 arms, 1 prompts, settings ")
    assert lines[-2].endswith(f"all equal; {NUM_CONTROLS} of {NUM_CONTROLS} controls did as they must")
    assert lines[-1] == f"receipt: {out_file}"
    assert json.loads(out_file.read_text())["equal"] is True


def test_the_table_marks_the_arm_that_differs(script, capfd):
    script.spoil = lambda settings, _index, completion: fake_pool.with_token(completion, 0, settings.tp)
    assert run(["receipt", *ARMS]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert all("DIFFERS" in line for line in lines if line.startswith("tp 2"))
    assert not any("DIFFERS" in line for line in lines if line.startswith("tp 1"))


def rank(number, **changed):
    """What a rank does in a plain arm as ARM."""
    found = RankWitness(
        rank=number,
        pid=100 + number,
        exchanges=1,
        bytes_sent=1,
        bytes_received=1,
        transport={"all_gather": 60, "barrier": 4},
        exchange_mode="slots",
        transport_name="shared",
        num_threads=1,
        poison=False,
    )
    return replace(found, **changed)


def ranks(**changed):
    return {"ranks": (rank(0, **changed), rank(1, **changed))}


WITNESS = Witness(9, 64, 4, (rank(0), rank(1)))
ARM = Arm(tp=2, exchange="slots", placement="strided", transport="shared", threads=1, prefill_chunk=64, concurrency=4)


@pytest.mark.parametrize(
    ("arm", "witness", "text"),
    [
        ({}, {}, None),
        ({"concurrency": 9}, {"most_live_requests": 5}, "expected 9 requests at once, found 5"),
        ({"concurrency": 5}, {"most_live_requests": 5, "most_rows": 70}, None),
        ({"concurrency": 1}, {"most_live_requests": 1}, None),
        ({"prefill_chunk": 0}, {"most_rows": 207}, None),
        ({}, {"steps": 0}, "expected at least one step"),
        ({}, {"most_rows": 63}, "expected a step of at least 64 rows, found at most 63"),
        ({"prefill_chunk": 0}, {"most_rows": 206}, "expected a step of at least 207 rows, found at most 206"),
        (
            {"concurrency": 1},
            {"most_live_requests": 1, "most_rows": 65},
            "no step of more than 64 rows, found one of 65",
        ),
        ({"concurrency": 2}, {}, "expected 2 requests at once, found 4"),
        ({"tp": 3}, {}, r"expected 3 rank processes, found 2 with pids \[100, 101\]"),
        ({}, ranks(pid=7), "expected 2 rank processes"),
        ({}, {"ranks": (rank(0, bytes_sent=0), rank(1))}, "rank 0: .* found 1 exchanges, 0 bytes"),
        ({}, {"ranks": (rank(0), rank(1, exchange_mode="nodes"))}, "rank 1: expected exchange slots, found nodes"),
        ({"exchange": "auto"}, ranks(exchange_mode="nodes"), None),
        ({}, ranks(transport_name="gloo"), "rank 0: expected transport shared, found gloo"),
        ({"threads": 2}, {}, "rank 0: expected 2 threads, found 1"),
        ({"threads": 0}, ranks(num_threads=3), None),
        ({}, ranks(poison=True), "rank 0: expected no poison, found some"),
        ({}, ranks(num_delays=1), "expected no delays, found 2"),
        ({"adverse": True}, ranks(num_delays=1), "rank 0: expected poison, found none"),
        ({"adverse": True}, ranks(poison=True), "expected random delays, found none before 128 collective calls"),
        ({"adverse": True}, ranks(poison=True, transport={"all_gather": 63}), None),
        ({"adverse": True}, ranks(poison=True, num_delays=1), None),
    ],
)
def test_what_an_arm_must_have_been_seen_to_do(arm, witness, text):
    found = missing_witnesses(replace(ARM, **arm), replace(WITNESS, **witness), [1, 40, 207, 64, 65])
    assert found == [] if text is None else re.search(text, "\n".join(found))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            {"exchange_mode": "slots"},
            "arm [tp 2 nodes contiguous transport shared threads 1 chunk whole concurrency 4], ",
        ),
        ({"transport_name": "gloo"}, "rank 0: expected transport none, found gloo"),
        ({"num_threads": 2}, "rank 0: expected 1 threads, found 2"),
        ({"poison": False}, "rank 0: expected poison, found none"),
        ({"num_delays": 0}, "expected random delays, found none before 160 collective calls of all ranks"),
    ],
)
def test_ranks_that_do_not_do_as_the_arm_is_named_fail_an_equal_receipt(others, said, script, capfd):
    script.others = others
    exit_code, found, err = receipt(capfd)
    assert (exit_code, found["equal"], found["differences"]) == (1, False, [])
    assert "all hashes are equal, but that proves nothing: arm [tp " in err
    assert said in err


def test_what_ranks_did_is_recorded(script, capfd):
    _, found, _ = receipt(capfd, "--threads", "2")
    assert script.settings
    reference, *others = [arm["witness"] for arm in found["arms"]]
    assert (reference["transport"], reference["threads"], reference["poison"]) == ("none", 2, False)
    assert (reference["calls"], reference["delays"]) == ([80], [0])
    last = others[-1]
    assert (last["exchange"], last["transport"], last["threads"], last["poison"]) == ("nodes", "shared", 2, True)
    assert (last["calls"], last["delays"]) == ([80, 80], [10, 10])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--concurrency", "16"), "--concurrency 16 needs at least 16 prompts, there are 8"),
        (
            ("--concurrency", "1,3", "--prompt", "x", "--prompt", "y"),
            "--concurrency 3 needs at least 3 prompts, there are 2",
        ),
    ],
)
def test_more_requests_at_once_than_prompts_are_refused_before_the_run(arguments, said, script, capfd):
    assert run(["receipt", *ARMS, *arguments]) == 2
    assert said in capfd.readouterr().err
    assert script.opened == 0


@pytest.mark.parametrize(("num_prompts", "expected"), [(1, {1}), (2, {2, 1}), (5, {4, 1})])
def test_the_default_of_requests_at_once_is_what_the_prompts_can_show(num_prompts, expected, script, capfd):
    _, found, _ = receipt(capfd, *(f"--prompt={number}" for number in range(num_prompts)))
    assert script.opened
    assert {arm["settings"]["concurrency"] for arm in found["arms"]} == expected


@pytest.mark.parametrize("name", ["", "missing/receipt.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(name, script, capfd, tmp_path):
    assert run(["receipt", *ARMS, "--out", str(tmp_path / name)]) == 2
    assert "--out: cannot write" in capfd.readouterr().err
    assert script.opened == 0


def test_a_receipt_that_differs_is_written_too(script, tmp_path):
    script.spoil = lambda settings, _index, completion: fake_pool.with_token(completion, 0, settings.tp)
    assert run(["receipt", *ARMS, "--out", str(tmp_path / "r.json")]) == 1
    assert json.loads((tmp_path / "r.json").read_text())["equal"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "r.json", "tokenizer.json"]


def test_built_in_prompts_reach_past_a_chunk_of_64():
    lengths = [len(prompt.encode()) for prompt in BUILT_IN_PROMPTS]
    assert len(set(lengths)) == 8
    assert {63, 64, 65} <= set(lengths)
    assert (min(lengths), sum(length > 128 for length in lengths)) == (1, 2)


def test_first_difference():
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1,)) == 1


def test_file_hashes_are_cached_by_path_size_and_time(tmp_path, monkeypatch):
    model_dir, cache_dir = tmp_path / "model", tmp_path / "cache"
    model_dir.mkdir()
    weights = model_dir / "model.safetensors"
    weights.write_bytes(b"abc")
    (model_dir / "notes.md").write_text("not part of the model")
    first = hashes.model_files(model_dir, cache_dir)
    assert first == {"model.safetensors": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    reads = []
    whole = hashes.file_sha256
    monkeypatch.setattr(hashes, "file_sha256", lambda path: reads.append(path) or whole(path))
    assert hashes.model_files(model_dir, cache_dir) == first
    assert reads == []
    os.utime(weights, ns=(0, 1))
    assert hashes.model_files(model_dir, cache_dir) == first
    weights.write_bytes(b"abd")
    assert hashes.model_files(model_dir, cache_dir) != first
    assert len(reads) == 2
    (cache_dir / "sha256.json").write_text("broken")
    hashes.model_files(model_dir, cache_dir)
    assert len(reads) == 3


def test_commit_is_unknown_outside_the_packages_own_checkout(monkeypatch, tmp_path):
    assert facts.code_facts()["version"] == "0.1.0"
    monkeypatch.setattr(facts, "_git", lambda _root, *_arguments: str(tmp_path))
    assert facts.code_facts()["commit"] == "unknown"
