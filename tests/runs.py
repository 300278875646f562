"""What a finished run left on the disk, in a form that compares."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file


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
    return load_file(directory / "model" / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Check that two runs sampled, learned and recorded the same, to the last bit."""
    assert sampled(a) == sampled(b)
    assert metrics(a) == metrics(b)
    torch.testing.assert_close(weights(a), weights(b), rtol=0.0, atol=0.0)
