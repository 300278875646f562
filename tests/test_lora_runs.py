"""Whole runs that train low-rank adapters: in one process and several, resumed, synced and exported both ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from peft import PeftModel
from runs import losses, sampled, small, torchrun, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from callbacks.export import export, export_adapter
from datamodules.canary import CanaryError
from modules.policy import Policy
from train import train

SmallRun = Callable[..., DictConfig]
ADAPTERS = ["policy/lora=adapters", "policy.lora.rank=4"]


def test_processes_train_resume_and_export_adapters_as_one_process_does(small_run: SmallRun, tmp_path: Path) -> None:
    settings = [*ADAPTERS, "rounds=4", "lag=4"]  # every sample is the initial policy's
    alone = tmp_path / "alone"
    train(small_run(*settings, directory=alone))
    start = load_file(alone / "snapshots" / "000000" / "model-00001-00001.safetensors")
    changed = {name for name, weight in weights(alone).items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in start if "_proj" in name}
    for trainer in ("ddp", "fsdp"):
        run = tmp_path / trainer
        ranked = [*small(*settings), f"trainer={trainer}", f"hydra.run.dir={run}"]
        torchrun(2, *ranked, "+callbacks.stop._target_=test_ranks.EndAfterThreeRounds")
        torchrun(2, *ranked, "resume=true")
        assert losses(run) == pytest.approx(losses(alone), abs=1e-5)
        torch.testing.assert_close(weights(run), weights(alone), rtol=0.0, atol=1e-4)
        assert_exports(run, run / "snapshots" / "000000")


def assert_exports(run: Path, base: Path) -> None:
    """Check that a run's last checkpoint leaves as its model, and as adapters that make it of the base."""
    checkpoint = run / "checkpoints" / "last.ckpt"
    expected = weights(run)
    export(checkpoint, run / "exported")
    torch.testing.assert_close(load_file(run / "exported" / "model.safetensors"), expected, rtol=0.0, atol=0.0)
    export_adapter(checkpoint, run / "adapter")
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run / "adapter"))
    merged = model.merge_and_unload().state_dict()
    torch.testing.assert_close({name: merged[name] for name in expected}, expected, rtol=0.0, atol=1e-6)


@pytest.mark.slow
def test_a_run_whose_engine_takes_adapters_alone_goes_on_elsewhere(small_run: SmallRun, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    settings = [*ADAPTERS, "policy.lora.sync=adapter", "lag=1"]
    vllm = ["engine=vllm", "engine.kv_cache_mb=64"]
    run, other = tmp_path / "run", tmp_path / "other"
    train(small_run(*settings, *vllm, "rounds=2", directory=run))
    assert not list(run.glob("snapshots/0*/model*"))
    assert_exports(run, run / "snapshots" / "base")
    checkpoint = run / "checkpoints" / "last.ckpt"
    train(small_run(*settings, *vllm, "rounds=3", f"ckpt_path={checkpoint}", directory=other))
    assert {row["snapshot"] for row in sampled(other)} == {1}
    assert_exports(other, other / "snapshots" / "base")


def test_adapters_that_never_reach_the_engine_stop_the_run(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "save_snapshot", Policy.save_base)
    with pytest.raises(CanaryError, match="snapshot 1"):
        train(small_run(*ADAPTERS, "lag=0"))


@pytest.mark.parametrize("engine", [["engine=transformers"], ["engine=vllm_server", "engine/transfer=gloo"]])
def test_an_engine_that_loads_whole_models_only_refuses_adapters_alone(engine: list[str], small_run: SmallRun) -> None:
    if engine[0] != "engine=transformers":
        pytest.importorskip("vllm")
    name = engine[0].removeprefix("engine=")
    with pytest.raises(ValueError, match=rf"policy\.lora\.sync=adapter: engine {name} loads whole models only"):
        train(small_run(*ADAPTERS, *engine, "policy.lora.sync=adapter"))


def test_a_checkpoint_without_adapters_says_so(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("rounds=1"))
    with pytest.raises(ValueError, match="has no adapters; leave out --adapter"):
        export_adapter(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "adapter")
