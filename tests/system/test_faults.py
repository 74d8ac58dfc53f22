"""What the fault table leaves out: runs that shall not recover, programs that die, models that are broken."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from leafsum.errors import ModelError, RankError, RankLost
from leafsum.runtime.pool import WorkerPool
from leafsum.runtime.sampling import SamplingParams
from processes import all_gone, processes_in, wait_until

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize(("victim", "transport"), [("rank 0", "shared"), ("rank 2", "gloo")])
def test_a_killed_rank_ends_a_run_that_shall_not_recover_and_is_named(victim, transport):
    """Of three ranks: both survivors report a broken exchange, and neither is taken for the cause."""
    with WorkerPool(model="tiny", tp=3, transport=transport, recover="never", threads=1, kv_tokens=1024) as pool:
        pids = {f"rank {rank.rank}": rank.pid for rank in pool.witness().ranks}

        def kill_once_decoding(progress):
            if progress.output_tokens == 5:
                os.kill(pids[victim], signal.SIGKILL)

        with pytest.raises(RankLost, match=f"{victim}.*SIGKILL") as caught:
            pool.generate(["x"], LONG, on_progress=kill_once_decoding)
        assert caught.value.role == victim
        assert caught.value.exit_status == -signal.SIGKILL
        assert any("plan" in event for event in caught.value.events)
        assert pool.recoveries == ()
        wait_until(lambda: all_gone(pids.values()), "all processes gone")
        assert not pool.run_folder.exists()


@pytest.fixture
def home(tmp_path_factory) -> Path:
    """Where a program runs and where its run folders go; the path is short, for the sockets' sake."""
    return tmp_path_factory.mktemp("home")


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(home)}


def test_a_program_that_is_killed_leaves_no_process_and_no_folder(home):
    program = """
        from leafsum.runtime.pool import WorkerPool
        from leafsum.runtime.sampling import SamplingParams
        pool = WorkerPool(model="tiny", tp=2, threads=1)
        told = lambda progress: print(progress.output_tokens, flush=True)
        pool.generate(["x"], SamplingParams(max_tokens=1000, ignore_eos=True), on_progress=told)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=home, env=environment(home))
    assert host.stdout is not None
    with host.stdout:
        while (line := host.stdout.readline().strip()) != b"3":
            assert line, "the program ended before its third token"
        assert len(processes_in(home)) == 4
        assert len(list(home.iterdir())) == 1, "the run folder"
        host.kill()
        host.wait()
    wait_until(lambda: not processes_in(home), "no process left")
    assert list(home.iterdir()) == []


def test_a_program_that_is_killed_takes_all_along_though_the_coordinator_is_stopped(tmp_path):
    """A rank ends it: it cannot see by itself that it shall end."""
    program = """
        import time
        from leafsum.runtime.pool import WorkerPool
        pool = WorkerPool(model="tiny", tp=2, threads=1)
        print(pool.coordinator_pid, *(rank.pid for rank in pool.witness().ranks), flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
    assert host.stdout is not None
    with host.stdout:
        coordinator, *ranks = (int(pid) for pid in host.stdout.readline().split())
    os.kill(coordinator, signal.SIGSTOP)
    host.kill()
    host.wait()
    wait_until(lambda: all_gone([coordinator, *ranks]), "no process left")
    assert processes_in(tmp_path) == []


def test_a_pool_that_is_dropped_without_close_leaves_nothing(home):
    program = """
        from leafsum.runtime.pool import WorkerPool
        pool = WorkerPool(model="tiny", tp=2)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, check=True, cwd=home, env=environment(home), timeout=120)
    wait_until(lambda: not processes_in(home), "no process left")
    assert list(home.iterdir()) == []


@pytest.fixture
def broken_model(tmp_path) -> Path:
    """A copy of the demonstration model to break."""
    from leafsum.ranks.tiny import ensure_tiny

    return Path(shutil.copytree(ensure_tiny(), tmp_path / "model"))


def test_a_truncated_weight_file_is_refused_before_any_process_starts(broken_model):
    weights = broken_model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        WorkerPool(model=str(broken_model))


def test_a_request_whose_logits_are_not_finite_fails_alone(broken_model):
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(broken_model / "model.safetensors")
    weights["model.language_model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, broken_model / "model.safetensors", metadata={"format": "pt"})
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    with WorkerPool(model=str(broken_model), tp=2, threads=1, digests=True) as pool:
        first, failed, last = pool.generate([[1, 2, 3], [1, 7, 3], [4, 5]], sampling)
        assert (failed.finish_reason, failed.token_ids) == ("failed", ())
        assert "position 1 are not finite from layer 0" in failed.error
        undisturbed = pool.generate([[1, 2, 3], [4, 5]], sampling)
    assert [first, last] == undisturbed
    assert [(len(each.token_ids), each.error) for each in undisturbed] == [(4, ""), (4, "")]


def test_an_error_while_loading_comes_back_with_the_ranks_number(broken_model, monkeypatch):
    config = json.loads((broken_model / "config.json").read_text())
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "NO_SUCH_LEVEL")  # torch's own set-up raises in the rank
    assert config["model_type"] == "qwen4_exp"
    with pytest.raises(RankError, match=r"rank \d of 2 failed while it started") as caught:
        WorkerPool(model=str(broken_model), tp=2)
    assert "Traceback" in caught.value.traceback_text
