"""Low-rank adapters: only they train, and merged or alone they are the policy that trained them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from datamodules.types import Probe
from modules.lora import LoRA, adapted_layers, factors, merged
from modules.policy import Policy
from modules.tiny_policy import character_tokenizer, tiny_policy

PROBE = Probe(tuple(5 + i % 90 for i in range(40)), (7, 20, 39), 1.0)
SETTINGS = LoRA(rank=4, alpha=6.0, targets="all-linear", sync="merged")


def make_policy(*, tied: bool = True, lora: LoRA | None = SETTINGS, seed: int = 0) -> Policy:
    """Return a policy, with factors as after some training."""
    torch.manual_seed(seed)
    policy = tiny_policy(64, 2, 2, 128, 256, tied, lora)
    train(policy)
    return policy


@torch.no_grad()
def train(policy: Policy) -> None:
    for layer in adapted_layers(policy.model).values():
        for factor in factors(layer):
            factor.add_(0.2 * torch.randn_like(factor))


def probe_of(directory: Path, policy: Policy) -> tuple[float, ...]:
    """Return the log-probs of a saved model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Policy(model, policy.tokenizer).probe_logprobs(PROBE)


def test_a_policy_starts_as_its_base_and_only_the_factors_train() -> None:
    torch.manual_seed(0)
    base = tiny_policy(64, 2, 2, 128, 256, True)
    torch.manual_seed(0)
    policy = tiny_policy(64, 2, 2, 128, 256, True, SETTINGS)
    assert policy.probe_logprobs(PROBE) == base.probe_logprobs(PROBE)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of seven linear layers in each of two decoder layers
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_merged_weights_are_the_policy_and_leave_it_as_it_was(tied: bool, tmp_path: Path) -> None:
    policy = make_policy(tied=tied)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    policy.save_snapshot(tmp_path)
    assert probe_of(tmp_path, policy) == pytest.approx(policy.probe_logprobs(PROBE), abs=1e-5)
    torch.testing.assert_close(policy.state_dict(), before, rtol=0.0, atol=0.0)


def test_a_bfloat16_base_is_merged_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tiny_policy(64, 2, 2, 128, 256, True).model.to(torch.bfloat16)
    policy = Policy(base, character_tokenizer(), lora=SETTINGS)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    train(policy)
    layer = adapted_layers(policy.model)["model.layers.1.mlp.up_proj"]
    a, b = factors(layer)
    expected = (layer.base_layer.weight.double() + 1.5 * b.double() @ a.double()).to(torch.bfloat16)
    policy.save_pretrained(tmp_path)
    (stored,) = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    difference = (stored["model.layers.1.mlp.up_proj.weight"] != expected).float().mean()
    assert difference < 1e-3  # a tie of rounding now and then


def test_peft_loads_the_adapter_alone_onto_the_base(tmp_path: Path) -> None:
    policy = make_policy(lora=LoRA(4, 6.0, ["q_proj", "down_proj"], "adapter"))
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    policy.save_base(tmp_path / "base")
    policy.save_snapshot(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    reference: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    logits = reference(torch.tensor([PROBE.token_ids])).logits[0].log_softmax(-1)
    expected = [logits[p - 1, PROBE.token_ids[p]].item() for p in PROBE.positions]
    assert policy.probe_logprobs(PROBE) == pytest.approx(expected, abs=1e-5)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000


def test_layers_that_keep_their_weights_transposed_are_merged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=101, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=2)
    policy = Policy(transformers.GPT2LMHeadModel(config), character_tokenizer(), lora=SETTINGS)
    train(policy)
    policy.save_pretrained(tmp_path)
    assert probe_of(tmp_path, policy) == pytest.approx(policy.probe_logprobs(PROBE), abs=1e-5)


def test_an_output_head_of_its_own_may_be_a_target(tmp_path: Path) -> None:
    policy = make_policy(tied=False, lora=LoRA(4, 6.0, ["lm_head"], "merged"))
    policy.save_pretrained(tmp_path)
    assert probe_of(tmp_path, policy) == pytest.approx(policy.probe_logprobs(PROBE), abs=1e-5)


def test_a_merge_is_the_papers_sum() -> None:
    weight, a, b = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [10.0]])
    expected = torch.tensor([[2.0, 4.0, 6.0], [20.0, 40.0, 60.0]])
    torch.testing.assert_close(merged(weight, (a, b), 2.0), expected, rtol=0.0, atol=0.0)
    torch.testing.assert_close(merged(weight.T, (a, b), 2.0, is_transposed=True), expected.T, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRA(0, 8.0, "all-linear", "merged"), "policy.lora.rank must be at least 1, got 0"),
        (lambda: LoRA(4, 0.0, "all-linear", "merged"), "policy.lora.alpha must be above 0, got 0.0"),
        (lambda: LoRA(4, 8.0, "all-linear", "both"), "policy.lora.sync must be merged or adapter, got 'both'"),
        (lambda: make_policy(lora=LoRA(4, 8.0, ["qproj"], "merged")), "policy.lora.targets: Target modules {'qproj'}"),
        (lambda: make_policy(lora=LoRA(4, 8.0, ["lm_head"], "merged")), "lm_head shares its weight between embedding"),
    ],
)
def test_bad_settings_are_refused_by_key(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[lora\]'"):
        LoRA(4, 8.0, "all-linear", "merged")
