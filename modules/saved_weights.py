"""Write a model as a Hugging Face directory, a weight at a time: out of shards over ranks, and with adapters merged."""

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

from modules.lora import adapted_layers, factors, merged, write_adapter

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 2**30


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether some weight is spread over ranks."""
    return any(isinstance(p, DTensor) for p in model.parameters())


@torch.no_grad()
def save_weights(model: Any, directory: Path, scaling: float | None) -> None:
    """Write weights and configuration as `AutoModelForCausalLM.from_pretrained` loads them.

    Where weights are in shards all ranks must call it: one weight at a time is whole on all of them, and kept by the
    one that has the least so far, until a file is full. So no rank ever holds more than its share of the model, one
    file and one weight. Tied weights are written once.

    Args:
        model: a Hugging Face model, its layers with low-rank factors or without.
        directory: that every rank sees.
        scaling: of the factors' products, which are merged; None leaves the factors out.

    Raises:
        ValueError: its weights are stored under other names than it has.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_sharded(model) else (0, 1)
    layers = adapted_layers(model)
    weights = _weights(model)
    _check_names(model, weights)
    loads = [0] * size
    files: dict[str, str] = {}
    mine: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        owner = loads.index(min(loads))
        files[name] = f"model-{owner + 1:05d}-{loads[owner] // MAX_FILE_BYTES + 1:05d}.safetensors"
        loads[owner] += weight.numel() * weight.element_size()
        layer = layers.get(name.removesuffix(".weight")) if scaling is not None else None
        tensor = _whole(weight)
        pair = None if layer is None else tuple(map(_whole, factors(layer)))
        if owner == rank:
            if files[name] not in mine:
                _write(directory, mine)  # the one before is full
            if layer is not None and scaling is not None:
                tensor = merged(tensor, pair, scaling, is_transposed=layer.fan_in_fan_out)  # type: ignore[arg-type]
            mine.setdefault(files[name], {})[name] = tensor.detach().cpu().contiguous()
    _write(directory, mine)
    if rank == 0:
        index = {"metadata": {"total_size": sum(loads)}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
        model.config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)


@torch.no_grad()
def save_adapter(model: Any, directory: Path, scaling: float) -> None:
    """Write the low-rank factors alone as peft and vLLM load them; all ranks must call it where they are in shards.

    Args:
        model: a Hugging Face model with factors.
        directory: to write into.
        scaling: of their products.
    """
    pairs = {name: tuple(map(_whole, factors(layer))) for name, layer in adapted_layers(model).items()}
    if not is_sharded(model) or dist.get_rank() == 0:
        write_adapter(directory, pairs, scaling)  # type: ignore[arg-type]


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _weights(model: Any) -> dict[str, Tensor]:
    """Return what a model stores, under the names that it has without adapters."""
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    named = {**dict(model.named_parameters()), **buffers}
    return {name.replace(".base_layer.", "."): w for name, w in named.items() if ".lora_" not in name}


def _write(directory: Path, files: dict[str, dict[str, Tensor]]) -> None:
    """Write what is collected, and forget it."""
    while files:
        name, weights = files.popitem()
        save_file(weights, directory / name, metadata={"format": "pt"})
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())  # the directory's owner may be on another node


def _check_names(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Refuse a model that transformers stores under other names, or in other shapes, than it computes with."""
    plain = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
    if revert_weight_conversion(model, dict(plain)).keys() != plain.keys():
        raise ValueError(
            f"trainer=fsdp and policy.lora: a {model.config.model_type} model is stored otherwise than it computes, "
            "which snapshots from shards or with merged adapters cannot do; choose trainer=ddp without policy.lora"
        )
