"""Prove on a few tokens that a model computes packed sequences as it computes padded ones."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from datamodules.types import PackedGroup
from modules.packed_attention import NAME, packed_attention
from modules.packed_states import packed_states
from modules.padded_states import padded_states

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
GROUPS = (PackedGroup(9, (16, 5, 16, 11)), PackedGroup(12, (20,)))
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}  # of the states' norm
RECORDING = "packed_recording"


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Compare the states of packed tokens with those of padded rows under transformers' own attention.

    Args:
        model: a Hugging Face causal LM with the attention implementation "packed".

    Raises:
        ValueError: they differ, as where a layer is no attention or hides it from transformers' interface, or a sliding
            window does not reach the attention.
    """
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if unknown:
        raise ValueError(refusal(config.model_type, f"has layers of type {', '.join(sorted(unknown))}"))
    size = sum(g.prompt_length + sum(g.completion_lengths) for g in GROUPS)
    ids = (17 + 2999 * torch.arange(size, device=model.get_input_embeddings().weight.device)) % config.vocab_size
    windows: list[int | None] = []

    def recording(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        windows.append(options.get("sliding_window"))
        return packed_attention(*arguments, **options)

    AttentionInterface.register(RECORDING, recording)
    try:
        model.set_attn_implementation(RECORDING)
        packed = packed_states(model.base_model, ids, _positions(ids.device), GROUPS)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        padded = padded_states(model.base_model, ids, GROUPS)
        model.set_attn_implementation(NAME)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:  # of models without the interface
        raise ValueError(refusal(config.model_type, f"could not run it ({error})")) from error
    difference = ((packed - padded).norm() / padded.norm()).item()
    if not difference < TOLERANCE[packed.dtype]:
        raise ValueError(refusal(config.model_type, f"gives states that differ by {difference:.1%}"))
    if windows != _windows(config):
        raise ValueError(refusal(config.model_type, "does not tell its attention which layers have a sliding window"))


def _positions(device: torch.device) -> Tensor:
    positions: list[int] = []
    for group in GROUPS:
        positions += range(group.prompt_length)
        for length in group.completion_lengths:
            positions += range(group.prompt_length, group.prompt_length + length)
    return torch.tensor(positions, device=device)


def _windows(config: Any) -> list[int | None]:
    """Return the window of each layer as the config says; None where there is none."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def refusal(model_type: str, fault: str) -> str:
    """Return the message for a model that cannot be packed."""
    return (
        f"attn_implementation: a {model_type} model cannot train on packed sequences: it {fault}; choose "
        "policy.attn_implementation=sdpa or eager, which pad (for datamodule.logprobs_from: "
        "datamodule.scorer.attn_implementation)"
    )
