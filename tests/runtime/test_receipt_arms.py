"""The arms of a receipt: which crossings are made, and which share a gang."""

from dataclasses import replace

import pytest
from leafsum.errors import ConfigError
from leafsum.runtime.commands.main import run
from leafsum.runtime.receipts.arms import ARM_FIELDS, NOT_ASKED, Axes, gangs_of
from leafsum.runtime.settings import RULES, Settings, flag_of

TEXTS = {
    "tp": "1,2,3",
    "exchange": "slots,nodes",
    "placement": "contiguous,strided,random:5",
    "transport": "gloo",
    "threads": "1,2",
    "prefill_chunk": "1,5,64,whole",
    "concurrency": "1,4",
}


def arms(cross="cheap", **changed):
    return Axes.parse({**TEXTS, **changed}).arms(cross)


def test_the_reference_is_the_first_of_everything():
    first = arms()[0]
    assert [getattr(first, name) for name in ARM_FIELDS] == [1, "none", "none", "none", 1, 1, 1]
    assert [getattr(arms(tp="2,1")[0], name) for name in ARM_FIELDS] == [2, "slots", "contiguous", "gloo", 1, 1, 1]


def test_cheap_crosses_travel_and_cuts_apart():
    found = arms()
    for tp in (2, 3):
        travel = {(arm.exchange, arm.placement) for arm in found if arm.tp == tp and arm.threads == 1}
        assert len(travel) == 2 * 3
        cuts = {
            (arm.prefill_chunk, arm.concurrency)
            for arm in found
            if (arm.tp, arm.exchange, arm.placement, arm.threads) == (tp, "slots", "contiguous", 1)
        }
        assert cuts == {(chunk, concurrency) for chunk in (1, 5, 64, 0) for concurrency in (1, 4)}
        assert sum(arm.threads == 2 for arm in found if arm.tp == tp) == 1
    assert len(found) == (8 + 1) + 2 * (6 + 8 - 1 + 1)


def test_full_is_every_combination_once_and_tp_1_has_no_travel():
    found = arms("full")
    assert len(set(found)) == len(found) == 2 * 4 * 2 + 2 * (2 * 3 * 2 * 4 * 2)
    assert {(arm.exchange, arm.placement, arm.transport) for arm in found if arm.tp == 1} == {("none",) * 3}


def test_transports_are_crossed_with_the_first_of_all_else_or_with_everything():
    cheap, full = arms(transport="gloo,shared"), arms("full", transport="gloo,shared")
    assert len(cheap) == len(arms()) + 2
    assert sum(arm.transport == "shared" for arm in full) == sum(arm.transport == "gloo" for arm in full)


def test_all_arms_but_the_reference_are_adverse_and_need_other_ranks_than_it():
    reference, *others = arms("full")
    assert (reference.adverse, reference.delay_seed) == (False, 0)
    assert all(arm.adverse for arm in others)
    assert [gang for gang in gangs_of([reference, *others]) if reference in gang] == [[reference]]
    assert replace(reference, adverse=True) not in others
    seeds = {arm.gang: arm.delay_seed for arm in others}
    assert 0 not in seeds.values()
    assert len(set(seeds.values())) == len(seeds)
    assert all(arm.adverse for arm in Axes.parse(TEXTS).adverse_arms())
    assert len(Axes.parse(TEXTS).adverse_arms()) == len(others) + 1


@pytest.mark.parametrize("is_full", [False, True])
def test_arms_of_one_gang_lie_side_by_side(is_full):
    found = arms("full" if is_full else "cheap", tp="3,1,2")
    gangs = gangs_of(found)
    assert len({gang[0].gang for gang in gangs}) == len(gangs)
    assert [arm for gang in gangs for arm in gang] == found
    assert [gang[0].tp for gang in gangs] == sorted((gang[0].tp for gang in gangs), key=[3, 1, 2].index)


def test_an_arm_becomes_settings_with_digests():
    base = Settings(dtype="float32", exchange="auto")
    arm = replace(arms()[-1], control="rank-chain")
    assert arm.settings(base).to_dict() == {
        **base.to_dict(),
        **{n: getattr(arm, n) for n in ARM_FIELDS},
        "digests": True,
        "layer_digests": True,
        "hazards": True,
        "poison": True,
        "delay_seed": arm.delay_seed,
        "control": "rank-chain",
        "recover": "never",
    }
    alone = arms()[0].settings(base)
    assert (alone.tp, alone.exchange, alone.placement, alone.digests) == (1, "auto", "contiguous", True)
    assert (alone.poison, alone.delay_seed, alone.control) == (False, 0, "none")


def test_what_is_the_same_in_every_arm_is_no_flag(capfd):
    assert {*NOT_ASKED} < {*RULES}
    for name in NOT_ASKED:
        assert run(["receipt", flag_of(name)]) == 2
        assert f"No such option '{flag_of(name)}'" in capfd.readouterr().err


def test_names_tell_arms_apart():
    found = arms("full")
    assert len({arm.name for arm in found}) == len(found)
    assert arms()[0].name == "tp 1 threads 1 chunk 1 concurrency 1"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"tp": ""}, "--tp: expected an integer"),
        ({"exchange": "slots,tree"}, "--exchange: expected one of auto, slots, nodes, found 'tree'"),
        ({"prefill_chunk": "whole,0"}, "--prefill-chunk: expected different values"),
    ],
)
def test_wrong_lists_are_refused(changed, text):
    with pytest.raises(ConfigError, match=text):
        arms(**changed)
