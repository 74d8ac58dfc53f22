"""Ranks that lie or speak out of turn: the run ends, the rank is named, and no token of the step leaves.

Every test drives a whole coordinator; ranks are played over the real socket, the processes behind them are stand-ins.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import zmq
from leafsum.errors import ProtocolError, RankMismatch
from leafsum.ranks.control import open_socket
from leafsum.ranks.messages import Plan, Run, RunResult, StepResult, Traffic, encode
from leafsum.runtime.agreement import agreed
from leafsum.runtime.messages import Advance, Finished
from processes import all_gone, wait_until
from runtime.fake_run import FIRST_TOKEN, SECOND_PLAN, changed

# Honest ranks


def test_honest_ranks_serve_a_request_to_its_end(run):
    run.answer()
    assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(42,))
    for step in range(3, 9):
        for rank in run.ranks:
            plan = rank.hear_plan()
            assert plan.step == step
            rank.say(rank.result(plan))
        assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(40 + step,))
    residual_hash = -sum(range(1, 9)) % 2**64
    assert run.hear() == Finished(
        request_id=0,
        reason="length",
        num_output_tokens=8,
        residual_hash=residual_hash,
        logits_sha256="ab" * 32,
        error="",
        num_ranks=3,
    )
    run.close_pool()
    assert run.outcome() == [FIRST_TOKEN]
    assert all_gone(child.pid for child in run.children)
    assert [child.exit_status() for child in run.children] == [0, 0, 0]
    assert not run.folder.path.exists()


def test_no_token_leaves_before_the_last_rank_has_answered(run):
    run.answer(1)
    assert not run.pool.poll(300)
    run.ranks[1].say(run.ranks[1].result(SECOND_PLAN))
    assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(42,))


# Lies


def in_run(**changes) -> Callable[[StepResult], StepResult]:
    return lambda result: changed(result, runs=(changed(result.runs[0], **changes),))


LIES: dict[str, Callable[[StepResult], StepResult]] = {
    "token": in_run(token_id=43),
    "no token": in_run(token_id=-1),
    "residual hash": in_run(residual_hash=2**64 - 3),
    "one bit of the residual hash": in_run(residual_hash=(2**64 - 2) ^ (1 << 63)),
    "logits": in_run(logits_sha256="ab" * 31 + "ac"),
    "bad layer": in_run(bad_layer=0),
    "bad position": in_run(bad_position=2),
    "layer hashes": in_run(layer_hashes=bytes(8)),
    "slot": in_run(slot=1),
    "step before": lambda result: changed(result, step=1),
    "step after": lambda result: changed(result, step=3),
    "no runs": lambda result: changed(result, runs=()),
    "a run more": lambda result: changed(result, runs=result.runs * 2),
}


@pytest.mark.parametrize("liar", [1, 2])
@pytest.mark.parametrize("lie", LIES)
def test_a_rank_that_lies_ends_the_run_and_is_named(run, lie, liar):
    run.answer(liar)
    run.ranks[liar].say(LIES[lie](run.ranks[liar].result(SECOND_PLAN)))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankMismatch
    assert (error.rank, error.step) == (liar, 2)
    assert f"rank {liar}" in str(error)
    assert "step 2" in str(error)


@pytest.mark.parametrize("lie", ["slot", "step before", "step after", "no runs", "a run more"])
def test_a_result_that_is_none_of_the_plan_is_refused_even_where_all_agree(run, lie):
    for rank in run.ranks:
        rank.say(LIES[lie](rank.result(SECOND_PLAN)))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankMismatch
    assert error.step == 2


def test_a_difference_names_both_sides(run):
    run.answer(2)
    run.ranks[2].say(in_run(token_id=77, residual_hash=10)(run.ranks[2].result(SECOND_PLAN)))
    text = str(run.error(after=[FIRST_TOKEN]))
    for part in ("slot 0", "token 42", "fffffffffffffffe", "token 77", "000000000000000a"):
        assert part in text


HASHES = np.arange(6, dtype="<u8").reshape(3, 2)
"""Of three rows after two layers."""


@pytest.mark.parametrize(
    ("changed_places", "where"),
    [
        ([(0, 0)], ", position 7, layer 0"),
        ([(2, 1)], ", position 9, layer 1"),
        ([(2, 0), (1, 1)], ", position 8, layer 1"),
        ([], ""),
    ],
)
def test_a_difference_is_located_by_its_first_row_and_that_rows_first_layer(changed_places, where):
    theirs = HASHES.copy()
    for place in changed_places:
        theirs[place] ^= 1 << 63
    plan = Plan(step=4, releases=(), admits=(), runs=(Run(slot=1, start=7, token_ids=(5, 6, 7), decides=False),))
    found = [
        RunResult(1, -1, residual_hash, -1, -1, "", hashes.tobytes())
        for residual_hash, hashes in ((1, HASHES), (2, theirs))
    ]
    traffic = Traffic(calls={}, bytes_sent=0, bytes_received=0, num_exchanges=0)
    results = [StepResult(rank=rank, step=4, runs=(run,), traffic=traffic) for rank, run in enumerate(found)]
    with pytest.raises(RankMismatch, match=f"at step 4, slot 1{where}: rank 0 has token"):
        agreed(plan, results, "run")


# Words out of turn


def test_a_rank_that_answers_twice_is_refused(run):
    run.ranks[1].say(run.ranks[1].result(SECOND_PLAN))
    run.ranks[1].say(run.ranks[1].result(SECOND_PLAN))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)


def test_a_second_answer_after_the_step_is_not_taken_for_the_next(run):
    run.answer()
    assert isinstance(run.hear(), Advance)
    stale = run.ranks[1].result(SECOND_PLAN)
    for rank in run.ranks:
        plan = rank.hear_plan()
        rank.say(stale if rank.rank == 1 else rank.result(plan))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is RankMismatch
    assert (error.rank, error.step) == (1, 3)


@pytest.mark.parametrize("word", ["hello", "ready", "result"])
def test_a_word_while_idle_ends_the_run(make_run, word):
    run = make_run()
    run.start()
    rank = run.ranks[1]
    rank.say({"hello": rank.hello, "ready": rank.ready, "result": lambda: rank.result(SECOND_PLAN)}[word]())
    error = run.error(after=[])
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)
    assert "idle" in str(error)


@pytest.mark.parametrize("word", ["hello", "ready"])
def test_an_answer_of_another_kind_is_refused(run, word):
    run.answer(1)
    rank = run.ranks[1]
    rank.say(rank.hello() if word == "hello" else rank.ready())
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is ProtocolError
    assert "StepResult" in str(error)
    assert word.capitalize() in str(error)


def test_a_rank_that_speaks_as_another_is_refused(run):
    run.answer(1, 2)
    run.ranks[1].say(run.ranks[2].result(SECOND_PLAN))
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is ProtocolError
    assert re.fullmatch(r"rank 1 \(pid \d+\) at step 2: it speaks as rank 2", str(error))


GARBAGE = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "deep nesting": b"\x91" * 5000,
    "an empty map": b"\x80",
    "a message that only coordinators send": encode(SECOND_PLAN),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_the_run_and_its_speaker_is_named(run, name):
    run.answer(1)
    run.ranks[1].say_bytes(GARBAGE[name])
    error = run.error(after=[FIRST_TOKEN])
    assert type(error) is ProtocolError
    assert "rank 1" in str(error)


def test_a_stranger_is_not_heard(run, caplog):
    """Who can reach the socket is this user: no rank is lost for it, and no request is suspected."""
    run.answer(1)
    with open_socket(run.context, zmq.DEALER, run.folder.ranks_socket(0), bind=False, identity=b"other:1") as stranger:
        stranger.send(b"")
        wait_until(lambda: "event=stranger" in caplog.text, "the stranger's word came")
    assert "other:1" in caplog.text
    run.ranks[1].say(run.ranks[1].result(SECOND_PLAN))
    assert run.hear() == Advance(request_id=0, num_prompt_rows=0, token_ids=(42,))
