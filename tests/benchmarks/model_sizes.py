"""Models of known size with random weights, saved as directories, and the arithmetic of what they cost."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from datamodules.types import RolloutBatch
from modules.tiny_policy import character_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "0.5M": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    "8M": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 5},
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


def make_model(size: str, vocabulary: int) -> LlamaForCausalLM:
    """Return a Llama with random weights and tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **SIZES[size],
    )
    return LlamaForCausalLM(config)


def save_model(directory: Path, size: str, vocabulary: int) -> Path:
    """Save a model with a tokenizer and return its directory."""
    make_model(size, vocabulary).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


def step_flops(model: Any, batches: tuple[RolloutBatch, ...]) -> float:
    """Return the multiplications and additions that one forward and backward pass need, nothing computed twice.

    6 a weight and token outside the head, 6 a weight and completion token in it, 12 a layer, width and attended pair.
    """
    head = model.get_output_embeddings().weight.numel()
    embeddings = model.get_input_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - embeddings
    config = model.config
    flops = 0.0
    for batch in batches:
        pairs = 0
        for group in batch.groups:
            pairs += group.prompt_length * (group.prompt_length + 1) // 2
            pairs += sum(c * group.prompt_length + c * (c + 1) // 2 for c in group.completion_lengths)
        width = config.num_attention_heads * config.hidden_size // config.num_attention_heads
        flops += 6.0 * body * batch.input_ids.numel() + 6.0 * head * int(batch.completion_mask.sum())
        flops += 12.0 * config.num_hidden_layers * width * pairs
    return flops


def matmul_rate(dtype: torch.dtype = torch.float32) -> float:
    """Return the machine's measured operations a second in large matrix products."""
    import time

    a, b = torch.randn(2048, 2048, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    a @ b
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2.0 * 2048**3 / min(seconds)
