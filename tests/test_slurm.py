"""A Slurm job: the batch file as it is, with stand-ins for Slurm's own commands that start real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
import yaml
from omegaconf import DictConfig
from runs import command_line, losses, small, weights

from callbacks.preemption import Preemption
from datamodules.ranks import is_of_ranks
from datamodules.store import read_rollouts
from modules.policy import Policy
from train import train

ROOT = Path(__file__).parents[1]
SmallRun = Callable[..., DictConfig]
SRUN = """#!/bin/bash
# Starts tasks on one node as srun does; the first that fails ends the others, and the highest status is the step's.
set -m  # a process group for each task
count=$SLURM_NTASKS node=localhost
while [[ $1 == --* ]]; do
    case $1 in
        --ntasks=*) count=${1#*=} ;;
        --nodelist=*) node=${1#*=} ;;
    esac
    shift
done
export SLURM_STEP_NUM_TASKS=$count SLURM_NTASKS=$count SLURM_NODELIST=$node SLURMD_NODENAME=$node SLURM_NNODES=1
for ((task = 0; task < count; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
trap 'kill -- "${tasks[@]/#/-}"' TERM
status=0
for task in "${tasks[@]}"; do
    wait -n "${tasks[@]}"
    ended=$?
    [ $ended -gt 0 ] && kill -9 "${tasks[@]}"
    [ $ended -gt $status ] && status=$ended
done
exit $status
"""
SCONTROL = """#!/bin/bash
[ $1 = show ] && echo 127.0.0.1 && echo 127.0.0.2 && exit
echo $* >> {calls}
"""
STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost",
    "SLURM_JOB_NAME": "offbeat", "SLURM_CPUS_PER_TASK": "1",
}  # fmt: skip
Submit = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """Return a function that starts the batch file in the test's directory."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun").write_text(SRUN)
    (commands / "scontrol").write_text(SCONTROL.format(calls=tmp_path / "scontrol"))
    for command in commands.iterdir():
        command.chmod(0o755)
    for name in ("train.py", "conf", "datamodules", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    started: list[subprocess.Popen[str]] = []

    def submit_(*arguments: str, restarts: int = 0, **variables: str) -> "subprocess.Popen[str]":
        around = {name: value for name, value in os.environ.items() if not is_of_ranks(name)}
        ours = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/tests", **variables}
        environment = {**around, **STEP, **ours, "SLURM_RESTART_COUNT": str(restarts)}
        command = ["bash", str(ROOT / "docs" / "slurm.sbatch"), *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield submit_
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()


def test_a_job_whose_time_is_up_ends_after_its_round_and_goes_on_when_it_is_queued_again(
    submit: Submit, small_run: SmallRun, tmp_path: Path
) -> None:
    settings = ["rounds=3", "lag=2"]  # all rounds sample from snapshot 0, so that rounding changes no sample
    train(small_run(*settings))
    job = submit(*small(*settings), "trainer=ddp", "+callbacks.pause._target_=test_slurm.WaitForTheSignal")
    run = tmp_path / "outputs" / "slurm-4711"
    _wait_for(run / "in-round-0", job)
    tasks = [p for p in psutil.Process(job.pid).children(recursive=True) if p.name().startswith("python")]
    (task,) = (p for p in tasks if p.environ()["SLURM_PROCID"] == "1")  # one rank that is warned is enough
    task.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate(timeout=120)
    assert job.returncode in (75, 137), printed  # the last one is killed, as by --kill-on-bad-exit
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    assert [path.name for path in (run / "checkpoints").glob("round-*")] == ["round-000000.ckpt"]
    assert not (run / "summary.json").exists()
    again = submit(*small(*settings), "trainer=ddp", restarts=1)
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0, printed
    assert losses(run) == pytest.approx(losses(tmp_path / "run"), abs=1e-5)
    torch.testing.assert_close(weights(run), weights(tmp_path / "run"), rtol=0.0, atol=1e-4)


def test_a_job_that_ends_by_itself_is_not_queued_again(submit: Submit, tmp_path: Path) -> None:
    job = submit(*small("rounds=1"), "trainer=ddp")
    printed, _ = job.communicate(timeout=120)
    assert job.returncode == 0, printed
    assert not (tmp_path / "scontrol").exists()
    bad = submit(*small("rounds=1"), "trainer=ddp", "lag=-1")
    bad.communicate(timeout=120)
    assert bad.returncode in (1, 137)  # the other task may be killed first
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.slow
def test_servers_on_the_last_nodes_of_a_job_sample_for_the_others_and_end_with_it(
    submit: Submit, make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    make_policy().save_pretrained(tmp_path / "model")
    settings = ["policy=hf", f"policy.path={tmp_path}/model", "rounds=2", "lag=0", "datamodule.sampling.max_tokens=16"]
    job = submit(
        *(word for word in small(*settings) if word != "engine=transformers"), "trainer=ddp",
        SERVER_NODES="1", SERVER_MODEL=f"{tmp_path}/model", SERVER_DEVICES="0", SERVER_PORT="8765",
        SERVER_OPTIONS="--kv-cache-memory-bytes 67108864 --dtype float32",
    )  # fmt: skip
    run = tmp_path / "outputs" / "slurm-4711"
    _wait_for(run / "rollouts" / "round-000000.parquet", job)
    for process in psutil.Process(job.pid).children(recursive=True):
        if "engines.serve" in command_line(process):
            process.send_signal(signal.SIGUSR1)  # as Slurm tells all of a job that its time is nearly up
    printed, _ = job.communicate(timeout=180)
    assert job.returncode == 0, printed
    rollouts = [r for file in sorted((run / "rollouts").iterdir()) for r in read_rollouts(file)]
    assert [r.snapshot for r in rollouts] == [0] * 32 + [1] * 32
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["engine"]["endpoints"] == ["http://127.0.0.2:8765"]
    assert "is left out" not in printed
    deadline = time.monotonic() + 20
    while [p for p in psutil.process_iter() if f"{tmp_path}/model" in command_line(p)]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


class WaitForTheSignal(L.Callback):
    """Stay in the first round until the signal has come, to the last rank."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch or os.environ["SLURM_RESTART_COUNT"] != "0" or trainer.global_rank == 0:
            return
        (Path(trainer.default_root_dir) / "in-round-0").touch()
        (preemption,) = (c for c in trainer.callbacks if isinstance(c, Preemption))  # type: ignore[attr-defined]
        while not preemption._is_warned:
            time.sleep(0.01)


def _wait_for(path: Path, job: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert job.poll() is None, job.stdout.read() if job.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)
