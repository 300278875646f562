"""The schedule that is promised is the one that is run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig

from callbacks.dry_run import informative_share, lag_range, schedule
from datamodules.snapshots import SnapshotStore
from train import train

SmallRun = Callable[..., DictConfig]


def lines(cfg: DictConfig) -> dict[str, str]:
    return dict(schedule(instantiate(cfg.datamodule), cfg, lambda: instantiate(cfg.policy)))


@pytest.mark.parametrize(
    "settings", [["lag=0"], ["lag=1", "datamodule.passes_per_round=2"], ["lag=2", "datamodule.replay.rounds=2"]]
)
def test_steps_samples_and_lag_are_those_of_the_run(settings: list[str], small_run: SmallRun, tmp_path: Path) -> None:
    cfg = small_run(*settings, "rounds=6")
    promised = lines(cfg)
    train(cfg)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    table = pd.read_csv(tmp_path / "run" / "metrics.csv").dropna(subset="train/lag_steps_max")
    data: Any = instantiate(cfg.datamodule)
    low, high = lag_range(
        lag=data.lag, steps_per_round=data.steps_per_round, replay_rounds=data.replay.rounds, rounds=6
    )
    settled = table[table["step"] > data.steps_per_round * (data.lag + data.replay.rounds)]
    assert (settled["train/lag_steps_min"].min(), table["train/lag_steps_max"].max()) == (low, high)
    assert promised["optimizer steps"].endswith(f", {summary['optimizer_steps']} in all")
    assert promised["lag"] == f"{data.lag} rounds: samples are {low} to {high} optimizer steps old"
    assert promised["samples"].startswith("32 a round, 192 in all")


def test_nothing_is_written_or_trained(small_run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run("dry_run=true"))
    assert "Dry run" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert SnapshotStore(tmp_path / "run" / "snapshots").versions() == []


@pytest.mark.parametrize(("accuracy", "size", "share"), [(0.5, 2, 0.5), (0.0, 8, 0.0), (1.0, 8, 0.0), (0.1, 2, 0.18)])
def test_the_share_of_informative_groups_is_that_of_independent_draws(accuracy: float, size: int, share: float) -> None:
    assert informative_share(accuracy, size) == pytest.approx(share)


def test_a_policy_that_is_not_there_yet_leaves_its_size_open(compose: Callable[..., DictConfig]) -> None:
    cfg = compose("experiment=quickstart", "engine=transformers", "policy.path=./nowhere")
    assert lines(cfg)["disk"].endswith("snapshots: known once the policy is there")
