"""What a finished run left on the disk, in a form that compares."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
RECORDED_ROUNDS = 5


def small(*overrides: str) -> list[str]:
    """Return the overrides of a run that takes a second or two: a tiny model, one-digit sums, few samples."""
    sizes = ["policy.hidden_size=64", "policy.num_layers=2", "policy.num_heads=2"]
    is_given = {"datamodule=offline", "datamodule=demonstrations"} & {*overrides}
    return [
        "engine=transformers",
        *([] if "policy=hf" in overrides else sizes),
        "prompts.digits=1",
        "prompts.num_train=40",
        "prompts.num_held_out=8",
        *([] if "datamodule=offline" in overrides else ["datamodule.prompts_per_round=8"]),
        *([] if is_given else ["datamodule.group_size=4"]),
        "datamodule.batch_size=16",
        "datamodule.sampling.max_tokens=4",
        "optimizer.lr=1e-3",
        "trainer.log_every_n_steps=1",
        "rounds=3",
        *overrides,
    ]


def offline(recording: Path) -> list[str]:
    """Return the overrides of a run that trains on the recording."""
    return [
        "datamodule=offline", f"datamodule.path=\'{recording}/*.parquet\'", f"rounds={RECORDED_ROUNDS}",
        "datamodule.max_tokens_per_micro_batch=60",
    ]  # fmt: skip


def torchrun(
    num_ranks: int, *arguments: str, max_restarts: int = 0, cwd: Path = ROOT, check: bool = True, timeout: float = 300.0
) -> str:
    """Run train.py in several processes and return what they printed.

    Raises:
        RuntimeError: they failed, with the end of what they printed, unless `check` is false.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, "--max-restarts", str(max_restarts), str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if check and done.returncode:
        raise RuntimeError(done.stdout[-6000:])
    return done.stdout


def command_line(process: psutil.Process) -> str:
    """Return how a process was started, nothing for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def sampled(directory: Path) -> list[Any]:
    """Return every stored rollout, without the seconds that verifying took."""
    files = sorted((directory / "rollouts").glob("*.parquet"))
    rows = pd.concat([pd.read_parquet(file) for file in files]).drop(columns="verifier_seconds")
    return json.loads(rows.to_json(orient="records", double_precision=15))


def metrics(directory: Path) -> list[Any]:
    """Return every row of the metrics, without seconds."""
    table = pd.read_csv(directory / "metrics.csv")
    table = table[[name for name in table.columns if not name.startswith("seconds/")]]
    return json.loads(table.to_json(orient="records", double_precision=15))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the final model's weights."""
    files = sorted((directory / "model").glob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def losses(directory: Path, column: str = "train/loss") -> list[float]:
    """Return each optimizer step's loss, or another of its values, where every step was logged."""
    return pd.read_csv(directory / "metrics.csv")[column].dropna().tolist()


def assert_same_run(a: Path, b: Path) -> None:
    """Check that two runs sampled, learned and recorded the same, to the last bit."""
    assert sampled(a) == sampled(b)
    assert metrics(a) == metrics(b)
    torch.testing.assert_close(weights(a), weights(b), rtol=0.0, atol=0.0)
