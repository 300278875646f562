"""Ranks: what torchrun and Slurm say, and errors of one that reach all."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from datamodules import ranks

SLURM = {  # of the second task on the second of two nodes, as srun set it
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NODELIST": "gpu[07-08]",
}  # fmt: skip


def test_slurm_says_the_same_as_torchrun_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    found = ranks.slurm_ranks(SLURM)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "MASTER_ADDR": "gpu07",
    }  # fmt: skip
    assert 10000 < int(port) < 65536
    assert ranks.slurm_ranks(SLURM)["MASTER_PORT"] == port  # all tasks of a job meet there


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "2"}, 2),
        (SLURM, 4),
        ({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 1),
    ],
    ids=["alone", "torchrun", "srun", "sbatch without srun"],
)
def test_the_number_of_processes_is_what_started_them_says(environment: dict[str, str], count: int) -> None:
    assert ranks.started_ranks(environment) == count


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "mine"}, "mine"),
        ({"WORLD_SIZE": "2", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}, "slurm-4711-3"),
    ],
)
def test_a_run_has_one_name_however_often_it_is_started(environment: dict[str, str], name: str) -> None:
    assert ranks._run_id(environment) == name


@pytest.mark.parametrize(
    ("environment", "was_started_again"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"SLURM_RESTART_COUNT": "2"}, True),
    ],
)
def test_a_restart_is_told_from_a_start(environment: dict[str, str], was_started_again: bool) -> None:
    assert ranks.was_started_again(environment) == was_started_again


def test_a_single_process_calls_and_gets(tmp_path: Path) -> None:
    assert ranks.from_main(lambda: 3) == 3
    assert ranks.gather(3) == [3]
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    ranks.barrier()
    ranks.leave()


def in_ranks(rank: int, meet: str, check: Callable[[], None]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    check()
    ranks.leave()


def run_in_two(check: Callable[[], None], meet: Path) -> None:
    mp.spawn(in_ranks, (str(meet), check), nprocs=2)


def asks_rank_0() -> None:
    asked: list[int] = []
    assert ranks.from_main(lambda: (asked.append(1), "made once")[1]) == "made once"
    assert len(asked) == (1 if ranks.rank() == 0 else 0)
    assert ranks.gather(ranks.rank()) == [0, 1]


def hears_of_the_error() -> None:
    def fail() -> Any:
        raise ValueError("datamodule.lag is wrong")

    if ranks.rank() == 0:
        with pytest.raises(ValueError, match=r"^datamodule\.lag is wrong$"):
            ranks.from_main(fail)
    else:
        with pytest.raises(RuntimeError, match=r"(?s)rank 0 failed, so rank 1 ends:.*Traceback.*datamodule\.lag is"):
            ranks.from_main(fail)


def has_another_config() -> None:
    ranks.check_same("seed: 0")
    with pytest.raises(ValueError, match=r"ranks of this run have different configurations"):
        ranks.check_same(f"seed: {ranks.rank()}")


@pytest.mark.parametrize("check", [asks_rank_0, hears_of_the_error, has_another_config])
def test_rank_0_acts_and_all_learn_what_came_of_it(check: Callable[[], None], tmp_path: Path) -> None:
    run_in_two(check, tmp_path / "meet")


@pytest.mark.parametrize(
    "name",
    [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED", "RUN_ID", "GROUP_RANK",
        "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_PROCID",
    ],
)  # fmt: skip
def test_a_process_that_a_rank_starts_is_told_none_of_what_makes_it_one(name: str) -> None:
    assert ranks.is_of_ranks(name)


@pytest.mark.parametrize("name", ["PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OFFBEAT_AGAIN", "WANDB_RUN_ID"])
def test_and_all_that_every_process_is_told(name: str) -> None:
    assert not ranks.is_of_ranks(name)
