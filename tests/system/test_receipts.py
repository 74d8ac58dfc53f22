"""Receipts over real processes: controls and hazards are met, a broken product is seen, a recorded receipt holds."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from broken_coordinator import break_ranks
from house.checkout import ROOT
from leafsum.collectives.control_names import CONTROLS, SPOILED_ROWS
from leafsum.runtime.commands.main import run
from leafsum.runtime.commands.needs import inspect_model
from leafsum.runtime.models import resolve_model
from leafsum.runtime.receipts.recorded import arm_of, require_consistent
from leafsum.runtime.receipts.seal import from_text
from leafsum.runtime.settings import Settings

RECEIPTS = ROOT / "docs" / "receipts"
SMALL = RECEIPTS / "tiny-small.json"

MAX_TOKENS = 4
PROMPTS = (
    *("--prompt", "Sums of the same rows, more than an indexer lists", "--prompt", "in one order"),
    *("--max-tokens", str(MAX_TOKENS)),
)
LISTS = ("--placement", "contiguous", "--prefill-chunk", "whole", "--concurrency", "2", "--threads", "1")
RECEIPT = ("receipt", "--model", "tiny", "--tp", "1,2", *LISTS, *PROMPTS, "--kv-tokens", "512")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A receipt of a whole product."""
    found: Path = tmp_path_factory.mktemp("receipts") / "receipt.json"
    assert run([*RECEIPT, "--exchange", "slots,nodes", "--out", str(found)]) == 0
    return found


def test_two_short_prompts_have_the_power_to_tell_every_control(path):
    receipt = json.loads(path.read_text())
    assert receipt["equal"]
    assert (receipt["faults"], receipt["not_shown"]) == ([], [])
    *differ, flipped = receipt["controls"]
    expected = [name for name in CONTROLS for _ in range(2 if name in SPOILED_ROWS else 1)]
    assert [each["control"] for each in receipt["controls"]] == expected
    modes = [each["arm"].split()[2] for each in differ if each["control"] in SPOILED_ROWS]
    assert modes == ["slots", "nodes"] * 2
    assert [(each["differ"], each["same"], each["ended"]) for each in differ] == [([1, 2], [], "")] * len(differ)
    assert re.match(r"RankMismatch: run \w+: ranks disagree at step 1, .*position \d+, layer \d+: ", flipped["ended"])


def test_arms_are_adverse_and_count_what_inspect_foretells(path):
    receipt = json.loads(path.read_text())
    plain, *others = receipt["arms"]
    assert (plain["settings"]["tp"], plain["adverse"], plain["witness"]["bytes_sent"]) == (1, None, [0])
    assert (plain["witness"]["transport"], plain["witness"]["poison"], plain["witness"]["delays"]) == (
        "none",
        False,
        [0],
    )
    needs = inspect_model(resolve_model("tiny"), Settings(tp=2))
    num_rows = sum(prompt["layers"]["rows"] for prompt in receipt["prompts"])
    num_decided = 2 * MAX_TOKENS
    for arm in others:
        assert (arm["settings"]["tp"], arm["adverse"]["poison"], arm["witness"]["most_live_requests"]) == (2, True, 2)
        assert all(count > 0 for count in arm["witness"]["hazards"].values())
        did = {name: arm["witness"][name] for name in ("exchange", "transport", "threads", "poison")}
        assert did == {"exchange": arm["settings"]["exchange"], "transport": "shared", "threads": 1, "poison": True}
        # one call in eight, at random, but with a seed of the arm's own
        delays = zip(arm["witness"]["delays"], arm["witness"]["calls"], strict=True)
        assert all(0 < num_delays < num_calls / 2 for num_delays, num_calls in delays)
        at_most = num_rows * needs.exchanges[arm["settings"]["exchange"]].bytes_sent_per_token
        # with digests, whole rows of logits travel too
        at_most += num_decided * needs.spec.vocab_size * 4
        assert 0.5 * at_most < arm["witness"]["bytes_sent"][0] <= at_most


SEEN = {
    "wrong tree": r"expected the bits of arm \[tp 1 .*; the residual differs first at position 0, layer 0, in the",
    "unowned expert": r"prompt \d failed: values of position \d+ are not finite from layer \d on",
    "stale page": r"prompt 1 failed: values of position 0 are not finite from layer 3 on",
    "dropped row": r"prompt \d failed: values of position \d+ are not finite from layer \d on",
}


