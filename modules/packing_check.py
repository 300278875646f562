"""Prove on a few tokens that a model computes packed sequences as it computes each alone."""

from typing import Any

import torch

from datamodules.types import PackedGroup
from modules.packed_attention import plan_attention

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
GROUPS = (PackedGroup(3, (2, 4, 2)), PackedGroup(2, (3,)))
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the states' norm


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Compare the states of packed tokens with those of one sequence at a time.

    Args:
        model: a Hugging Face causal LM with the attention implementation "packed".

    Raises:
        ValueError: they differ, as where a layer is no attention or hides it from transformers' interface.
    """
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise ValueError(_message(config.model_type, f"has layers of type {', '.join(sorted(unknown))}"))
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(16, device=device) % config.vocab_size
    sequences, positions = _sequences()
    try:
        packed = model.base_model(
            input_ids=ids[None],
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            packing=plan_attention(GROUPS, device),
        ).last_hidden_state[0]
    except (TypeError, ValueError, RuntimeError) as error:  # what a model that knows nothing of plans raises
        raise ValueError(_message(config.model_type, f"could not run it ({error})")) from error
    for places in sequences:
        alone = model.base_model(input_ids=ids[places][None], use_cache=False).last_hidden_state[0]
        difference = ((packed[places] - alone).norm() / alone.norm()).item()
        if not difference < TOLERANCE[packed.dtype]:
            raise ValueError(_message(config.model_type, f"gives states that differ by {difference:.1%}"))


def _sequences() -> tuple[list[list[int]], list[int]]:
    """Return the packed places of each sequence, and each packed token's position."""
    sequences: list[list[int]] = []
    positions: list[int] = []
    for group in GROUPS:
        prompt = list(range(len(positions), len(positions) + group.prompt_length))
        positions += range(group.prompt_length)
        for length in group.completion_lengths:
            sequences.append(prompt + list(range(len(positions), len(positions) + length)))
            positions += range(group.prompt_length, group.prompt_length + length)
    return sequences, positions


def _message(model_type: str, fault: str) -> str:
    return (
        f"policy.attn_implementation: a {model_type} model cannot train on packed sequences: it {fault}; choose "
        "policy.attn_implementation=sdpa (or eager), which pads"
    )
