"""Several processes train what one process trains: the same losses and weights, from the same rollouts."""

import logging
import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import DictConfig
from runs import RECORDED_ROUNDS, losses, offline, sampled, small, torchrun, weights

from callbacks.sharded_strategy import ShardedStrategy
from modules.policy import Policy
from train import train

SmallRun = Callable[..., DictConfig]
HEADS = ("topr", "asymre", "oapl", "grpo", "positives_only", "reinforce", "supervised")


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_learns_under_every_head(
    trainer: str, recording: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    swept = {"objective": HEADS, "policy.tie_word_embeddings": ("true", "false")}
    sweep = [f"{key}={','.join(values)}" for key, values in swept.items()]
    torchrun(2, "-m", *small(*offline(recording)), *sweep, f"trainer={trainer}", f"hydra.sweep.dir={tmp_path}/two")
    for number, (head, tied) in enumerate(product(*swept.values())):
        alone, two = tmp_path / f"{head}-{tied}", tmp_path / "two" / str(number)
        train(
            small_run(*offline(recording), f"objective={head}", f"policy.tie_word_embeddings={tied}", directory=alone)
        )
        assert len(losses(alone)) == 2 * RECORDED_ROUNDS
        assert losses(two) == pytest.approx(losses(alone), abs=1e-5), head
        assert losses(two, "train/grad_norm") == pytest.approx(losses(alone, "train/grad_norm"), rel=1e-4), head
        assert weights(two).keys() == weights(alone).keys()
        torch.testing.assert_close(weights(two), weights(alone), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_sampled_does_not_depend_on_the_number_of_processes(
    num_ranks: int, small_run: SmallRun, tmp_path: Path
) -> None:
    settings = ["lag=1", "rounds=2", "engine=transformers_process", "datamodule.prefetch=true", "num_threads=1"]
    train(small_run(*settings, directory=tmp_path / "alone"))
    torchrun(num_ranks, *small(*settings), "trainer=ddp", f"hydra.run.dir={tmp_path}/ranks")
    assert sampled(tmp_path / "ranks") == sampled(tmp_path / "alone")  # both rounds come from snapshot 0
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    assert len(list((tmp_path / "ranks").glob("rollouts/*"))) == 2


@pytest.mark.parametrize(
    ("trainer", "before", "after"), [("ddp", 1, 2), ("ddp", 2, 1), ("fsdp", 1, 2), ("fsdp", 2, 1)], ids=str
)
def test_a_run_goes_on_with_another_number_of_processes(
    trainer: str, before: int, after: int, recording: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    settings = [*offline(recording), "scheduler=linear", "scheduler.num_warmup_steps=2"]
    train(small_run(*settings, directory=tmp_path / "whole"))
    once = ["trainer.strategy.reduce_every_micro_batch=false"] if trainer == "fsdp" else []
    ranked = [*small(*settings), f"trainer={trainer}", *once, f"hydra.run.dir={tmp_path}/run"]
    torchrun(before, *ranked, "+callbacks.stop._target_=test_ranks.EndAfterThreeRounds")
    assert not (tmp_path / "run" / "summary.json").is_file()
    torchrun(after, *ranked, "resume=true")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "whole"), rtol=0.0, atol=1e-4)


CHECKPOINTING = ["policy=hf", "policy.gradient_checkpointing=true"]
WHOLE = "trainer.strategy.save_distributed_checkpoint=false"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["trainer=ddp"], ["trainer=fsdp"]),
        (["trainer=fsdp", WHOLE], ["trainer=ddp"]),
        pytest.param(["trainer=fsdp", *CHECKPOINTING], ["trainer=fsdp", *CHECKPOINTING], marks=pytest.mark.slow),
    ],
    ids=["ddp to fsdp", "fsdp to ddp", "gradient checkpointing"],
)  # fmt: skip
def test_a_whole_checkpoint_goes_on_under_another_strategy(
    before: list[str], after: list[str], recording: Path, small_run: SmallRun, make_policy: Callable[..., Policy],
    tmp_path: Path,
) -> None:  # fmt: skip
    make_policy().save_pretrained(tmp_path / "model")
    common = [*offline(recording), *([f"policy.path={tmp_path}/model"] if "policy=hf" in before else [])]
    alone = [word for word in before if not word.startswith("trainer")]
    train(small_run(*alone, *common, directory=tmp_path / "whole"))
    run = f"hydra.run.dir={tmp_path}/run"
    torchrun(2, *small(*before, *common), run, "+callbacks.stop._target_=test_ranks.EndAfterThreeRounds")
    torchrun(2, *small(*after, *common), run, "resume=true")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "whole"), rtol=0.0, atol=1e-4)


