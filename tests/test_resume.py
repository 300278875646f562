"""A run that was cut anywhere ends as an undisturbed one, to the last bit; another experiment does not pass for it."""

import os
import random
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from runs import assert_same_run, metrics, sampled, weights

from callbacks.run_summary import RunSummary
from callbacks.verifiers.number import Number
from datamodules.engines.transformers import TransformersEngine
from datamodules.snapshots import SnapshotStore
from modules.policy import Policy
from train import train

SmallRun = Callable[..., DictConfig]
PREFETCH = ["datamodule.prefetch=true", "engine=transformers_process", "num_threads=1"]


def check_cut(small_run: SmallRun, directory: Path, settings: list[str], cut: int, rounds: int) -> None:
    """Run some rounds at once, and in two parts elsewhere and in place; all must be the same."""
    whole, first, second = (directory / name for name in ("whole", "first", "second"))
    train(small_run(*settings, f"rounds={rounds}", directory=whole))
    train(small_run(*settings, f"rounds={cut}", directory=first))
    checkpoint = first / "checkpoints" / "last.ckpt"
    train(small_run(*settings, f"rounds={rounds}", f"ckpt_path={checkpoint}", directory=second))
    torch.testing.assert_close(weights(second), weights(whole), rtol=0.0, atol=0.0)
    assert metrics(second) == metrics(whole)
    assert [row for row in sampled(second) if row["round"] >= cut] == [r for r in sampled(whole) if r["round"] >= cut]
    train(small_run(*settings, f"rounds={rounds}", "resume=true", directory=first))
    assert_same_run(first, whole)


@settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lag=st.integers(0, 4),
    replay=st.integers(1, 3),
    passes=st.integers(1, 2),
    cut=st.integers(1, 3),
    curation=st.sampled_from(["none", "anna_karenina", "balance"]),
)
def test_a_run_in_two_parts_is_the_run_in_one(
    lag: int, replay: int, passes: int, cut: int, curation: str, small_run: SmallRun, tmp_path: Path
) -> None:
    chosen = [f"lag={lag}", f"datamodule.replay.rounds={replay}", f"datamodule.passes_per_round={passes}"]
    directory = tmp_path / f"{lag}-{replay}-{passes}-{cut}-{curation}"
    check_cut(small_run, directory, [*chosen, f"curation={curation}"], cut, rounds=4)


