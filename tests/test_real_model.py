"""A real pretrained model, offline: SmolLM2-135M-Instruct learns from GSM8K rollouts of the real vLLM."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from train import train

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.mark.slow
def test_two_rounds_of_asymre_on_gsm8k_sync_train_and_speak_sanely(
    compose: Callable[..., DictConfig], tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    if not MODEL.is_dir() or not GSM8K.is_dir():
        pytest.skip("needs `make real-model` and GSM8K's files")
    train(
        compose(
            "experiment=real_model", f"policy.path={MODEL}", f"prompts.path={GSM8K}", f"num_threads={os.cpu_count()}"
        )
    )
    run = tmp_path / "run"
    metrics = pd.read_csv(run / "metrics.csv")
    losses = metrics["train/loss"].dropna()
    assert len(losses) == 4
    assert losses.abs().max() < 1e4  # finite
    before, after = load_file(MODEL / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 0.9 * len(before)
    rollouts = pd.concat([pd.read_parquet(p) for p in sorted((run / "rollouts").glob("*.parquet"))])
    assert len(rollouts) == 256
    assert rollouts["reward"].notna().all()
    words = rollouts["completion"].str.findall(r"\b(?:the|to|of|is|we|so|and)\b").str.len()
    assert (words >= 2).mean() > 0.8  # English sentences, not noise
    gap = metrics["train/off_policy/fresh_gap_max"].dropna()
    assert gap.iloc[0] < 0.01  # engine and trainer agree on what the initial weights sampled
    assert json.loads((run / "summary.json").read_text())["engine"] == "vllm"
