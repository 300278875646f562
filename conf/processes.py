"""Run one experiment in processes of its own: several for a job of Hydra's, or one apart from the ranks of a run."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from datamodules import ranks
from datamodules.atomic import atomic_file
from datamodules.engines.end_with_parent import terminate_with_parent

TRAIN = Path(__file__).parents[1] / "train.py"
RESULT = "OFFBEAT_RESULT"  # names a file that train.py leaves its result in
SECONDS_TO_END = 60.0  # for torchrun, which itself kills what does not end in 30


def is_for_several(trainer: Any) -> bool:
    """Whether a job of Hydra's, itself one process, is to be trained by several.

    Args:
        trainer: the config's node.
    """
    is_started = ranks.world_size() > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    return "strategy" in trainer and not is_started and (trainer.devices, trainer.num_nodes) != (1, 1)


def run_alone(config: str) -> float:
    """Run an experiment in one process and return its last held-out accuracy.

    Args:
        config: whole and resolved, as YAML.

    Raises:
        RuntimeError: it failed.
    """
    return _run([sys.executable], config)


def run_ranks(config: str, processes: int, nodes: int) -> float:
    """Run an experiment in several processes and return its last held-out accuracy; NaN on nodes other than the first.

    Args:
        config: whole and resolved, as YAML.
        processes: a node.
        nodes: 1, or all that a Slurm job has, with this called on each of them.

    Raises:
        ValueError: the number of processes or nodes is no number, or Slurm gave another number of nodes.
        RuntimeError: a process failed.
        SystemExit: they ended to be started again.
    """
    for key, value, what in (("devices", processes, "processes a node"), ("num_nodes", nodes, "nodes")):
        if type(value) is not int or value < 1:
            raise ValueError(f"trainer.{key} must be the number of {what}, 1 and up, got {value!r}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    preemption = (yaml.safe_load(config)["callbacks"] or {}).get("preemption") or {}
    return _run([*torchrun, *_meeting(nodes, os.environ)], config, preemption.get("signal_name"))


def _meeting(nodes: int, environment: Mapping[str, str]) -> list[str]:
    """Return where torchrun's processes find each other."""
    if nodes == 1:
        return ["--standalone"]
    given = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if given != nodes:
        raise ValueError(
            f"trainer.num_nodes is {nodes}, but this job runs on {given}: start torchrun or srun on each of them, or "
            "sweep with hydra/launcher=slurm"
        )
    slurm = ranks.slurm_ranks(environment)
    where = {"nnodes": str(nodes), "node-rank": slurm["GROUP_RANK"]}
    where |= {"master-addr": slurm["MASTER_ADDR"], "master-port": slurm["MASTER_PORT"]}
    return [f"--{name}={value}" for name, value in where.items()]


def _run(command: list[str], config: str, warning: str | None = None) -> float:
    """Run train.py in a process that `command` starts; a signal named `warning` is passed on to its children."""
    directory = Path(yaml.safe_load(config)["directory"])
    given, result = directory / "processes.yaml", directory / "result"
    with atomic_file(given) as temporary:
        temporary.write_text(config + yaml.safe_dump({"hydra": _hydra(directory)}))
    result.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not ranks.is_of_ranks(name)}
    if again := os.environ.get("SLURM_RESTART_COUNT"):
        environment["SLURM_RESTART_COUNT"] = again
    own = directory / "again"
    own.unlink(missing_ok=True)
    environment.setdefault(ranks.AGAIN, str(own))
    arguments = [str(TRAIN), f"--config-dir={directory}", "--config-name=processes"]
    process = subprocess.Popen(
        [*command, *arguments], env={**environment, RESULT: str(result)}, preexec_fn=_end_with_me
    )
    try:
        with _passed_on(warning, process):
            status = process.wait()
    except BaseException:
        _end(process)
        raise
    if Path(environment[ranks.AGAIN]).is_file():
        own.unlink(missing_ok=True)
        raise SystemExit(ranks.AGREED_END)
    if status:
        raise RuntimeError(f"the run in {directory} ended with status {status}; its own error stands above")
    return float(result.read_text()) if result.is_file() else float("nan")


def _hydra(directory: Path) -> dict[str, object]:
    """Return Hydra's own settings for a job that another one starts."""
    quiet = {"lightning.pytorch.utilities.rank_zero": {"level": "WARNING"}}
    return {"run": {"dir": str(directory)}, "output_subdir": None, "job_logging": {"loggers": quiet}}


def _end_with_me() -> None:
    """End with the job that started it; what a cluster tells the job's processes must not end torchrun itself."""
    terminate_with_parent()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _passed_on(name: str | None, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass a signal on to a process's children meanwhile."""
    if name is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)

    number = signal.Signals[name]
    before = signal.signal(number, pass_on)
    try:
        yield
    finally:
        signal.signal(number, before)


def quiet_logging() -> list[str]:
    """Return Hydra's overrides for a rank other than 0: no files, and the console gets what rank 0 does not say too."""
    line = f"[rank {ranks.rank()}][%(name)s][%(levelname)s] %(message)s"
    ours = ("callbacks", "datamodules", "modules")  # they warn on all ranks alike
    return [
        *(f"++hydra.job_logging.loggers.{name}={{level: ERROR}}" for name in ours),
        "hydra.output_subdir=null",
        "hydra/job_logging=stdout",
        "hydra.job_logging.root.level=WARNING",
        f"hydra.job_logging.formatters.simple.format='{line}'",
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
