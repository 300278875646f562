"""Last states of packed tokens from a model whose attention implementation is "packed"."""

from typing import Any

from torch import Tensor

from datamodules.types import PackedGroup
from modules.packed_attention import plan_attention


def packed_states(model: Any, input_ids: Tensor, position_ids: Tensor, groups: tuple[PackedGroup, ...]) -> Tensor:
    """Return the last state of each packed token from a model whose attention takes a plan, [N, D].

    Args:
        model: a Hugging Face model without its head.
        input_ids: [N].
        position_ids: [N].
        groups: how the N tokens are cut.
    """
    plan = plan_attention(groups, input_ids.device)
    output = model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packing=plan)
    return output.last_hidden_state[0]
