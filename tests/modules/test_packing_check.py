"""A model that packing would compute wrongly is refused when it is loaded, by the key to change."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from modules import packed_states
from modules.packed_attention import AttentionPlan, plan_attention
from modules.packing_check import check_packing
from modules.policy import Policy
from modules.tiny_policy import character_tokenizer, tiny_policy

LLAMA_LIKE = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
GPT_LIKE = {"vocab_size": 101, "hidden_size": 32, "bos_token_id": 2, "eos_token_id": 2}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = LLAMA_LIKE | MOE | {"sliding_window": 4, "use_sliding_window": True, "shared_expert_intermediate_size": 16}
LONG = {"sliding_window": 100, "max_position_embeddings": 256}  # longer than what the check runs


def save(architecture: str, config: dict[str, Any], directory: Path) -> str:
    torch.manual_seed(0)
    full = getattr(transformers, f"{architecture}Config")(**config)
    getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")(full).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Gemma2", LLAMA_LIKE | {"head_dim": 16, "attn_logit_softcapping": 5.0}, "does not compute softcap"),
        ("Qwen2Moe", SLIDING | {"layer_types": ["sliding_attention"] * 2}, "states that differ"),
        ("Qwen2Moe", SLIDING | LONG | {"layer_types": ["sliding_attention"] * 2}, "which layers have a sliding window"),
        ("Phimoe", SLIDING, "states that differ"),
        ("GPTNeo", GPT_LIKE | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
                               "max_position_embeddings": 64}, "no attention implementation 'packed'"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_packed_is_refused_by_its_key(
    architecture: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(architecture, config, tmp_path)
    with pytest.raises(
        ValueError, match=rf"attn_implementation: .*{message}.*policy\.attn_implementation=sdpa or eager"
    ):
        Policy.from_pretrained(path, "float32", False, "packed")
    assert not Policy.from_pretrained(path, "float32", False, "eager").is_packed


def test_layers_that_are_no_attention_are_refused() -> None:
    full = transformers.Qwen3NextConfig(
        **LLAMA_LIKE | MOE, layer_types=["linear_attention", "full_attention"], head_dim=16, linear_num_value_heads=2,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="has layers of type linear_attention"):
        check_packing(transformers.Qwen3NextForCausalLM(full))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    policy = tiny_policy(64, 4, 2, 128, 256, True)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return policy.model.to(request.param)


def test_a_model_that_can_be_packed_passes_and_stays_packed(model: Any) -> None:
    check_packing(model)
    assert model.config._attn_implementation == "packed"


def test_siblings_that_see_each_other_are_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(groups: Any, device: torch.device) -> AttentionPlan:
        size = sum(group.prompt_length + sum(group.completion_lengths) for group in groups)
        return plan_attention((type(groups[0])(size, ()),), device)

    monkeypatch.setattr(packed_states, "plan_attention", leaking)
    with pytest.raises(ValueError, match="states that differ"):
        check_packing(model)


def test_positions_that_are_not_heeded_are_found(model: Any) -> None:
    base = model.base_model
    own = base.forward

    def deaf(*arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        return own(*arguments, **options)

    base.forward = deaf
    with pytest.raises(ValueError, match="states that differ"):
        check_packing(model)