@pytest.mark.parametrize("lag", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_so_it_is_while_rounds_are_made_ahead(lag: int, small_run: SmallRun, tmp_path: Path) -> None:
    check_cut(small_run, tmp_path, [f"lag={lag}", *PREFETCH], 2, rounds=4)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_ten_rounds_equal_five_and_five(lag: int, small_run: SmallRun, tmp_path: Path) -> None:
    check_cut(small_run, tmp_path, [f"lag={lag}"], 5, rounds=10)


def in_child(function: Callable[[], Any]) -> int:
    """Run a function in a forked process; return its exit status, negative for the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at(owner: Any, name: str, count: int, *, after: bool) -> None:
    """Have the process killed in the `count`-th call of a function, before or after its work."""
    original, calls = getattr(owner, name), 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


PHASES = {
    "sampling": (TransformersEngine, "_generate_together", 4, False),
    "scoring": (Number, "__call__", 100, False),
    "storing": (pq.ParquetWriter, "write_table", 2, True),  # written, not yet under its name
    "publishing": (Policy, "save_pretrained", 3, True),
    "pruning": (SnapshotStore, "prune", 2, True),
    "training": (torch.optim.AdamW, "step", 5, True),
    "checkpointing": (torch, "save", 2, True),
    "first publishing": (Policy, "save_pretrained", 1, False),
    "summarizing": (RunSummary, "_summary", 1, False),
}
SETTINGS = ["lag=1", "rounds=4", "datamodule.replay.rounds=2", "trainer.log_every_n_steps=3"]


@pytest.fixture
def undisturbed(small_run: SmallRun, tmp_path: Path) -> Path:
    train(small_run(*SETTINGS, directory=tmp_path / "whole"))
    return tmp_path / "whole"


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_any_phase_costs_no_bit(phase: str, undisturbed: Path, small_run: SmallRun, tmp_path: Path) -> None:
    owner, name, count, after = PHASES[phase]

    def killed() -> None:
        kill_at(owner, name, count, after=after)
        train(small_run(*SETTINGS))

    assert in_child(killed) == -signal.SIGKILL
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("rollouts/*.parquet")}
    train(small_run(*SETTINGS, "resume=true"))
    assert_same_run(tmp_path / "run", undisturbed)
    assert {path: path.stat().st_mtime_ns for path in stored} == stored  # what was paid for is not sampled again
    assert len(list((tmp_path / "run").glob("checkpoints/round-*.ckpt"))) == 1
    assert not list((tmp_path / "run").rglob(".writing-*"))


def test_a_kill_while_the_next_round_is_made_ahead_costs_no_bit(
    undisturbed: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    def killed() -> None:
        kill_at(torch.optim.AdamW, "step", 5, after=True)
        train(small_run(*SETTINGS, *PREFETCH))

    assert in_child(killed) == -signal.SIGKILL
    train(small_run(*SETTINGS, *PREFETCH, "resume=true"))
    assert_same_run(tmp_path / "run", undisturbed)


def test_twenty_kills_at_random_moments_cost_no_bit(undisturbed: Path, small_run: SmallRun, tmp_path: Path) -> None:
    generator = random.Random(0)

    def killed(seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        is_begun = (tmp_path / "run" / "config.yaml").is_file()
        train(small_run(*SETTINGS, f"resume={is_begun}"))

    statuses = [in_child(lambda: killed(generator.uniform(0.05, 1.5))) for _ in range(20)]
    ended = (tmp_path / "run" / "summary.json").is_file()
    assert set(statuses) <= ({-signal.SIGKILL, 0, 1} if ended else {-signal.SIGKILL})  # 1: it refuses to start again
    if not ended:
        is_begun = (tmp_path / "run" / "config.yaml").is_file()
        train(small_run(*SETTINGS, f"resume={is_begun}"))
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_restart_before_the_first_checkpoint_of_a_run_that_goes_on_elsewhere_starts_from_there_again(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_run(*SETTINGS, "rounds=2", directory=tmp_path / "a"))
    going_on = [*SETTINGS, f"ckpt_path={tmp_path}/a/checkpoints/last.ckpt"]
    train(small_run(*going_on, directory=tmp_path / "whole"))

    def killed() -> None:
        kill_at(torch.optim.AdamW, "step", 1, after=True)
        train(small_run(*going_on))

    assert in_child(killed) == -signal.SIGKILL
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(small_run(*going_on))
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "whole"), rtol=0.0, atol=0.0)


def test_a_checkpoint_is_not_continued_where_another_run_or_a_newer_checkpoint_is(
    small_run: SmallRun, tmp_path: Path
) -> None:
    train(small_run("rounds=1", directory=tmp_path / "a"))
    train(small_run("rounds=3", directory=tmp_path / "b"))
    other = tmp_path / "a" / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="already holds a run"):
        train(small_run("rounds=3", f"ckpt_path={other}", directory=tmp_path / "b"))
    older = tmp_path / "b" / "checkpoints" / "round-000000.ckpt"
    older.write_bytes(b"older")
    with pytest.raises(ValueError, match="is newer; to go back"):
        train(small_run("rounds=3", f"ckpt_path={older}", directory=tmp_path / "b"))


def test_what_is_not_there_is_not_resumed(small_run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ckpt_path: .* is not there"):
        train(small_run(f"ckpt_path={tmp_path / 'none.ckpt'}"))
    with pytest.raises(ValueError, match="leave out ckpt_path"):
        train(small_run(f"ckpt_path={tmp_path / 'none.ckpt'}", "resume=true"))
    with pytest.raises(ValueError, match=r"resume=true: .* holds no run; correct hydra\.run\.dir"):
        train(small_run("resume=true", "rounds=1"))
