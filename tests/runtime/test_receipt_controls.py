"""Power of a receipt, over a pool without processes: controls that must differ, hazards that must have occurred."""

import re

import pytest
from leafsum.collectives.control_names import CONTROLS, SPOILED_ROWS
from leafsum.errors import RankError, RankLost, RankMismatch
from leafsum.runtime.commands.main import run
from leafsum.runtime.receipts.arms import Axes
from leafsum.runtime.receipts.controls import ControlPlan, flipped_layer
from runtime.fake_receipts import ARMS, NUM_CONTROLS, NUM_GANGS, install, receipt

ALL_PROMPTS = list(range(1, 9))

RUNS = [name for name in CONTROLS for _ in range(2 if name in SPOILED_ROWS else 1)]
"""The controls of two exchanges, one a gang."""


@pytest.fixture
def script(monkeypatch, tmp_path):
    return install(monkeypatch, tmp_path)


def plan(tp="1,2", top_k=8, **changed):
    texts = {"exchange": "nodes,slots", "placement": "strided", "transport": "gloo", "threads": "2"}
    texts |= {"prefill_chunk": "5,whole", "concurrency": "3", "tp": tp}
    return ControlPlan.of(Axes.parse({**texts, **changed}).arms("cheap"), top_k)


def test_every_control_runs_plainly_at_the_fewest_ranks_with_the_references_settings():
    found = plan(tp="1,5,3,8")
    assert [arm.control for arm in found.arms] == RUNS
    assert found.not_run == ()
    for arm in found.arms:
        assert (arm.tp, arm.placement, arm.transport) == (3, "strided", "gloo")
        assert (arm.threads, arm.prefill_chunk, arm.concurrency, arm.adverse) == (2, 5, 3, False)
    assert len({arm.gang for arm in found.arms}) == len(found.arms)


def test_a_row_is_spoiled_in_every_exchange_of_the_list_and_other_orders_need_none():
    for exchanges in ("nodes,slots", "nodes", "auto", "slots,auto,nodes"):
        found = plan(exchange=exchanges)
        for control in CONTROLS:
            expected = exchanges.split(",") if control in SPOILED_ROWS else ["slots"]
            assert [arm.exchange for arm in found.arms if arm.control == control] == expected


def test_a_model_without_experts_has_partial_sums_of_attention_alone():
    found = plan(top_k=0)
    assert [arm.control for arm in found.arms] == ["rank-chain", "bfloat16-partials"]
    assert all(text.endswith("this model has no experts") for text in found.not_run)


@pytest.mark.parametrize(("expert_layers", "layer"), [((0, 1, 2), 1), ((0,), 0), ((3,), 3), ((1, 3, 5), 3), ((), -1)])
def test_the_flipped_layer_is_the_second_one_with_experts(expert_layers, layer):
    assert flipped_layer(expert_layers) == layer


def test_one_rank_has_the_order_of_its_picks_alone():
    found = plan(tp="1")
    assert [(arm.control, arm.tp, arm.exchange) for arm in found.arms] == [("pick-order", 1, "none")]
    assert len(found.not_run) == len(CONTROLS) - 1
    assert all(text.endswith("it needs more than one rank, and no arm has") for text in found.not_run)


@pytest.mark.parametrize("top_k", [1, 2])
def test_two_picks_have_no_order(top_k):
    found = plan(top_k=top_k)
    assert [arm.control for arm in found.arms] == RUNS[1:]
    (text,) = found.not_run
    assert text.startswith(f"control pick-order: this model picks {top_k} experts a token")
    assert len(plan(top_k=3).arms) == NUM_CONTROLS


def test_controls_that_differ_are_recorded_with_their_prompts(script, capfd):
    exit_code, found, err = receipt(capfd)
    assert (exit_code, err, found["equal"]) == (0, "", True)
    assert [each["control"] for each in found["controls"]] == RUNS
    *differ, flipped = found["controls"]
    assert all((each["differ"], each["same"], each["ended"]) == (ALL_PROMPTS, [], "") for each in differ)
    assert (flipped["differ"], flipped["same"]) == ([], [])
    assert re.match(r"RankMismatch: .* position 14, layer 1: rank 0", flipped["ended"])
    assert {settings.control for settings in script.settings[:NUM_GANGS]} == {"none"}
    assert [settings.control for settings in script.settings[NUM_GANGS:]] == RUNS


@pytest.mark.parametrize(("prompts", "said"), [((0, 2), "prompts 1, 3 do not tell"), ((7,), "prompt 8 does not tell")])
@pytest.mark.parametrize("control", CONTROLS[:-1])
def test_a_prompt_that_a_control_does_not_change_fails_the_receipt(control, prompts, said, script, capfd):
    script.powerless = {control: prompts}
    exit_code, found, err = receipt(capfd)
    assert (exit_code, found["equal"], found["differences"]) == (1, False, [])
    assert f"all hashes are equal, but that proves nothing: {said} {control} from the canonical order" in err
    assert "this receipt proves nothing about" in err
    assert "use longer prompts or more tokens" in err
    records = [each for each in found["controls"] if each["control"] == control]
    assert len(records) == RUNS.count(control)
    for record in records:
        assert record["same"] == [index + 1 for index in prompts]
        assert record["differ"] == [number for number in ALL_PROMPTS if number - 1 not in prompts]
    assert run(["receipt", *ARMS]) == 1
    out = capfd.readouterr().out
    assert f"FAULT: control {control} [tp 2 slots contiguous" in out
    assert f"{NUM_CONTROLS - len(records)} of {NUM_CONTROLS} controls did as they must" in out


