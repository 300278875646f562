"""Whole runs whose rollouts come from vLLM servers over HTTP."""

import json
from pathlib import Path

import pytest
from runs import small, torchrun

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
