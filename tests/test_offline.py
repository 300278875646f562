"""Record once, train many: the same data for every objective, and data made elsewhere."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from runs import metrics, sampled, weights

from datamodules.types import OptimizerStep
from modules.policy import Policy
from train import train

SmallRun = Callable[..., DictConfig]
SEEN: list[str] = []


class Watch(L.Callback):
    """Note a digest of each optimizer step's tensors."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: OptimizerStep, batch_idx: int
    ) -> None:
        digest = hashlib.sha256()
        for part in batch.micro_batches:
            for name in part.__slots__:
                value = getattr(part, name)
                digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        SEEN.append(digest.hexdigest())


def offline(small_run: SmallRun, path: Path | str, *overrides: str, directory: Path) -> DictConfig:
    """Return a run on recorded data: what only sampling needs is left out."""
    return small_run("datamodule=offline", f"datamodule.path={path}", *overrides, directory=directory)


@pytest.fixture
def recording(small_run: SmallRun, tmp_path: Path) -> Path:
    train(small_run("datamodule=rollouts_only", "rounds=2", directory=tmp_path / "recording"))
    return tmp_path / "recording"


def test_recording_changes_no_weight_and_samples_from_the_initial_ones(recording: Path) -> None:
    rows = sampled(recording)
    assert len(rows) == 64
    assert {row["snapshot"] for row in rows} == {0}
    assert {row["round"] for row in rows} == {0, 1}
    assert len({row["seed"] for row in rows}) == 64
    assert [p.name for p in (recording / "snapshots").iterdir()] == ["000000"]
    assert not any("eval/accuracy" in row and row["eval/accuracy"] and row["step"] for row in metrics(recording))


def test_four_objectives_see_byte_identical_data_and_learn_different_things(
    recording: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    seen, learned = {}, {}
    for objective in ("topr", "asymre", "oapl", "grpo"):
        SEEN.clear()
        cfg = offline(
            small_run, recording / "rollouts" / "*.parquet", f"objective={objective}", "rounds=2",
            directory=tmp_path / objective,
        )  # fmt: skip
        OmegaConf.set_struct(cfg, False)
        cfg.callbacks.watch = {"_target_": f"{__name__}.Watch"}
        train(cfg)
        seen[objective] = tuple(SEEN)
        learned[objective] = weights(tmp_path / objective)["model.embed_tokens.weight"].numpy().tobytes()
    assert len(seen["topr"]) == 4
    assert len(set(seen.values())) == 1
    assert len(set(learned.values())) == 4


def test_a_recorded_run_trained_offline_is_that_run(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("lag=1", "rounds=3", directory=tmp_path / "online"))
    files = tmp_path / "online" / "rollouts" / "*.parquet"
    train(offline(small_run, files, "rounds=3", directory=tmp_path / "offline"))
    torch.testing.assert_close(weights(tmp_path / "offline"), weights(tmp_path / "online"), rtol=0.0, atol=0.0)
    assert not (tmp_path / "offline" / "rollouts").exists()


def write_jsonl(path: Path, **changes: Any) -> Path:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + s), "reward": float(s == 1)} for i in range(4) for s in (0, 1)]
    rows[3] |= changes
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rollouts_made_elsewhere_train_objectives_that_need_no_logprobs(
    suffix: str, small_run: SmallRun, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl")
    if suffix == ".parquet":
        pd.read_json(data, lines=True, dtype={"completion": str}).to_parquet(tmp_path / "data.parquet")
    path = data.with_suffix(suffix)
    train(
        offline(small_run, path, "objective=asymre", "rounds=1", "datamodule.batch_size=3", directory=tmp_path / "run")
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["reward_last"]) == (3, 0.5)  # 3 + 3 + 2 sequences


def test_missing_logprobs_are_refused_or_computed_under_the_named_model(
    small_run: SmallRun, tmp_path: Path, make_policy: Callable[..., Policy], caplog: pytest.LogCaptureFixture
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl")
    with pytest.raises(ValueError, match="'topr' needs sampling_logprobs"):
        train(offline(small_run, data, "rounds=1", "datamodule.batch_size=8", directory=tmp_path / "refused"))
    make_policy(1).save_pretrained(tmp_path / "model")
    model = ["policy=hf", f"policy.path={tmp_path / 'model'}", f"datamodule.logprobs_from={tmp_path / 'model'}"]
    train(offline(small_run, data, *model, "rounds=1", "datamodule.batch_size=8", directory=tmp_path / "run"))
    assert any("they are not the sampler's own" in message for message in caplog.messages)
    row = pd.read_csv(tmp_path / "run" / "metrics.csv").dropna(subset="train/off_policy/log_ratio_max").iloc[0]
    assert row["train/off_policy/log_ratio_max"] < 1e-5  # the policy itself is the named model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": -1}, r"data.jsonl:4: reward must be in \[0, 1\]"),
        ({"reward": None}, r"data.jsonl:4: 'reward' must be int or float"),
        ({"completion": 5}, r"data.jsonl:4: 'completion' must be str"),
        ({"sampling_logprobs": [-0.5]}, r"data.jsonl:4: 1 sampling_logprobs need as many completion_ids"),
        ({"completion_ids": [5, 2], "sampling_logprobs": [-0.5]}, r"data.jsonl:4: 1 sampling_logprobs need as many"),
        ({"completion": "1" * 300}, r"data.jsonl:4: .* do not fit the window of 256"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_trained(
    changes: dict[str, Any], message: str, small_run: SmallRun, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", **changes)
    with pytest.raises(ValueError, match=message):
        train(offline(small_run, data, "objective=asymre", "rounds=1", directory=tmp_path / "run"))


def test_missing_files_and_too_many_rounds_are_refused(small_run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"nothing matches .*none\*\.parquet"):
        train(offline(small_run, tmp_path / "none*.parquet", directory=tmp_path / "run"))
    data = write_jsonl(tmp_path / "data.jsonl")
    with pytest.raises(ValueError, match=r"rounds is 3, but datamodule.path has 1 recorded rounds; set rounds=1"):
        train(offline(small_run, data, "objective=asymre", "rounds=3", directory=tmp_path / "run"))
