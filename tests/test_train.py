"""Whole runs through `train.train`, as a user starts them: determinism, lag, logs, jobs in one process."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from omegaconf import DictConfig
from runs import assert_same_run, metrics, sampled, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules.store import read_rollouts
from train import train

SmallRun = Callable[..., DictConfig]
OBJECTIVES = ["topr", "asymre", "oapl", "grpo", "positives_only", "reinforce", "[topr,positives_only]"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_and_ends_in_a_summary_a_picture_and_a_model(
    objective: str, small_run: SmallRun, tmp_path: Path
) -> None:
    demonstrations = ["datamodule=demonstrations", "datamodule.prompts_per_round=32"]
    half_trained = small_run("objective=supervised", "rounds=8", *demonstrations, directory=tmp_path / "start")
    half_trained.datamodule.sampling.max_tokens = 8  # "08 8" and its end
    train(half_trained)
    start = ["policy=hf", f"policy.path={tmp_path / 'start' / 'model'}", "optimizer.lr=1e-4"]
    train(small_run(f"objective={objective}", *start, "datamodule.sampling.max_tokens=8"))
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["optimizer_steps"] == 6
    assert summary["engine"] == "transformers"
    assert summary["objective"] == objective.strip("[]").replace(",", "+")
    assert {"sampling", "scoring", "training", "sync", "evaluation"} <= set(summary["seconds"])
    assert (run / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    initial = weights(tmp_path / "start")
    name = "model.embed_tokens.weight"
    assert not torch.equal(model.state_dict()[name], initial[name])


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(small_run: SmallRun, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small_run(f"seed={seed}", directory=tmp_path / name))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert sampled(tmp_path / "a") != sampled(tmp_path / "c")


@pytest.mark.parametrize("lag", [0, 1, 4, 16])
def test_each_rollout_records_exactly_the_lag_that_was_asked(small_run: SmallRun, tmp_path: Path, lag: int) -> None:
    rounds = max(5, lag + 2)
    train(small_run(f"lag={lag}", f"rounds={rounds}"))
    for round_ in range(rounds):
        rollouts = read_rollouts(tmp_path / "run" / "rollouts" / f"round-{round_:06d}.parquet")
        assert {r.snapshot for r in rollouts} == {max(0, round_ - lag)}
        assert {r.snapshot_step for r in rollouts} == {2 * max(0, round_ - lag)}
        assert {r.round for r in rollouts} == {round_}
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")["train/lag_steps_max"].dropna()
    assert metrics.tolist() == [min(step // 2, lag) * 2 + step % 2 for step in range(2 * rounds)]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_ends_as_an_undisturbed_one(small_run: SmallRun, tmp_path: Path, lag: int) -> None:
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    train(small_run(f"lag={lag}", "rounds=5", directory=whole))
    train(small_run(f"lag={lag}", "rounds=3", directory=first))
    checkpoint = first / "checkpoints" / "last.ckpt"
    train(small_run(f"lag={lag}", "rounds=5", f"ckpt_path={checkpoint}", directory=second))
    torch.testing.assert_close(weights(second), weights(whole), rtol=0.0, atol=0.0)
    assert sampled(first) + sampled(second) == sampled(whole)
    assert metrics(second) == metrics(whole)  # those of the first three rounds came with the checkpoint
    accuracies = [json.loads((run / "summary.json").read_text())["accuracy_before"] for run in (second, whole)]
    assert accuracies[0] == accuracies[1]


def test_the_best_checkpoint_resumes_too(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("lag=2", "rounds=6", directory=tmp_path / "first"))
    (best,) = (tmp_path / "first" / "checkpoints").glob("best-*.ckpt")
    finished = int(best.stem.removeprefix("best-")) + 1
    train(small_run("lag=2", "rounds=7", f"ckpt_path={best}", directory=tmp_path / "second"))
    rounds = sorted(int(p.stem.removeprefix("round-")) for p in (tmp_path / "second" / "rollouts").glob("*.parquet"))
    assert rounds == list(range(finished, 7))


def test_micro_batches_do_not_change_what_is_learned(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run(directory=tmp_path / "one"))
    train(small_run("datamodule.max_tokens_per_micro_batch=30", directory=tmp_path / "many"))
    torch.testing.assert_close(weights(tmp_path / "one"), weights(tmp_path / "many"), rtol=1e-4, atol=1e-5)


def test_more_passes_take_more_steps_over_the_same_rollouts(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("datamodule.passes_per_round=3"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["optimizer_steps"] == 18


def test_wandb_logs_offline_without_an_account(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("one", "two"):  # two jobs in one process: each its own run
        train(small_run("logger=wandb", directory=tmp_path / name))
        runs = list((tmp_path / name / "wandb").glob("offline-run-*/run-*.wandb"))
        assert len(runs) == 1
        assert b"rollout/reward_mean" in runs[0].read_bytes()


def test_samples_of_each_round_can_be_read_as_a_table(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("callbacks.rollout_logging.num_samples=4"))
    table = pd.read_csv(tmp_path / "run" / "samples" / "round-000002.csv")
    assert len(table) == 4
    assert set(table["round"]) == {2}
    stored = pd.read_parquet(tmp_path / "run" / "rollouts" / "round-000002.parquet")
    assert set(table["prompt"]) <= set(stored["prompt"])


@pytest.mark.parametrize("every", [1, 4, 5, 1000])
def test_every_optimizer_step_is_on_record_whatever_the_logging_interval(
    small_run: SmallRun, tmp_path: Path, every: int
) -> None:
    train(small_run("datamodule.passes_per_round=3", f"trainer.log_every_n_steps={every}"))
    train(small_run("datamodule.passes_per_round=3", directory=tmp_path / "each"))
    rows, each = (pd.read_csv(tmp_path / name / "metrics.csv").dropna(subset="train/loss") for name in ("run", "each"))
    steps = rows["step"].tolist()
    assert steps == [s for s in range(1, 19) if s % every == 0 or s % 6 == 0]
    spans = [each[(each["step"] > a) & (each["step"] <= b)] for a, b in pairwise([0, *steps])]
    assert rows["train/loss"].tolist() == pytest.approx([s["train/loss"].mean() for s in spans])
    assert rows["train/lag_steps_max"].tolist() == [s["train/lag_steps_max"].max() for s in spans]


def test_a_run_continues_in_its_own_directory(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("rounds=2"))
    train(small_run("rounds=3", f"ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"))
    train(small_run("rounds=3", directory=tmp_path / "whole"))
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "whole"), rtol=0.0, atol=0.0)
    assert sampled(tmp_path / "run") == sampled(tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_prompt_that_a_round_meets_twice_is_sampled_anew(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("prompts.num_train=12", "rounds=3"))  # 8 a round: the second crosses into a new permutation
    rows = [row for row in sampled(tmp_path / "run") if row["round"] == 1]
    assert len({row["seed"] for row in rows}) == len(rows) > 4 * len({row["prompt_id"] for row in rows})


def test_vllm_trains_a_whole_run_and_is_gone_after_it(small_run: SmallRun, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    before = psutil.Process().children(recursive=True)  # servers of other tests
    train(small_run("engine=vllm", "engine.kv_cache_mb=64", "rounds=2"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engine"] == "vllm"
    gaps = pd.read_csv(tmp_path / "run" / "metrics.csv")["train/off_policy/fresh_gap_max"]
    assert gaps.max() < 1e-3
    children = psutil.Process().children(recursive=True)
    engines = [p for p in children if p not in before and "VLLM" in p.name().upper()]
    assert psutil.wait_procs(engines, timeout=30)[1] == []
