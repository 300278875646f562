"""A policy that is to be sharded has values on rank 0 alone, until each rank gets its share of them."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from runs import small, torchrun
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from callbacks import sharded_strategy
from callbacks.sharded_strategy import ShardedStrategy
from modules.policy import Policy


class Look(L.Callback):
    """Save what each rank has before the policy is sharded, and afterwards."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        policy: Policy = pl_module.policy  # type: ignore[assignment]
        self.before = (policy.is_skeleton, policy.stop_token_ids, policy.window)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tensors = {**dict(pl_module.policy.named_parameters()), **dict(pl_module.policy.named_buffers())}  # type: ignore[union-attr,operator]
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        torch.save((self.before, whole), f"{trainer.default_root_dir}/{trainer.global_rank}.pt")


def test_every_rank_gets_its_share_of_what_rank_0_loaded_and_nothing_else(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    policy = make_policy(tied=False)
    policy.model.generation_config = GenerationConfig(eos_token_id=[2, 7])
    policy.save_pretrained(tmp_path / "model")
    expected = Policy.from_pretrained(str(tmp_path / "model"), "bfloat16", False, "packed")
    settings = [
        "policy=hf", f"policy.path={tmp_path}/model", "policy.dtype=bfloat16", "policy.gradient_checkpointing=true",
        "policy/lora=adapters", "engine.dtype=bfloat16", "engine.canary_tolerance=1.0",
    ]  # fmt: skip
    looking = "+callbacks.look._target_=test_sharded_start.Look"
    torchrun(2, *small(*settings, "rounds=1"), "trainer=fsdp", looking, f"hydra.run.dir={tmp_path}/run")
    for rank in range(2):
        (is_skeleton, stop_token_ids, window), whole = torch.load(tmp_path / "run" / f"{rank}.pt")
        assert is_skeleton == (rank == 1)
        assert (stop_token_ids, window) == (expected.stop_token_ids, expected.window)
        assert {2, 7} <= set(stop_token_ids)
        held = {name.replace(".base_layer", ""): t for name, t in whole.items() if ".lora_" not in name}
        assert held.pop("lora_scaling") == 2.0
        loaded = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
        assert held.keys() == loaded.keys()
        for name, tensor in loaded.items():
            assert tensor.dtype == held[name].dtype
            assert torch.equal(tensor, held[name]), name
        first = [tensor for name, tensor in whole.items() if ".lora_A." in name]
        assert all(tensor.dtype == torch.float32 and 0.0 < tensor.abs().max() < 1.0 for tensor in first)
        assert not [name for name, tensor in whole.items() if ".lora_B." in name and tensor.any()]


def test_other_ranks_are_given_no_values_and_rank_0_and_other_strategies_all(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ShardedStrategy(1, "float32", True, False, True)
    made = sharded_strategy.make_policy
    assert not made(strategy, make_policy).is_skeleton
    monkeypatch.setattr(sharded_strategy, "rank", lambda: 1)
    assert all(tensor.is_meta for tensor in made(strategy, make_policy).parameters())
    assert not made(L.pytorch.strategies.DDPStrategy(), make_policy).is_skeleton
