"""Only the forward passes that the maths needs: each trained token passes the model once, forward and backward."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from datamodules.types import OptimizerStep
from train import train

SmallRun = Callable[..., DictConfig]
COUNTS: Counter[str] = Counter()


class Count(L.Callback):
    """Count the tokens that pass the trained model."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        embedding = pl_module.policy.model.get_input_embeddings()
        embedding.register_forward_hook(self._forward)
        embedding.register_full_backward_hook(self._backward)

    @staticmethod
    def _forward(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        COUNTS["forward" if torch.is_grad_enabled() else "probes"] += inputs[0].numel()

    @staticmethod
    def _backward(module: Any, to_inputs: Any, to_outputs: tuple[torch.Tensor]) -> None:
        COUNTS["backward"] += to_outputs[0].shape[:2].numel()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: OptimizerStep, batch_idx: int
    ) -> None:
        for part in batch.micro_batches:
            COUNTS["completion tokens"] += int(part.completion_mask.sum())
            COUNTS["prompt tokens"] += sum(group.prompt_length for group in part.groups)


@pytest.mark.parametrize("objective", ["topr", "asymre", "oapl", "grpo"])
def test_one_forward_and_one_backward_for_each_trained_token(
    objective: str, small_run: SmallRun, tmp_path: Path
) -> None:
    cfg = small_run(f"objective={objective}", "rounds=2")
    OmegaConf.set_struct(cfg, False)
    cfg.callbacks.count = {"_target_": f"{__name__}.Count"}
    COUNTS.clear()
    train(cfg)
    rows = pd.concat(pd.read_parquet(p) for p in (tmp_path / "run" / "rollouts").glob("*.parquet"))
    prompts = rows.drop_duplicates(["round", "group_id"])["prompt_ids"].str.len().sum()  # one for each group
    assert COUNTS["completion tokens"] == rows["completion_ids"].str.len().sum()
    assert COUNTS["prompt tokens"] == prompts
    assert COUNTS["forward"] == COUNTS["backward"] == COUNTS["completion tokens"] + COUNTS["prompt tokens"]
    assert COUNTS["probes"] == 3 * 96  # one probe a published snapshot


def test_the_policys_entropy_is_logged_on_demand(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("rounds=1", "policy_module.log_entropy=true", "datamodule.max_tokens_per_micro_batch=40"))
    first = pd.read_csv(tmp_path / "run" / "metrics.csv").dropna(subset="train/entropy").iloc[0]
    assert 4.0 < first["train/entropy"] <= 4.62  # random weights are near log(101), the whole vocabulary
