"""The processes of one run: rank 0 samples, judges and writes; all ranks train on their part of what it made."""

import gc
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

log = logging.getLogger(__name__)
Result = TypeVar("Result")
LONGEST_WAIT = timedelta(hours=12)  # for rank 0, which may sample a round or make a warm start meanwhile
AGREED_END = 75  # status of processes that want to be started again (EX_TEMPFAIL of sysexits.h)
AGAIN = "OFFBEAT_AGAIN"  # names a file that they leave then: starters of several processes pass no status on


def started_ranks(environment: Mapping[str, str]) -> int:
    """Return how many processes torchrun or Slurm started for this run."""
    return int(environment.get("WORLD_SIZE") or _slurm_tasks(environment) or 1)


def _slurm_tasks(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NUM_TASKS", "")  # of srun's step; the batch script itself has SLURM_PROCID too


def join() -> None:
    """Join the other processes that torchrun or Slurm started, and agree on RUN_ID, which names the directory.

    A run that torchrun starts again after a failure, or Slurm after a preemption, gets the same RUN_ID.
    """
    if started_ranks(os.environ) == 1:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            os.environ.setdefault("RUN_ID", _run_id(os.environ))
        return
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(slurm_ranks(os.environ))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank_, size = next(rendezvous("env://", timeout=LONGEST_WAIT))
    # torchrun keeps one store for all attempts: the addresses of processes that are gone must not be found in it.
    attempt = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-of-{size}", store)
    dist.init_process_group(backend, store=attempt, rank=rank_, world_size=size, timeout=LONGEST_WAIT)
    os.environ["RUN_ID"] = from_main(lambda: os.environ.get("RUN_ID") or _run_id(os.environ))


@contextmanager
def joined() -> Iterator[None]:
    """Join, and part in good order if all ranks end without error or with the status that they agreed on.

    A rank other than 0 has nothing to put away, so a signal ends it at once: Python's own handlers would wait for a
    collective to end, which may never do.
    """
    join()
    if rank():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    except SystemExit as end:
        if end.code == AGREED_END:
            leave()
        raise
    leave()


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables as Slurm's say them."""
    slurm = SLURMEnvironment(auto_requeue=False)
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(int(environment["SLURM_STEP_NUM_TASKS"]) // int(environment["SLURM_NNODES"])),
        "GROUP_WORLD_SIZE": environment["SLURM_NNODES"],
        "GROUP_RANK": environment["SLURM_NODEID"],
        "MASTER_ADDR": slurm.main_address,
        "MASTER_PORT": str(slurm.main_port),
    }


def check(wanted: int) -> None:
    """Say how many processes train, and refuse a config that asks for others than were started.

    Raises:
        ValueError: with the command that starts them.
    """
    if wanted != world_size():
        raise ValueError(
            f"trainer.devices x trainer.num_nodes is {wanted}, but {world_size()} processes were started: leave both "
            "to trainer=ddp or trainer=fsdp and start `torchrun --nproc-per-node N train.py ...`, or srun with N tasks "
            "a node; or have `train.py trainer=ddp trainer.devices=N` start them itself"
        )
    log.info("training in %d process%s", wanted, "es" * (wanted > 1))


def check_same(config: str) -> None:
    """Refuse ranks that were given different configurations, as by a sweeper that draws on each of them.

    Raises:
        ValueError: they differ.
    """
    if len(set(gather(config))) > 1:
        raise ValueError("the ranks of this run have different configurations; give all the same command and seeds")


def was_started_again(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm starts this run anew after a failure or a preemption."""
    return any(int(environment.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def is_of_ranks(variable: str) -> bool:
    """Whether an environment variable makes a process one of several."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED", "RUN_ID")
    return variable in own or variable.startswith(("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_"))


def _run_id(environment: Mapping[str, str]) -> str:
    if "WORLD_SIZE" in environment and environment.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return environment["TORCHELASTIC_RUN_ID"]
    if job := environment.get("SLURM_JOB_ID"):
        return f"slurm-{job}-{environment.get('SLURM_STEP_ID', '0')}"
    agent = psutil.Process(os.getppid())  # torchrun itself, which outlives the processes that it starts again
    return time.strftime("%Y-%m-%d/%H-%M-%S", time.localtime(agent.create_time()))


def leave() -> None:
    """Part in good order: without it, gloo now and then ends a finished process with an error."""
    if dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def world_size() -> int:
    """Return the number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_main(function: Callable[[], Result]) -> Result:
    """Call a function on rank 0 alone and return what it returned on every rank; each rank must come here.

    Raises:
        RuntimeError: the function raised, with rank 0's traceback; rank 0 itself raises what the function did.
    """
    if world_size() == 1:
        return function()
    answer: list[Any] = [None, ""]
    error: Exception | None = None
    if rank() == 0:
        try:
            answer = [function(), ""]
        except Exception as raised:
            error, answer = raised, [None, traceback.format_exc()]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if error is not None:
        raise error
    if answer[1]:
        raise RuntimeError(f"rank 0 failed, so rank {rank()} ends:\n{answer[1]}")
    return answer[0]  # type: ignore[no-any-return]


def gather(value: Result) -> list[Result]:
    """Return every rank's value; each rank must come here."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()
