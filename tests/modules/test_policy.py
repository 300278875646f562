"""The policy's log-probs are those of the model's own full logits after temperature, in value and in gradient."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules.types import Probe, RolloutBatch
from modules import policy as policy_file
from modules import token_logprobs
from modules.policy import Policy
from modules.tiny_policy import character_tokenizer, tiny_policy

TEMPERATURE = 0.6
Sequence = tuple[list[int], list[int]]  # prompt and completion
MakePacked = Callable[..., RolloutBatch]


@pytest.fixture
def sequences() -> list[Sequence]:
    """Prompts of one to three tokens, two siblings of one prompt, an empty completion, ids that elsewhere pad."""
    return [([9], [8, 0, 5, 7, 3]), ([6, 7, 0], [4]), ([6, 7, 0], [11, 12, 2]), ([20, 21], [])]


@pytest.fixture
def batch(sequences: list[Sequence], make_packed: MakePacked) -> RolloutBatch:
    return make_packed(*sequences, temperature=TEMPERATURE)


def full_softmax(model: Any, sequences: list[Sequence], temperature: float = TEMPERATURE) -> Tensor:
    """Return the same log-probs from the model's own logits, one sequence at a time and without packing."""
    expected = torch.zeros(len(sequences), max(len(completion) for _, completion in sequences))
    for row, (prompt, completion) in enumerate(sequences):
        ids = torch.tensor([[*prompt, *completion]])
        logprobs = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
        for column, token in enumerate(completion):
            expected[row, column] = logprobs[len(prompt) + column - 1, token]
    return expected


def gradients(policy: Policy, logprobs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1.0, 2.0, logprobs.numel()).view_as(logprobs)
    return list(torch.autograd.grad((weights * logprobs).sum(), list(policy.parameters())))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest) -> Policy:
    torch.manual_seed(0)
    return tiny_policy(32, 2, 1, 48, 16, request.param)


@pytest.mark.parametrize("attention", ["packed", "sdpa", "eager"])
def test_value_and_gradient_are_those_of_the_full_softmax(
    attention: str, policy: Policy, batch: RolloutBatch, sequences: list[Sequence]
) -> None:
    policy.model.set_attn_implementation("eager")
    expected = full_softmax(policy.model, sequences)
    policy.model.set_attn_implementation(attention)
    actual = policy.logprobs(batch)
    assert_close(actual, expected)
    assert_close(gradients(policy, actual), gradients(policy, expected))


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_entropy_stands_at_its_tokens_and_takes_no_gradient(
    attention: str, policy: Policy, batch: RolloutBatch, sequences: list[Sequence]
) -> None:
    policy.model.set_attn_implementation(attention)
    logprobs, entropy = policy.logprobs_and_entropy(batch)
    assert torch.equal(logprobs, policy.logprobs(batch))
    assert not entropy.requires_grad
    policy.model.set_attn_implementation("eager")
    for row, (prompt, completion) in enumerate(sequences):
        logits = policy.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 :]
        p = (logits[: len(completion)] / TEMPERATURE).softmax(-1)
        assert_close(entropy[row, : len(completion)], torch.special.entr(p).sum(-1).detach())
        assert not entropy[row, len(completion) :].any()


