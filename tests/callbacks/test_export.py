"""A checkpoint's policy leaves as a Hugging Face model, whatever shape the checkpoint has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from runs import small, torchrun, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks.export import export
from train import train

SmallRun = Callable[..., DictConfig]


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(
    "trainer",
    ["default", "fsdp", "fsdp trainer.strategy.save_distributed_checkpoint=false"],
    ids=["1", "shards", "whole"],
)
def test_the_newest_checkpoint_exports_the_model_that_the_run_ended_with(
    trainer: str, tied: str, small_run: SmallRun, tmp_path: Path
) -> None:
    settings = ["rounds=1", f"policy.tie_word_embeddings={tied}"]
    if trainer == "default":
        train(small_run(*settings))
    else:
        torchrun(2, *small(*settings), *f"trainer={trainer}".split(), f"hydra.run.dir={tmp_path}/run")
    expected = weights(tmp_path / "run")
    spoil(tmp_path / "run" / "snapshots")
    export(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    torch.testing.assert_close(exported, expected, rtol=0.0, atol=0.0)
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template


def spoil(directory: Path) -> None:
    """Set all weights to zero in the models below a directory, which tell an export no more than the configuration."""
    for file in directory.glob("**/model*.safetensors"):
        zeros = {name: torch.zeros_like(weight) for name, weight in load_file(file).items()}
        save_file(zeros, file, metadata={"format": "pt"})


def test_what_is_missing_is_said_and_nothing_is_overwritten(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("rounds=1"))
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="is not there; expected one of a run's checkpoints"):
        export(tmp_path / "none.ckpt", tmp_path / "exported")
    with pytest.raises(ValueError, match="is already there; choose another"):
        export(checkpoint, tmp_path / "run")
    (tmp_path / "run" / "snapshots").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="--like"):
        export(checkpoint, tmp_path / "exported")
    expected = weights(tmp_path / "run")
    spoil(tmp_path / "run" / "model")
    export(checkpoint, tmp_path / "exported", tmp_path / "run" / "model")
    torch.testing.assert_close(load_file(tmp_path / "exported" / "model.safetensors"), expected)


def test_a_checkpoint_of_another_model_is_refused(small_run: SmallRun, tmp_path: Path) -> None:
    train(small_run("rounds=1"))
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    del checkpoint["state_dict"]["policy.model.model.norm.weight"]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"does not hold policy\.model\.model\.norm\.weight"):
        export(tmp_path / "other.ckpt", tmp_path / "exported", tmp_path / "run" / "model")
