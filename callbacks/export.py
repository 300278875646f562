"""Write the policy of a checkpoint, of one file or in shards, as a Hugging Face model directory.

python -m callbacks.export outputs/DATE/TIME/checkpoints/last.ckpt exported
"""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules.atomic import atomic_directory

log = logging.getLogger(__name__)

PREFIX = "policy.model."  # of the model's weights in a checkpoint


def export(checkpoint: Path, directory: Path, like: Path | None = None) -> None:
    """Write a checkpoint's policy with its configuration and tokenizer; the model is in memory once.

    Args:
        checkpoint: a file, or a directory of shards, by any number of processes.
        directory: to write.
        like: a model directory with the policy's configuration and tokenizer; by default a snapshot beside the
            checkpoint.

    Raises:
        ValueError: there is no checkpoint, no model directory like it, or something stands where it is to write.
    """
    checkpoint = checkpoint.resolve()
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint} is not there; expected one of a run's checkpoints/*.ckpt")
    if directory.exists():
        raise ValueError(f"{directory} is already there; choose another or delete it")
    like = like or _snapshot_beside(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(like, dtype="auto")
    weights = {PREFIX + name: weight for name, weight in model.state_dict().items()}
    if checkpoint.is_dir():
        dcp.load({"state_dict": weights}, checkpoint_id=checkpoint, no_dist=True)
    else:
        stored = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
        _copy(stored, weights, checkpoint)
    with atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(like).save_pretrained(temporary)
    log.info("wrote %s", directory)


def _copy(stored: Mapping[str, Tensor], weights: Mapping[str, Any], checkpoint: Path) -> None:
    missing = sorted(weights.keys() - stored.keys())
    if missing:
        raise ValueError(f"{checkpoint} does not hold {missing[0]}; expected a checkpoint of this model")
    for name, weight in weights.items():
        weight.copy_(stored[name])


def _snapshot_beside(checkpoint: Path) -> Path:
    found = sorted((checkpoint.parent.parent / "snapshots").glob("[0-9]*/config.json"))
    if not found:
        raise ValueError(
            f"no snapshots beside {checkpoint.parent}, which tell the model's configuration; name a directory that has "
            "it, such as the policy.path of the run, with --like"
        )
    return found[-1].parent


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--like", type=Path, help="a model directory with the policy's configuration and tokenizer")
    arguments = parser.parse_args()
    export(arguments.checkpoint, arguments.directory, arguments.like)
