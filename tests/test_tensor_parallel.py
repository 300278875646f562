"""Processes that split layers between them train what one process trains."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from omegaconf import DictConfig
from runs import offline, small, torchrun, weights
from transformers import AutoModelForCausalLM, GPT2Config, PhiConfig, Qwen3Config

from callbacks.sharded_strategy import ShardedStrategy
from modules.lora import LoRA
from modules.policy import Policy
from modules.tensor_parallel import split_layers
from modules.tiny_policy import tiny_policy
from train import train

SmallRun = Callable[..., DictConfig]
SPLIT = ["trainer=fsdp", "trainer.strategy.tensor_parallel_size=2"]


def training_metrics(run: Path) -> pd.DataFrame:
    table = pd.read_csv(run / "metrics.csv")
    return table[[name for name in table.columns if name.startswith("train/")]].dropna(how="all").reset_index(drop=True)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, ["objective=topr", "policy.tie_word_embeddings=true"]),
        pytest.param(
            4,
            ["objective=oapl", "policy.tie_word_embeddings=false", "policy_module.max_grad_norm=0.01"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_split_layers_learn_what_whole_ones_learn_in_pairs_and_pairs_of_pairs(
    num_ranks: int, settings: list[str], recording: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    torchrun(num_ranks, *small(*offline(recording), *settings), *SPLIT, f"hydra.run.dir={tmp_path}/split")
    train(small_run(*offline(recording), *settings, directory=tmp_path / "whole"))
    split, whole = training_metrics(tmp_path / "split"), training_metrics(tmp_path / "whole")
    pd.testing.assert_frame_equal(split, whole, rtol=1e-3, atol=1e-4)
    assert split["train/loss"].tolist() == pytest.approx(whole["train/loss"].tolist(), abs=1e-5)
    assert weights(tmp_path / "split").keys() == weights(tmp_path / "whole").keys()
    torch.testing.assert_close(weights(tmp_path / "split"), weights(tmp_path / "whole"), rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_grouped_queries_and_biases_are_split_too(recording: Path, small_run: SmallRun, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny(hidden_size=128, num_heads=4, num_layers=2).model.config
    config.update({"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    Policy(model, tiny().tokenizer).save_pretrained(tmp_path / "model")
    settings = small(*offline(recording), "policy=hf", f"policy.path={tmp_path}/model")
    torchrun(2, *settings, *SPLIT, f"hydra.run.dir={tmp_path}/split")
    train(small_run(*offline(recording), "policy=hf", f"policy.path={tmp_path}/model", directory=tmp_path / "whole"))
    assert any(name.endswith("k_proj.bias") for name in weights(tmp_path / "whole"))
    pd.testing.assert_frame_equal(
        training_metrics(tmp_path / "split"), training_metrics(tmp_path / "whole"), rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(weights(tmp_path / "split"), weights(tmp_path / "whole"), rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_layers_split_otherwise(recording: Path, small_run: SmallRun, tmp_path: Path) -> None:
    settings = [*small(*offline(recording)), f"hydra.run.dir={tmp_path}/run"]
    stop = "+callbacks.stop._target_=test_ranks.EndAfterThreeRounds"
    torchrun(2, *settings, *SPLIT, stop)
    torchrun(2, *settings, "trainer=fsdp", "resume=true")
    train(small_run(*offline(recording), directory=tmp_path / "whole"))
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "whole"), rtol=0.0, atol=1e-4)


def tiny(**changes: int) -> Policy:
    sizes = {"hidden_size": 96, "num_layers": 1, "num_heads": 3, "intermediate_size": 96, "window": 64} | changes
    return tiny_policy(**sizes, tie_word_embeddings=True)


def with_adapters() -> Policy:
    return tiny_policy(64, 1, 2, 96, 64, True, LoRA(4, 8.0, "all-linear", "merged"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny().model, "a llama model has 3 attention heads, 3 key-value heads, which 2 ranks cannot share"),
        (lambda: tiny(hidden_size=64, num_heads=2, intermediate_size=97).model, "has 97 intermediate_size, which 2"),
        (lambda: with_adapters().model, "a llama model with policy.lora cannot be split"),
        (
            lambda: AutoModelForCausalLM.from_config(PhiConfig(num_hidden_layers=1, qk_layernorm=True)),
            "a phi model has weights between those that are split (self_attn.q_layernorm, self_attn.k_layernorm)",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=1, hidden_size=64)),
            "a qwen3 model has no plan of that kind (replicated_with_grad_allreduce)",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(GPT2Config(n_layer=1)),
            "a gpt2 model has no plan of that kind (none",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        split_layers(make(), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    assert str(refused.value).startswith("trainer.strategy.tensor_parallel_size: ")


def test_ranks_that_cannot_be_grouped_are_refused() -> None:
    strategy = ShardedStrategy(3, "float32", True, False, True)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 3, which 2 processes of a node cannot be grouped"):
        strategy.setup_environment()
    with pytest.raises(ValueError, match=r"trainer\.strategy\.tensor_parallel_size must be 1 or more, got 0"):
        ShardedStrategy(0, "float32", True, False, True)