def test_chunks_give_what_one_piece_gives(policy: Policy, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = policy.logprobs(batch)
    expected = gradients(policy, whole)
    monkeypatch.setattr(token_logprobs, "MAX_LOGIT_BYTES", 4 * policy.vocabulary * 2)
    chunked = policy.logprobs(batch)
    assert_close(chunked, whole)
    assert_close(gradients(policy, chunked), expected)


def test_checkpointed_activations_give_the_same_gradient(batch: RolloutBatch) -> None:
    torch.manual_seed(0)
    plain = tiny_policy(32, 2, 1, 48, 16, True)
    expected = gradients(plain, plain.logprobs(batch))
    saving = Policy(plain.model, plain.tokenizer, gradient_checkpointing=True)
    assert saving.model.is_gradient_checkpointing
    assert_close(gradients(saving, saving.logprobs(batch)), expected)


def test_only_what_predicts_completion_tokens_reaches_the_head(
    policy: Policy, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    original = token_logprobs.token_logprobs

    def recording(hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return original(hidden, *arguments, **options)

    monkeypatch.setattr(policy_file, "token_logprobs", recording)
    policy.logprobs(batch)
    assert rows == [int(batch.completion_mask.sum())]


def test_garbage_off_the_mask_changes_nothing(policy: Policy, batch: RolloutBatch) -> None:
    dirty = replace(batch, completion_ids=torch.where(batch.completion_mask, batch.completion_ids, 99))
    assert torch.equal(policy.logprobs(dirty), policy.logprobs(batch))


def test_a_batch_of_empty_completions_has_zero_logprobs_with_a_graph(policy: Policy, batch: RolloutBatch) -> None:
    empty = policy.logprobs(replace(batch, completion_mask=torch.zeros_like(batch.completion_mask)))
    assert torch.equal(empty.detach(), torch.zeros(4, 5))
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients(policy, empty))


def test_a_cooler_temperature_sharpens_by_its_own_softmax(
    policy: Policy, batch: RolloutBatch, sequences: list[Sequence]
) -> None:
    for temperature in (0.3, 1.0):
        policy.model.set_attn_implementation("packed")
        warmed = replace(batch, temperature=temperature)
        actual = policy.logprobs(warmed)
        policy.model.set_attn_implementation("eager")
        assert_close(actual, full_softmax(policy.model, sequences, temperature))
    policy.model.set_attn_implementation("packed")
    assert not torch.allclose(policy.logprobs(batch), policy.logprobs(replace(batch, temperature=1.0)))


def test_probe_logprobs_are_those_of_a_batch(policy: Policy, batch: RolloutBatch) -> None:
    probe = Probe((9, 8, 0, 5, 7, 3), (1, 2, 3, 4, 5), TEMPERATURE)
    assert_close(torch.tensor(policy.probe_logprobs(probe)), policy.logprobs(batch)[0].detach())


def test_a_saved_policy_loads_as_a_plain_causal_lm(
    policy: Policy, batch: RolloutBatch, sequences: list[Sequence], tmp_path: Path
) -> None:
    policy.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(full_softmax(model, sequences), policy.logprobs(batch))
    assert AutoTokenizer.from_pretrained(tmp_path)("1+1")["input_ids"] == policy.tokenizer("1+1")["input_ids"]


def test_a_saved_policy_loads_as_the_same_policy(policy: Policy, batch: RolloutBatch, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    loaded = Policy.from_pretrained(str(tmp_path), "float32", False, "packed")
    assert torch.equal(loaded.logprobs(batch), policy.logprobs(batch))
    assert (loaded.window, loaded.stop_token_ids) == (policy.window, policy.stop_token_ids)
    half = Policy.from_pretrained(str(tmp_path), "bfloat16", True, "eager")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.logprobs(batch).dtype == torch.float32


@pytest.mark.parametrize("path", ["./missing", "/missing/model", "a/b/c"])
def test_a_mistyped_directory_is_told_from_a_hub_id(path: str) -> None:
    with pytest.raises(ValueError, match=f"policy.path: {path} is not a directory"):
        Policy.from_pretrained(path, "float32", False, "sdpa")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"policy\.path: .* has no config\.json"):
        Policy.from_pretrained(str(tmp_path), "float32", False, "sdpa")


def test_a_directory_without_a_tokenizer_is_refused(policy: Policy, tmp_path: Path) -> None:
    policy.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"policy\.path: .* has no tokenizer"):
        Policy.from_pretrained(str(tmp_path), "float32", False, "sdpa")


def test_a_broken_tokenizer_is_reported_with_the_config_key(policy: Policy, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"policy\.path: .* has no usable tokenizer"):
        Policy.from_pretrained(str(tmp_path), "float32", False, "sdpa")


def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy\.dtype must be float32 or bfloat16, got 'float16'"):
        Policy.from_pretrained(str(tmp_path), "float16", False, "sdpa")


def test_every_end_token_stops_a_completion(policy: Policy) -> None:
    policy.model.generation_config.eos_token_id = [4, policy.tokenizer.eos_token_id, 9]
    policy.model.config.eos_token_id = 11
    assert Policy(policy.model, policy.tokenizer).stop_token_ids == (2, 4, 9, 11)