@pytest.mark.parametrize(("defect", "exchange"), [*((defect, "slots") for defect in SEEN), ("dropped row", "nodes")])
def test_a_broken_product_is_seen(defect, exchange, path, monkeypatch, capfd):
    break_ranks(monkeypatch, defect)
    assert run(["verify", str(path), "--tp", "2", "--exchange", exchange]) == 1
    out, err = capfd.readouterr()
    assert re.search(SEEN[defect], err)
    assert re.search(f"^tp 2 {exchange} .* (DIFFERS|FAILED) ", out, re.MULTILINE)


NOT_AS_NAMED = (
    r"rank 0: expected exchange nodes, found slots",
    r"rank 1: expected transport shared, found gloo",
    r"rank 0: expected 2 threads, found 1",
    r"rank 1: expected poison, found none",
    r"expected random delays, found none before \d+ collective calls of all ranks",
)


def test_an_arm_that_does_not_do_what_it_is_named_for_is_seen(path, monkeypatch, capfd):
    break_ranks(monkeypatch, "nothing as asked")
    arm = ("--tp", "2", "--exchange", "nodes", "--threads", "2", "--prefill-chunk", "1")
    assert run(["verify", str(path), *arm, "--json"]) == 1
    out, err = capfd.readouterr()
    assert "all hashes are equal, but that proves nothing: arm [tp 2 nodes contiguous" in err
    found = json.loads(out)
    assert (found["arms"][0]["equal"], found["differences"], found["failed"]) == (True, [], [])
    for text in NOT_AS_NAMED:
        assert any(re.search(text, fault) for fault in found["faults"]), text


def test_a_receipt_of_a_broken_product_fails(monkeypatch, capfd, tmp_path):
    break_ranks(monkeypatch, "chain of partials")
    out = tmp_path / "receipt.json"
    assert run([*RECEIPT, "--exchange", "slots", "--no-controls", "--out", str(out)]) == 1
    printed, err = capfd.readouterr()
    assert "0 failed requests, 2 differences, 0 faults" in printed
    assert re.search(r"prompt 1: expected the bits of arm .*; the residual differs first at position \d+, layer 0", err)
    receipt = json.loads(out.read_text())
    assert not receipt["equal"]
    assert [(each["prompt"], each["layer"]) for each in receipt["differences"]] == [(1, 0), (2, 0)]


def test_a_recorded_receipt_holds_here(capfd):
    assert run(["verify", str(SMALL)]) == 0
    assert "compared with the receipt: all equal" in capfd.readouterr().out


def test_the_recorded_matrix_is_whole_and_agrees_with_itself():
    """tp x exchange x placement x chunk x concurrency x threads, in one file a rank count; one machine's, AVX-512."""
    receipts = [from_text(path.read_text(), str(path)) for path in sorted(RECEIPTS.glob("tiny-full-*.json"))]
    hashes = {json.dumps([prompt.residual_hash for prompt in receipt.prompts]) for receipt in receipts}
    assert len(hashes) == 1
    arms = {arm_of(arm) for receipt in receipts for arm in receipt.arms if arm.settings.tp > 1}
    crossed = itertools.product(
        (2, 3, 4, 5, 8), ("slots", "nodes"), ("contiguous", "strided", "random"), (0, 1, 5, 64), (1, 4), (1, 2)
    )
    assert {(a.tp, a.exchange, a.placement, a.prefill_chunk, a.concurrency, a.threads) for a in arms} == set(crossed)
    for receipt in receipts:
        require_consistent(receipt)
        assert receipt.equal
        assert (receipt.not_shown, receipt.faults, receipt.code["changed"]) == ((), (), False)


def test_the_page_shows_the_recorded_token_hashes():
    prompts = json.loads(SMALL.read_text())["prompts"]
    rows = [f"| {json.dumps(each['text'], ensure_ascii=False)} | `{each['token_sha256']}` |" for each in prompts]
    page = (RECEIPTS / "README.md").read_text()
    assert "\n".join(rows) in page, "expected these rows in the page:\n" + "\n".join(rows)
