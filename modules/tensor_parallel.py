"""Split the matrices of decoder layers over ranks that see the same tokens."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from modules.decoder_layers import decoder_layers
from modules.lora import adapted_layers

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
OF_A_LAYER = "layers.*."


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Split each layer as its architecture's own plan in transformers says; embeddings, norms and head stay whole.

    Args:
        model: a Hugging Face model.
        mesh: of the ranks that share a layer, of one dimension.

    Raises:
        ValueError: the model's architecture, its sizes or its adapters do not allow that.
    """
    plan = _plan(model, mesh.size())
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, {name: STYLES[style]() for name, style in plan.items()})


def _plan(model: Any, size: int) -> dict[str, str]:
    """Return how each matrix of a layer is split."""
    config = model.config.get_text_config()
    whole: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {n.removeprefix(OF_A_LAYER): style for n, style in whole.items() if n.startswith(OF_A_LAYER)}
    unknown = sorted(set(plan.values()) - STYLES.keys())
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 0,
    }
    uneven = [f"{value} {what}" for what, value in sizes.items() if value % size]
    if not plan or unknown:
        raise _refused(config, f"has no plan of that kind ({', '.join(unknown) or 'none at all'})")
    if uneven:
        raise _refused(config, f"has {', '.join(uneven)}, which {size} ranks cannot share evenly")
    if adapted_layers(model):
        raise _refused(config, "with policy.lora cannot be split")
    if whole_parts := _between(model, plan):
        raise _refused(config, f"has weights between those that are split ({', '.join(whole_parts)})")
    return plan


def _between(model: Any, plan: dict[str, str]) -> list[str]:
    """Return what has weights inside the split blocks and is not split: each rank would see a part of its gradient."""
    blocks = tuple(f"{name.rpartition('.')[0]}." for name in plan)
    modules = decoder_layers(model)[0].named_modules()
    return [n for n, m in modules if n.startswith(blocks) and n not in plan and [*m.parameters(recurse=False)]]


def _refused(config: Any, why: str) -> ValueError:
    return ValueError(f"trainer.strategy.tensor_parallel_size: a {config.model_type} model {why}; set it to 1")
