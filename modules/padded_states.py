"""Last states of packed tokens from a model that wants padded rows: attention implementations other than "packed"."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.types import PackedGroup


def padded_states(model: Any, input_ids: Tensor, groups: Sequence[PackedGroup]) -> Tensor:
    """Return the last state of each packed token, [N, D].

    Each sequence becomes a row, prompt then completion, right-padded. Right padding needs no attention mask: in a
    causal model no real token sees what stands behind it. A prompt's states are taken from its first sibling's row.

    Args:
        model: a Hugging Face model without its head.
        input_ids: [N].
        groups: how the N tokens are cut.
    """
    rows = list(_rows(groups))
    width = max(map(len, rows))
    index = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=input_ids.device)
    states = model(input_ids=input_ids[index], use_cache=False).last_hidden_state  # [B, T, D]
    found: dict[int, int] = {}  # packed place -> place in the padded rows
    for number, row in enumerate(rows):
        for column, place in enumerate(row):
            found.setdefault(place, number * width + column)
    places = torch.tensor([found[place] for place in range(len(input_ids))], device=input_ids.device)
    return states.flatten(0, 1).index_select(0, places)


def _rows(groups: Sequence[PackedGroup]) -> list[list[int]]:
    """Return the packed places of each sequence's tokens."""
    rows: list[list[int]] = []
    start = 0
    for group in groups:
        prompt = list(range(start, start + group.prompt_length))
        start += group.prompt_length
        for length in group.completion_lengths or (0,):
            rows.append(prompt + list(range(start, start + length)))
            start += length
    return rows
