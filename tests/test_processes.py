"""A job of Hydra's that several processes train, alone and in a sweep, with whatever launches it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf
from runs import losses, small

from conf.processes import _end_with_me, _meeting, run_ranks
from train import train

ROOT = Path(__file__).parents[1]
SmallRun = Callable[..., DictConfig]


def program(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *arguments]


@pytest.mark.parametrize("launcher", ["basic", pytest.param("submitit_local", marks=pytest.mark.slow)])
def test_a_sweep_trains_each_job_in_several_processes(launcher: str, small_run: SmallRun, tmp_path: Path) -> None:
    if launcher != "basic":
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    settings = ["rounds=2", "lag=1"]
    sweep = ["objective=topr,asymre", f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = subprocess.run(
        program("-m", *small(*settings), "trainer=ddp", "trainer.devices=2", *sweep),
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for number, objective in enumerate(("topr", "asymre")):
        alone, two = tmp_path / objective, tmp_path / "sweep" / str(number)
        train(small_run(*settings, f"objective={objective}", directory=alone))
        assert losses(two) == pytest.approx(losses(alone), abs=1e-5)
        assert OmegaConf.load(two / "config.yaml").trainer.devices == 2
        assert "2 processes" in (two / "train.log").read_text()


def test_the_result_of_several_processes_reaches_the_job_that_started_them(small_run: SmallRun, tmp_path: Path) -> None:
    cfg = small_run("rounds=1", "trainer=ddp", "trainer.devices=2")
    accuracy = run_ranks(OmegaConf.to_yaml(cfg, resolve=True), 2, 1)
    assert accuracy == train(small_run("rounds=1", directory=tmp_path / "alone"))
    with pytest.raises(RuntimeError, match="ended with status 1; its own error stands above"):
        run_ranks(OmegaConf.to_yaml(small_run("lag=-1", "trainer=ddp", "trainer.devices=2"), resolve=True), 2, 1)


def test_a_signal_for_the_ranks_does_not_end_torchrun_itself() -> None:
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    sleeper = subprocess.Popen(["sleep", "60"], preexec_fn=_end_with_me)
    for number in numbers:
        sleeper.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_job_that_is_ended_takes_its_processes_along(by: signal.Signals, tmp_path: Path) -> None:
    arguments = [*small("rounds=1000"), "trainer=ddp", "trainer.devices=2", f"hydra.run.dir={tmp_path}/run"]
    job = subprocess.Popen(program(*arguments), cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _wait_until(lambda: (tmp_path / "run" / "checkpoints").is_dir())
    children = psutil.Process(job.pid).children(recursive=True)
    assert len(children) >= 3
    job.send_signal(by)
    job.wait(60)
    _wait_until(lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children))


def test_a_job_that_is_told_that_its_time_is_up_ends_its_processes_after_the_round(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["trainer=ddp", "trainer.devices=2", "+callbacks.pause._target_=test_slurm.WaitForTheSignal"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/tests", "SLURM_RESTART_COUNT": "0"}
    job = subprocess.Popen(program(*small(*settings), f"hydra.run.dir={run}"), cwd=tmp_path, env=environment)
    _wait_until(lambda: (run / "in-round-0").exists())
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 75
    assert [path.name for path in (run / "checkpoints").glob("round-*")] == ["round-000000.ckpt"]
    assert not (run / "again").exists()


@pytest.mark.parametrize("nodes", ["two", 0, True])
def test_other_numbers_of_nodes_are_refused_by_their_key(nodes: Any, small_run: SmallRun) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.num_nodes must be the number of nodes, 1 and up, got {nodes!r}"):
        run_ranks(OmegaConf.to_yaml(small_run(), resolve=True), 2, nodes)


def test_nodes_meet_where_slurm_says_and_other_nodes_than_asked_for_are_refused() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    step |= {"SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "4711"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in step.items():
            patch.setenv(name, value)
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # Lightning sets them
            patch.setenv(name, "")
            patch.delenv(name)
        found = _meeting(2, step)
    assert found[:3] == ["--nnodes=2", "--node-rank=1", "--master-addr=gpu07"]
    assert _meeting(1, {}) == ["--standalone"]
    with pytest.raises(ValueError, match=r"trainer\.num_nodes is 4, but this job runs on 2: .*hydra/launcher=slurm"):
        _meeting(4, step)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
