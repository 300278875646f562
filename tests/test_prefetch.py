"""Sampling the next round while one trains changes nothing but the seconds, and fails as loudly."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
from omegaconf import DictConfig
from runs import assert_same_run, sampled

from callbacks.verifiers.number import Number
from datamodules.engines.process import ProcessEngine
from train import train

SmallRun = Callable[..., DictConfig]
PREFETCH = ["datamodule.prefetch=true", "engine=transformers_process"]


@pytest.mark.parametrize(
    "settings",
    [
        ["lag=1"],
        ["lag=3", "datamodule.replay.rounds=2", "datamodule.passes_per_round=2", "rounds=5"],
    ],
)
def test_with_and_without_it_a_run_is_the_same_to_the_last_bit(
    settings: list[str], small_run: SmallRun, tmp_path: Path
) -> None:
    train(small_run(*settings, directory=tmp_path / "off"))
    train(small_run(*settings, *PREFETCH, "num_threads=1", directory=tmp_path / "on"))
    assert_same_run(tmp_path / "off", tmp_path / "on")
    assert living_engines() == []


def living_engines() -> list[psutil.Process]:
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in children if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.parametrize("lag", [4, 16])
def test_each_rollout_has_the_lag_that_was_asked_for(lag: int, small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run(f"lag={lag}", "rounds=18", *PREFETCH, "num_threads=1", "~callbacks.held_out_evaluation",
        "~callbacks.checkpoint_best"))  # fmt: skip
    rows = sampled(tmp_path / "run")
    assert {(row["round"], row["snapshot"], row["lag"]) for row in rows} == {
        (r, max(0, r - lag), min(r, lag)) for r in range(18)
    }


def test_vllm_samples_the_same_bits_ahead_and_in_turn(small_run: SmallRun, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    vllm = ["engine=vllm", "engine.kv_cache_mb=64", "lag=1", "rounds=4"]
    train(small_run(*vllm, directory=tmp_path / "off"))
    train(small_run(*vllm, "datamodule.prefetch=true", directory=tmp_path / "on"))
    assert_same_run(tmp_path / "off", tmp_path / "on")


def test_the_seconds_of_sampling_training_and_waiting_are_told(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run(*PREFETCH, "num_threads=1"))
    rows = pd.read_csv(tmp_path / "run" / "metrics.csv").dropna(subset="seconds/sampling")
    assert len(rows) == 3
    assert (rows["seconds/waiting"].fillna(0.0) >= 0.0).all()
    shares = rows["seconds/overlapped_share"]
    assert shares.isna().tolist() == [False, False, True]  # nothing is made ahead in the last round
    assert shares.dropna().between(0.0, 1.0).all()
    assert rows["seconds/waiting"].iloc[0] > 0.0  # nothing could be made ahead of the first round


def test_what_goes_wrong_in_the_background_ends_the_run_with_its_round(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ProcessEngine, *_: object) -> None:
        if self._calls > 40:  # the first round is drawn
            raise OSError("no such device")
        return original(self, *_)

    original = ProcessEngine._receive
    monkeypatch.setattr(ProcessEngine, "_receive", fail)
    with pytest.raises(RuntimeError, match=r"making round \d+ ahead failed: no such device") as caught:
        train(small_run(*PREFETCH, "~callbacks.held_out_evaluation", "~callbacks.checkpoint_best", "rounds=40"))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lag=0", *PREFETCH], "datamodule.prefetch needs datamodule.lag of at least 1"),
        (["datamodule.prefetch=true"], "choose engine=vllm or engine=transformers_process"),
        (["datamodule.replay.rounds=0"], "datamodule.replay.rounds must be at least 1, got 0"),
        (["datamodule.replay.rounds=2", "objective=oapl"], "datamodule.replay.rounds must be 1 for objective 'oapl'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: list[str], message: str, small_run: SmallRun) -> None:
    with pytest.raises(Exception, match=message):
        train(small_run(*settings))


def test_ctrl_c_ends_engine_and_thread(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def interrupt(self: Number, completion: str, answer: str) -> None:
        nonlocal calls
        calls += completion != ""
        if calls == 60:
            raise KeyboardInterrupt
        return original(self, completion, answer)

    original = Number.__call__
    monkeypatch.setattr(Number, "__call__", interrupt)
    with pytest.raises((KeyboardInterrupt, SystemExit, RuntimeError)):
        train(small_run(*PREFETCH, "rounds=40"))
    assert living_engines() == []
