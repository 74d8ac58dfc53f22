"""Runs of a coordinator whose ranks are played by the test."""

from typing import Any

import pytest
from leafsum.runtime import gang as gang_module
from runtime.fake_coordinator import FakeCoordinator
from runtime.fake_run import FakeRun


@pytest.fixture
def make_run(tmp_path_factory, monkeypatch):
    """Makes runs. Looking for a cause takes as long as it takes: only a test without one shortens it."""
    monkeypatch.setattr(gang_module, "CAUSE_TIMEOUT_S", 60.0)
    runs = []

    def make(*manners: str, **settings: Any) -> FakeRun:
        runs.append(FakeRun(tmp_path_factory.mktemp("run"), monkeypatch, manners, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def run(make_run) -> FakeRun:
    """One request has its first token, and the second step is under way."""
    run = make_run()
    run.second_step()
    return run


@pytest.fixture
def coordinator(monkeypatch):
    """A conversation whose coordinator is played by the test."""
    coordinator = FakeCoordinator(monkeypatch)
    yield coordinator
    coordinator.close()


@pytest.fixture
def narrow(monkeypatch):
    """The same, of a pool that holds two requests."""
    coordinator = FakeCoordinator(monkeypatch, queue_limit=2)
    yield coordinator
    coordinator.close()