class EndAfterThreeRounds(L.Callback):
    """End every process when the fourth round would begin."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 3:
            os._exit(0)


def test_processes_that_torchrun_starts_again_go_on_in_the_same_directory(
    recording: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    train(small_run(*offline(recording), directory=tmp_path / "whole"))
    killed = "+callbacks.kill._target_=test_ranks.KillRank1Once"
    torchrun(2, *small(*offline(recording)), "trainer=ddp", killed, max_restarts=1, cwd=tmp_path)
    (summary,) = (tmp_path / "outputs").glob("**/summary.json")
    assert losses(summary.parent) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    torch.testing.assert_close(weights(summary.parent), weights(tmp_path / "whole"), rtol=0.0, atol=1e-4)


class KillRank1Once(L.Callback):
    """Kill one process in the third round, unless that was done before."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and trainer.global_rank == 1 and trainer.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_on_one_rank_ends_all_with_its_traceback(recording: Path, tmp_path: Path) -> None:
    failing = "+callbacks.fail._target_=test_ranks.FailOnRank1"
    arguments = [*small(*offline(recording)), "trainer=fsdp", failing, f"hydra.run.dir={tmp_path}/run"]
    printed = torchrun(2, *arguments, check=False)
    assert "in on_train_batch_end" in printed
    assert "ValueError: only here" in printed
    assert not (tmp_path / "run" / "summary.json").is_file()


def test_only_rank_0_writes_the_log(recording: Path, tmp_path: Path) -> None:
    arguments = [*small(*offline(recording)), "trainer=ddp", "+callbacks.warn._target_=test_ranks.Warn"]
    printed = torchrun(2, *arguments, "rounds=1", f"hydra.run.dir={tmp_path}/run")
    assert "[rank 1][test_ranks][WARNING] heard of" in printed
    assert printed.count("ALARM of ours") == 1
    written = (tmp_path / "run" / "train.log").read_text()
    assert written.count("heard of") == 1
    assert written.count("training and 8 held-out prompts") == 1


class Warn(L.Callback):
    """Warn on every rank, as a program of others and as an alarm of ours."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logging.getLogger("test_ranks").warning("heard of")
        logging.getLogger("callbacks.diagnostics").warning("ALARM of ours")


class FailOnRank1(L.Callback):
    """Raise on one rank alone."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            raise ValueError("only here")


def test_other_processes_than_the_config_asks_for_are_refused_with_the_command(small_run: SmallRun) -> None:
    with pytest.raises(ValueError, match=r"trainer\.num_nodes is 2, but 1 processes were started: .*torchrun --nproc"):
        train(small_run("trainer=ddp", "trainer.devices=2"))


def test_a_sharded_checkpoint_is_refused_where_it_cannot_be_read(
    recording: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    torchrun(2, *small(*offline(recording)), "rounds=1", "trainer=fsdp", f"hydra.run.dir={tmp_path}/run")
    with pytest.raises(ValueError, match=r"round-000000\.ckpt is a sharded checkpoint, which only trainer=fsdp reads"):
        train(small_run(*offline(recording), "rounds=2", "resume=true"))


def test_an_optimizer_that_cannot_step_on_shards_is_refused(recording: Path, tmp_path: Path) -> None:
    arguments = [*small(*offline(recording)), "trainer=fsdp", "optimizer=adafactor", f"hydra.run.dir={tmp_path}"]
    assert "optimizer=adafactor cannot step on the shards of trainer=fsdp" in torchrun(1, *arguments, check=False)


def test_settings_of_shards_that_cannot_be_are_refused_by_their_key() -> None:
    with pytest.raises(ValueError, match=r"trainer\.strategy\.param_dtype must be float32 or bfloat16"):
        ShardedStrategy(1, "float16", True, False, True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"trainer\.strategy\.cpu_offload is for GPUs"):
            ShardedStrategy(1, "float32", True, True, True)
