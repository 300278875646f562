"""Clip and step parameters whose shards are spread over different ranks, which no single operation takes together."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters that one operation can take together: those that are spread over the same ranks."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a norm, in place, and return the norm that they had.

    Args:
        parameters: those without a gradient are left out.
        max_norm: largest norm.
    """
    groups = by_mesh(p for p in parameters if p.grad is not None)
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(whole)) if len(whole) > 1 else sum(whole, torch.zeros(()))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def step_by_mesh(optimizer: Optimizer) -> Optimizer:
    """Have an optimizer step its groups in parts; at all other times, as in a checkpoint, they are whole.

    One whose parameters are all spread alike is left as it is.
    """
    if all(len(by_mesh(group["params"])) == 1 for group in optimizer.param_groups):
        return optimizer
    whole: list[list[dict[str, Any]]] = []

    def divide(*_: Any) -> None:
        whole.append(optimizer.param_groups)
        optimizer.param_groups = [
            {**group, "params": part} for group in optimizer.param_groups for part in by_mesh(group["params"])
        ]

    def join(*_: Any) -> None:
        optimizer.param_groups = whole.pop()

    optimizer.register_step_pre_hook(divide)
    optimizer.register_step_post_hook(join)
    return optimizer
