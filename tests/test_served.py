"""Whole runs whose rollouts come from vLLM servers over HTTP."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from runs import small, torchrun, weights
from safetensors.torch import load_file

from datamodules.store import read_rollouts

KEY = "a-key-that-nobody-should-see"


def test_two_processes_train_on_what_a_server_samples_and_no_artefact_holds_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    settings = [
        "engine=vllm_server",
        "engine.kv_cache_mb=64",
        "rounds=2",
        "lag=0",
        "logger=wandb",
        f"hydra.run.dir={run}",
    ]
    printed = torchrun(2, *(s for s in small(*settings) if s != "engine=transformers"), "trainer=ddp")
    rollouts = [r for file in sorted((run / "rollouts").iterdir()) for r in read_rollouts(file)]
    assert [r.snapshot for r in rollouts] == [0] * 32 + [1] * 32
    assert not [r for r in rollouts if r.failure]
    assert json.loads((run / "summary.json").read_text())["engine"] == "vllm_server"
    assert "server 0 is left out" not in printed
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in files)
    assert any(file.name == "server-0.log" for file in files)
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert KEY not in printed


@pytest.mark.slow
def test_shards_publish_adapters_alone_that_two_servers_of_the_run_take(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    run = tmp_path / "run"
    settings = ["engine=vllm_server", "engine.kv_cache_mb=64", "engine.num_servers=2", "engine.devices=[0,1]"]
    settings += ["policy/lora=adapters", "policy.lora.sync=adapter", "rounds=3", "lag=0", f"hydra.run.dir={run}"]
    printed = torchrun(2, *(s for s in small(*settings) if s != "engine=transformers"), "trainer=fsdp")
    rollouts = [r for file in sorted((run / "rollouts").iterdir()) for r in read_rollouts(file)]
    assert [r.snapshot for r in rollouts] == [0] * 32 + [1] * 32 + [2] * 32
    assert "is left out" not in printed
    gaps = pd.read_csv(run / "metrics.csv")["train/off_policy/fresh_gap_max"].dropna()
    assert len(gaps) >= 3
    assert gaps.max() < 1e-3  # what the servers sampled from is what trains
    assert not list(run.glob("snapshots/0*/model*"))
    assert {file.name for file in (run / "servers").iterdir()} == {"server-0.log", "server-1.log"}


@pytest.mark.slow
def test_shards_computed_in_bfloat16_learn_from_a_bfloat16_engine(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["trainer.strategy.param_dtype=bfloat16", "engine.dtype=bfloat16", "engine.canary_tolerance=1.0"]
    torchrun(2, *small(*settings, "lag=0"), "trainer=fsdp", f"hydra.run.dir={run}")
    start = load_file(run / "snapshots" / "000002" / "model-00001-00001.safetensors")
    assert all(weight.dtype == torch.float32 for weight in {**start, **weights(run)}.values())  # the shards' own type
    changes = [(weights(run)[name] - weight).abs().max().item() for name, weight in start.items()]
    assert 0.0 < max(changes) < 0.01  # two steps of 1e-3
    gaps = pd.read_csv(run / "metrics.csv")["train/off_policy/fresh_gap_mean"].dropna()
    assert gaps.max() < 1e-6  # a computation in float32 would differ from the engine's


@pytest.mark.slow
def test_the_whole_quickstart_learns_in_two_processes_from_a_server(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    run = tmp_path / "run"
    settings = ["experiment=quickstart", "trainer=ddp", "engine=vllm_server", f"hydra.run.dir={run}"]
    torchrun(2, *settings, timeout=2400.0)
    summary = json.loads((run / "summary.json").read_text())
    rounds = [read_rollouts(file) for file in sorted((run / "rollouts").iterdir())]
    assert [{r.snapshot for r in rollouts} for rollouts in rounds] == [{max(0, n - 1)} for n in range(25)]
    assert not [r for rollouts in rounds for r in rollouts if r.failure]
    assert summary["engine"] == "vllm_server"
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.25
