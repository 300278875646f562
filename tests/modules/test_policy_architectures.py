"""Log-probs agree with the model's own logits on architectures that scale, cap or drop something."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from datamodules.types import RolloutBatch
from modules.policy import Policy
from modules.tiny_policy import character_tokenizer

VOCABULARY = 101
LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
OPT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
SCALED = {
    "Gemma2": {"final_logit_softcapping": 0.5, "head_dim": 16, "sliding_window": 8},
    "Gemma3Text": {"final_logit_softcapping": 0.5, "head_dim": 16, "sliding_window": 8},
    "Granite": {"logits_scaling": 7.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.3},
    "Cohere": {"logit_scale": 0.0625},
    "Cohere2": {"logit_scale": 3.0, "sliding_window": 8},
    "Llama": {},
    "Qwen2": {},
}
DROPPING = {
    "Llama": LLAMA_LIKE | {"attention_dropout": 0.5},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "attn_pdrop": 0.5},
    "OPT": OPT_LIKE | {"dropout": 0.5, "attention_dropout": 0.5},
    "Starcoder2": LLAMA_LIKE | {"residual_dropout": 0.5, "attention_dropout": 0.5},
}


def make_policy(architecture: str, config: dict[str, Any]) -> Policy:
    """Return a policy with random weights, its head ten times larger than usual so that scale and cap matter."""
    torch.manual_seed(0)
    full = getattr(transformers, f"{architecture}Config")(**config)
    name = architecture.removesuffix("Text")
    model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(full)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10.0)
    return Policy(model, character_tokenizer())


@pytest.fixture
def batch(make_batch: Callable[..., Any]) -> RolloutBatch:
    _, batch = make_batch([[1.0, 0.0]], [[6, 6]], dtype=torch.float32)
    return replace(batch, completion_ids=batch.input_ids[:, 2:], temperature=0.6)


def own_logprobs(model: Any, batch: RolloutBatch) -> Tensor:
    logits = model(input_ids=batch.input_ids).logits[:, 1:-1].float()
    return (logits / 0.6).log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]


@pytest.mark.parametrize("architecture", SCALED)
def test_scaled_and_capped_logits_agree_with_the_models_own(architecture: str, batch: RolloutBatch) -> None:
    policy = make_policy(architecture, LLAMA_LIKE | SCALED[architecture])
    actual, expected = policy.logprobs(batch), own_logprobs(policy.model, batch)
    assert_close(actual, expected)
    parameters = list(policy.parameters())
    assert_close(
        torch.autograd.grad(actual.square().sum(), parameters), torch.autograd.grad(expected.square().sum(), parameters)
    )


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("Gemma2", {"final_logit_softcapping": None}),
        ("Granite", {"logits_scaling": 1.0}),
        ("Cohere", {"logit_scale": 1.0}),
    ],
)
def test_the_scale_and_the_cap_matter(architecture: str, setting: dict[str, Any], batch: RolloutBatch) -> None:
    scaled = make_policy(architecture, LLAMA_LIKE | SCALED[architecture])
    plain = make_policy(architecture, LLAMA_LIKE | SCALED[architecture] | setting)
    assert (scaled.logprobs(batch) - plain.logprobs(batch)).abs().max() > 0.01


@pytest.mark.parametrize(
    "architecture",
    ["Llama", "GPT2", "OPT", "Starcoder2"],
)
def test_dropout_in_the_config_does_not_reach_the_logprobs(architecture: str, batch: RolloutBatch) -> None:
    policy = make_policy(architecture, DROPPING[architecture])
    assert policy.model.training
    trained = policy.logprobs(batch).detach()
    policy.model.eval()
    assert_close(trained, own_logprobs(policy.model, batch).detach())