def mismatch(text, step=3, rank=1):
    return RankMismatch(text, rank=rank, step=step)


def at(layer, rank=1):
    return mismatch(
        f"ranks disagree at step 3, slot 1, position 4, layer {layer}: rank 0 has; rank {rank} has", rank=rank
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "it ran to its end: ranks do not notice that they differ"),
        (mismatch("ranks disagree at step 3, slot 1: rank 0 has"), "it ended with RankMismatch: ranks disagree"),
        (mismatch("another digest at position 1, layer 1", step=-1), "it ended with RankMismatch: another digest"),
        (at(layer=0), "layer 1 and rank 1, where the bit was flipped; it ended with RankMismatch: ranks disagree"),
        (at(layer=2), "layer 1 and rank 1, where the bit was flipped; it ended with RankMismatch: ranks disagree"),
        (at(layer=1, rank=2), "layer 1 and rank 1, where the bit was flipped; it ended with RankMismatch: ranks"),
        (RankError("boom, position 1, layer 1", rank=1, step=3), "it ended with RankError: boom"),
        (RankLost("rank 1 is gone", role="rank 1", exit_status=-9), "it ended with RankLost: rank 1 is gone"),
    ],
)
def test_a_flipped_bit_must_end_the_run_and_be_named(error, said, script, capfd):
    script.ends = {"flipped-bit": error} if error else {}
    script.notices_flipped_bit = error is not None
    exit_code, found, err = receipt(capfd)
    assert (exit_code, found["equal"]) == (1, False)
    assert "control flipped-bit: expected the run to end with a RankMismatch that names step, position, layer 1" in err
    assert said in err
    assert run(["receipt", *ARMS]) == 1
    assert "FAULT: control flipped-bit" in capfd.readouterr().out


def test_any_other_control_must_not_end_the_run(script, capfd):
    script.ends["rank-chain"] = mismatch("position 1, layer 1")
    exit_code, _, err = receipt(capfd)
    assert exit_code == 1
    assert "control rank-chain: expected other residuals, the run ended with RankMismatch" in err


def test_a_prompt_that_fails_under_a_control_shows_nothing(script, capfd):
    def spoil(settings, index, completion):
        fails = (settings.control, index) == ("dropped-row", 1)
        return completion if not fails else type(completion)(**{**fields(completion), "error": "not finite"})

    script.spoil = spoil
    exit_code, _, err = receipt(capfd)
    assert exit_code == 1
    assert "control dropped-row: expected another residual, prompt 2 failed: not finite" in err


def fields(completion):
    return {name: getattr(completion, name) for name in type(completion).__dataclass_fields__}


def test_controls_can_be_left_out_and_the_receipt_says_so(script, capfd):
    exit_code, found, _ = receipt(capfd, "--no-controls")
    assert (exit_code, found["equal"], found["controls"]) == (0, True, [])
    assert script.opened == NUM_GANGS
    assert "controls: left out by --no-controls" in found["not_run"]
    assert found["not_shown"] == ["power: no control was run"]
    assert run(["receipt", *ARMS, "--no-controls"]) == 0
    assert capfd.readouterr().out.endswith("all equal; not shown: power: no control was run\n")


@pytest.mark.parametrize("name", ["router_ties", "subnormals", "negative_zeros"])
def test_built_in_prompts_that_meet_no_hazard_fail_the_receipt_of_tiny(name, script, capfd):
    script.hazards[name] = 0
    exit_code, found, err = receipt(capfd)
    assert (exit_code, found["equal"]) == (1, False)
    assert f"that proves nothing: expected {name} in at least one arm, found none in any" in err
    assert found["not_shown"] == [f"{name}: no arm has met any"]


@pytest.mark.parametrize("arguments", [("--prompt", "x"), ("--model", "DIR")])
def test_other_prompts_and_models_need_meet_no_hazard(arguments, script, capfd):
    script.hazards = {"router_ties": 1}
    exit_code, found, err = receipt(capfd, *arguments)
    assert (exit_code, err, found["equal"]) == (0, "", True)
    assert found["not_shown"] == ["subnormals: no arm has met any", "negative_zeros: no arm has met any"]
    assert run(["receipt", *ARMS, *arguments]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.endswith("not shown: subnormals: no arm has met any, not shown: negative_zeros: no arm has met any")


@pytest.mark.usefixtures("script")
def test_ties_across_ranks_are_not_asked_of_one_rank(capfd):
    assert run(["receipt", "--tp", "1", "--max-tokens", "6"]) == 0
    assert "all equal; 1 of 1 controls did as they must, not shown: router_ties: no arm has more than one rank" in (
        capfd.readouterr().out
    )


def test_hazards_are_counted_over_all_ranks_of_an_arm(script, capfd):
    """The fake pool counts one for each of its steps on every rank."""
    script.hazards = {"router_ties": 1, "subnormals": 1, "negative_zeros": 1}
    _, found, _ = receipt(capfd)
    for arm in found["arms"]:
        num_ranks, steps = arm["settings"]["tp"], arm["witness"]["steps"]
        ties = steps * num_ranks if num_ranks > 1 else 0
        assert arm["witness"]["hazards"] == {
            "router_ties": ties,
            "subnormals": steps * num_ranks,
            "negative_zeros": steps * num_ranks,
        }
