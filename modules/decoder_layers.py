"""The repeated layers of a Hugging Face model: what is compiled and sharded one by one."""

from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers, in their order.

    Args:
        model: a Hugging Face model, which names their classes.

    Raises:
        ValueError: it has none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"policy: {type(model).__name__} names no decoder layers (_no_split_modules)")
    return layers
