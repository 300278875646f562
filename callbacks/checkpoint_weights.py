"""The policy's weights in a checkpoint, of one file or in shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

PREFIX = "policy.model."  # of the model's weights
SCALING = "policy.lora_scaling"
NODE = "state_dict."


class CheckpointWeights:
    """Reads weights by name, of as many processes as wrote them.

    Args:
        checkpoint: a file, or a directory of shards.

    Raises:
        ValueError: there is no checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        if not checkpoint.exists():
            raise ValueError(f"{checkpoint} is not there; expected one of a run's checkpoints/*.ckpt")
        self.path = checkpoint
        self._file: dict[str, Tensor] | None = None
        if checkpoint.is_dir():
            metadata: Any = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
            stored = {key.removeprefix(NODE): entry for key, entry in metadata.items() if key.startswith(NODE)}
            self._sizes = {key: (entry.size, entry.properties.dtype) for key, entry in stored.items()}
        else:
            self._file = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
            self._sizes = {key: (weight.shape, weight.dtype) for key, weight in self._file.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def read_into(self, weights: Mapping[str, Tensor]) -> None:
        """Fill tensors with the weights of those names.

        Raises:
            ValueError: one is not there.
        """
        missing = sorted(weights.keys() - self._sizes.keys())
        if missing:
            raise ValueError(f"{self.path} does not hold {missing[0]}; expected a checkpoint of this model")
        if self._file is None:
            dcp.load({"state_dict": dict(weights)}, checkpoint_id=self.path, no_dist=True)
            return
        for name, weight in weights.items():
            weight.copy_(self._file[name])

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the low-rank factors, A and B by the names of their layers; none where there are none."""
        names = [name for name in self._sizes if name.startswith(PREFIX) and ".lora_" in name]
        tensors = {name: torch.empty(self._sizes[name][0], dtype=self._sizes[name][1]) for name in names}
        self.read_into(tensors)
        layers = sorted({name.partition(".lora_")[0] for name in names})
        found = {}
        for layer in layers:
            (a,) = [t for name, t in tensors.items() if name.startswith(f"{layer}.lora_A.")]
            (b,) = [t for name, t in tensors.items() if name.startswith(f"{layer}.lora_B.")]
            found[layer.removeprefix(PREFIX)] = (a, b)
        return found

    def scaling(self) -> float:
        """Return what counts the factors' products."""
        value = torch.zeros((), dtype=torch.float64)
        self.read_into({SCALING: value})
        return value.item()
