"""Write the policy of a checkpoint, of one file or in shards, as a Hugging Face model directory.

python -m callbacks.export outputs/DATE/TIME/checkpoints/last.ckpt exported
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks.checkpoint_weights import PREFIX, CheckpointWeights
from datamodules.atomic import atomic_directory
from modules.lora import merged, write_adapter

log = logging.getLogger(__name__)


def export(checkpoint: Path, directory: Path, like: Path | None = None) -> None:
    """Write a checkpoint's policy, adapters merged, with its configuration and tokenizer; it is in memory once.

    Args:
        checkpoint: a file, or a directory of shards, by any number of processes.
        directory: to write.
        like: a model directory with the policy's configuration and tokenizer; by default a snapshot beside the
            checkpoint.

    Raises:
        ValueError: there is no checkpoint, no model directory like it, or something stands where it is to write.
    """
    stored = _open(checkpoint, directory)
    like = like or _snapshot_beside(stored.path)
    model: Any = AutoModelForCausalLM.from_pretrained(like, dtype="auto")
    weights = model.state_dict()
    stored.read_into({_stored_name(name, stored): weight for name, weight in weights.items()})
    pairs = stored.factors()
    scaling = stored.scaling() if pairs else 0.0
    for name, pair in pairs.items():
        is_transposed = type(model.get_submodule(name)).__name__ == "Conv1D"
        weight = weights[f"{name}.weight"]
        weight.copy_(merged(weight, pair, scaling, is_transposed=is_transposed))
    with atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(like).save_pretrained(temporary)
    log.info("wrote %s", directory)


def export_adapter(checkpoint: Path, directory: Path) -> None:
    """Write a checkpoint's low-rank adapters alone, as peft and vLLM load them onto the model that they started from.

    Raises:
        ValueError: there is no checkpoint, it has no adapters, or something stands where it is to write.
    """
    stored = _open(checkpoint, directory)
    pairs = stored.factors()
    if not pairs:
        raise ValueError(f"{checkpoint} has no adapters; leave out --adapter to write the model")
    with atomic_directory(directory) as temporary:
        write_adapter(temporary, pairs, stored.scaling())
    log.info("wrote %s", directory)


def _open(checkpoint: Path, directory: Path) -> CheckpointWeights:
    stored = CheckpointWeights(checkpoint.resolve())
    if directory.exists():
        raise ValueError(f"{directory} is already there; choose another or delete it")
    return stored


def _stored_name(name: str, stored: CheckpointWeights) -> str:
    """Return a weight's name in a checkpoint, where a layer that has adapters keeps its own below them."""
    layer, _, last = name.rpartition(".")
    adapted = f"{PREFIX}{layer}.base_layer.{last}"
    return adapted if adapted in stored else PREFIX + name


def _snapshot_beside(checkpoint: Path) -> Path:
    snapshots = checkpoint.parent.parent / "snapshots"
    found = [*snapshots.glob("base/config.json"), *sorted(snapshots.glob("[0-9]*/config.json"))]
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
    parser.add_argument("--adapter", action="store_true", help="write the low-rank adapters alone")
    arguments = parser.parse_args()
    if arguments.adapter:
        export_adapter(arguments.checkpoint, arguments.directory)
    else:
        export(arguments.checkpoint, arguments.directory, arguments.like)
