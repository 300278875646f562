"""Write a model whose weights are sharded over ranks as a Hugging Face directory: each rank writes a share of it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

INDEX = "model.safetensors.index.json"


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether some weight is spread over ranks."""
    return any(isinstance(p, DTensor) for p in model.parameters())


@torch.no_grad()
def save_sharded(model: Any, directory: Path) -> None:
    """Write weights and configuration as `AutoModelForCausalLM.from_pretrained` loads them; all ranks must call it.

    One weight at a time is whole on all ranks, and kept by the one that has the least so far: no rank ever holds more
    than its share of the model and one weight. Tied weights are written once.

    Args:
        model: a Hugging Face model with DTensors for weights.
        directory: that every rank sees.

    Raises:
        ValueError: its weights are stored under other names than it has.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    loads = [0] * size
    mine: dict[str, Tensor] = {}
    owners: dict[str, int] = {}
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    weights = {**dict(model.named_parameters()), **buffers}
    _check_names(model, weights)
    for name, weight in weights.items():
        owner = loads.index(min(loads))
        loads[owner] += weight.numel() * weight.element_size()
        owners[name] = owner
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if owner == rank:
            mine[name] = whole.detach().cpu().contiguous()
    path = directory / _file(rank, size)
    save_file(mine, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())  # the directory's owner may be on another node
    if rank == 0:
        weight_map = {name: _file(owner, size) for name, owner in owners.items()}
        index = {"metadata": {"total_size": sum(loads)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
        model.config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)


def _check_names(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Refuse a model that transformers stores under other names, or in other shapes, than it computes with."""
    plain = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
    if revert_weight_conversion(model, dict(plain)).keys() != plain.keys():
        raise ValueError(
            f"trainer=fsdp: a {model.config.model_type} model is stored otherwise than it computes, which snapshots "
            "from shards cannot do; choose trainer=ddp"
        )


def _file(rank: int, size: int) -> str:
    return f"model-{rank + 1:05d}-of-{size:05d}.safetensors"
