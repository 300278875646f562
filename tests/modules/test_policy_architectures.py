"""Log-probs agree with the model's own logits on architectures that scale, cap or drop something."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from datamodules.types import RolloutBatch
from modules.packing_check import check_packing
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


PROMPT, COMPLETIONS = [3, 4], [[50, 51, 52, 53, 54, 55], [60, 61, 62, 63, 64, 65]]


@pytest.fixture
def batch(make_packed: Callable[..., RolloutBatch]) -> RolloutBatch:
    return make_packed(*((PROMPT, completion) for completion in COMPLETIONS), temperature=0.6)


def own_logprobs(model: Any) -> Tensor:
    ids = torch.tensor([[*PROMPT, *completion] for completion in COMPLETIONS])
    logits = model(input_ids=ids).logits[:, 1:-1].float()
    return (logits / 0.6).log_softmax(-1).gather(-1, ids[:, 2:, None])[..., 0]


@pytest.mark.parametrize("architecture", SCALED)
def test_scaled_and_capped_logits_agree_with_the_models_own(architecture: str, batch: RolloutBatch) -> None:
    policy = make_policy(architecture, LLAMA_LIKE | SCALED[architecture])
    actual, expected = policy.logprobs(batch), own_logprobs(policy.model)
    assert_close(actual, expected)
    parameters = list(policy.parameters())
    for got, want in zip(
        torch.autograd.grad(actual.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        assert_close(got, want, rtol=0.0, atol=1e-5 * float(want.abs().max()))


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
    assert_close(trained, own_logprobs(policy.model).detach())


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Gemma3Text", "Cohere2", "GPT2", "OPT", "Mistral"])
def test_packed_sequences_give_what_padded_ones_give(
    architecture: str, make_packed: Callable[..., RolloutBatch]
) -> None:
    sliding = {"sliding_window": 4} if architecture in ("Gemma3Text", "Cohere2", "Mistral") else {}
    policy = make_policy(architecture, DROPPING.get(architecture, LLAMA_LIKE) | sliding)
    batch = make_packed(
        *(([3, 4, 5], range(50, 50 + n)) for n in (6, 1, 9, 6)), ([8], [9, 10]), *(([7] * 5, [n] * n) for n in (7, 3))
    )
    parameters = list(policy.parameters())
    policy.model.set_attn_implementation("eager")
    expected = policy.logprobs(batch)
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    policy.model.set_attn_implementation("packed")
    check_packing(policy.model)
    actual = policy.logprobs(batch)
    assert_close(actual, expected, rtol=0.0, atol=1e-5 * float(expected.detach().abs().max()))
    largest = max(float(want.abs().max()) for want in wanted)
    for got, want in zip(torch.autograd.grad(actual.square().sum(), parameters), wanted, strict=True):
        assert_close(got, want, rtol=0.0, atol=1e-5 * largest)
