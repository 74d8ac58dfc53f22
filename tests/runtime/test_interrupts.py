"""Ctrl-C while `leafsum generate` generates: the first drains, the second ends. Over a pool without processes."""

import json
import os
import signal
import threading

import fake_pool
import pytest
from leafsum.runtime.commands import interrupts
from leafsum.runtime.commands.main import run

GENERATE = ("generate", "--model", "tiny", "--max-tokens", "4", "--prompt", "Once", "--prompt", "zwei")
TOLD = f"leafsum: {interrupts.DRAINING}\n"


@pytest.fixture
def script(monkeypatch):
    script = fake_pool.install(monkeypatch)
    script.under_way = lambda: None if script.num_drains else interrupt()
    script.spoil = lambda _settings, index, completion: cancelled(completion) if index == 1 else completion
    return script


@pytest.fixture(autouse=True)
def own_handler():
    """Each test begins with Python's own, and leaves it behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def cancelled(completion):
    return fake_pool.replace(completion, token_ids=(), text="", finish_reason="cancelled")


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_the_first_one_drains_and_the_results_are_written(stream, script, capfd):
    assert run([*GENERATE, *stream, "--json"]) == 130
    out, err = capfd.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    found = [each.get("completion") for each in found if "completion" in each] if stream else found
    assert [each["finish_reason"] for each in found] == ["length", "cancelled"]
    assert err == f"{TOLD}leafsum: interrupted: 1 of 2 prompts were cancelled before they began\n"
    assert (script.num_drains, script.opened, script.closed) == (1, 1, 1)


def test_as_text_what_was_cancelled_is_counted_and_not_written(script, capfd):
    assert run(GENERATE) == 130
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line.startswith("---")] == ["--- prompt 1 of 2 ---"]
    assert err.endswith("interrupted: 1 of 2 prompts were cancelled before they began\n")
    assert script.closed == 1


def test_one_that_failed_is_told_as_well(script, capfd):
    spoil = script.spoil
    failed = {"finish_reason": "failed", "error": "not finite"}
    script.spoil = lambda settings, index, completion: spoil(
        settings, index, completion if index else fake_pool.replace(completion, **failed)
    )
    assert run(GENERATE) == 130
    assert capfd.readouterr().err.endswith("before they began; 1 of 2 prompts failed: prompt 1: not finite\n")


@pytest.mark.parametrize("command", [GENERATE, ("demo",)])
def test_the_second_one_ends_at_once(command, script, capfd, monkeypatch):
    monkeypatch.setattr(interrupts, "ONE_PRESS_S", -1.0)
    script.under_way = lambda: (interrupt(), interrupt())
    assert run(command) == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the end of a command ignores what comes after it
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"{TOLD}\nleafsum: interrupted\n")
    assert (script.num_drains, script.closed) == (1, 1)


def test_one_press_that_comes_twice_is_one(script, capfd):
    """Of the terminal, and of a program around this one that passes it on."""
    script.under_way = lambda: None if script.num_drains else (interrupt(), interrupt())
    assert run([*GENERATE, "--json"]) == 130
    assert len(capfd.readouterr().out.splitlines()) == 2


def test_the_demonstration_ends_after_the_text_that_was_under_way(script, capfd):
    assert run(["demo"]) == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 2
    assert out.splitlines()[1].startswith("tp 1: text         ")
    assert (script.num_drains, script.opened, script.closed) == (1, 1, 1)
    assert err.endswith("leafsum: interrupted\n")


def test_where_none_comes_the_handler_is_there_while_prompts_are_under_way_and_gone_after_that(script, capfd):
    seen = []
    script.under_way = lambda: seen.append(signal.getsignal(signal.SIGINT))
    script.spoil = lambda _settings, _index, completion: completion
    assert run(GENERATE) == 0
    assert (len(seen), seen[0] is signal.default_int_handler, capfd.readouterr().err) == (1, False, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_before_generation_begins_ends_at_once(script, capfd, monkeypatch):
    start = fake_pool.FakePool.__init__

    def interrupted_start(self, settings):
        start(self, settings)
        interrupt()

    monkeypatch.setattr(fake_pool.FakePool, "__init__", interrupted_start)
    assert run(GENERATE) == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capfd.readouterr().err.strip() == "leafsum: interrupted"
    assert script.num_drains == 0


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_handler_that_is_not_pythons_own_stays(handler, script, capfd):
    """A shell's background job ignores Ctrl-C; a program that runs a command has its reasons."""
    seen = []
    script.under_way = lambda: seen.append(signal.getsignal(signal.SIGINT))
    script.spoil = lambda _settings, _index, completion: completion
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert run(GENERATE) == 0
        assert (seen, signal.getsignal(signal.SIGINT)) == ([handler], handler)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""


def test_in_another_thread_than_the_main_one_no_handler_is_installed(script, capfd):
    seen = []
    script.under_way = lambda: seen.append(signal.getsignal(signal.SIGINT))
    script.spoil = lambda _settings, _index, completion: completion
    exit_codes = []
    thread = threading.Thread(target=lambda: exit_codes.append(run(GENERATE)))
    thread.start()
    thread.join(60)
    assert (exit_codes, seen) == ([0], [signal.default_int_handler])
    assert capfd.readouterr().err == ""
