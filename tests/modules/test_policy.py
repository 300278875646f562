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
from modules import token_logprobs
from modules.policy import Policy
from modules.tiny_policy import character_tokenizer, tiny_policy

TEMPERATURE = 0.6


@pytest.fixture
def batch(make_batch: Callable[..., Any]) -> RolloutBatch:
    """Prompts of one to three tokens, completions of one to five and one empty; ids agree in both tensors."""
    _, batch = make_batch([[1.0, 0.0, 1.0, 0.0]], [[5, 1, 3, 2]], dtype=torch.float32)
    mask = batch.completion_mask.clone()
    mask[3] = False
    prompt_lengths = torch.tensor([1, 3, 2, 2])
    input_ids = torch.randint(1, 100, (4, 8), generator=torch.Generator().manual_seed(5))
    input_ids[0, 2] = 0  # an id that elsewhere pads, sampled: masks come from lengths
    positions = prompt_lengths[:, None] + torch.arange(5)
    return replace(
        batch,
        input_ids=input_ids,
        prompt_lengths=prompt_lengths,
        completion_ids=torch.where(mask, input_ids.gather(1, positions), 0),
        completion_mask=mask,
        temperature=TEMPERATURE,
    )


def full_softmax(model: Any, batch: RolloutBatch) -> Tensor:
    """Return the same log-probs from the model's own logits, one sequence at a time and without padding."""
    expected = torch.zeros(batch.completion_mask.shape)
    for row, (start, mask) in enumerate(zip(batch.prompt_lengths.tolist(), batch.completion_mask, strict=True)):
        length = int(mask.sum())
        ids = batch.input_ids[row : row + 1, : start + length]
        logprobs = (model(input_ids=ids).logits[0].float() / batch.temperature).log_softmax(-1)
        for column in range(length):
            expected[row, column] = logprobs[start + column - 1, ids[0, start + column]]
    return expected


def gradients(policy: Policy, logprobs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1.0, 2.0, logprobs.numel()).view_as(logprobs)
    return list(torch.autograd.grad((weights * logprobs).sum(), list(policy.parameters())))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest) -> Policy:
    torch.manual_seed(0)
    return tiny_policy(32, 2, 1, 48, 16, request.param)


def test_value_and_gradient_are_those_of_the_full_softmax(policy: Policy, batch: RolloutBatch) -> None:
    actual, expected = policy.logprobs(batch), full_softmax(policy.model, batch)
    assert_close(actual, expected)
    assert_close(gradients(policy, actual), gradients(policy, expected))


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


def test_garbage_in_padding_changes_nothing(policy: Policy, batch: RolloutBatch) -> None:
    ends = batch.prompt_lengths + batch.completion_mask.sum(-1)
    is_padding = torch.arange(batch.input_ids.shape[1]) >= ends[:, None]
    dirty = replace(
        batch,
        input_ids=torch.where(is_padding, 7, batch.input_ids),
        completion_ids=torch.where(batch.completion_mask, batch.completion_ids, 99),
    )
    clean = replace(batch, input_ids=torch.where(is_padding, 0, batch.input_ids))
    assert torch.equal(policy.logprobs(dirty), policy.logprobs(clean))
    for got, want in zip(
        gradients(policy, policy.logprobs(dirty)), gradients(policy, policy.logprobs(clean)), strict=True
    ):
        assert_close(got, want)


def test_a_batch_of_empty_completions_has_zero_logprobs_with_a_graph(policy: Policy, batch: RolloutBatch) -> None:
    empty = policy.logprobs(replace(batch, completion_mask=torch.zeros_like(batch.completion_mask)))
    assert torch.equal(empty.detach(), torch.zeros(4, 5))
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients(policy, empty))


def test_a_cooler_temperature_sharpens_by_its_own_softmax(policy: Policy, batch: RolloutBatch) -> None:
    for temperature in (0.3, 1.0):
        warmed = replace(batch, temperature=temperature)
        assert_close(policy.logprobs(warmed), full_softmax(policy.model, warmed))
    assert not torch.allclose(policy.logprobs(batch), policy.logprobs(replace(batch, temperature=1.0)))


def test_probe_logprobs_are_those_of_a_batch(policy: Policy, batch: RolloutBatch) -> None:
    probe = Probe(tuple(batch.input_ids[0, :6].tolist()), (1, 2, 3, 4, 5), TEMPERATURE)
    assert_close(torch.tensor(policy.probe_logprobs(probe)), policy.logprobs(batch)[0].detach())


def test_a_saved_policy_loads_as_a_plain_causal_lm(policy: Policy, batch: RolloutBatch, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(full_softmax(model, batch), policy.logprobs(batch))
    assert AutoTokenizer.from_pretrained(tmp_path)("1+1")["input_ids"] == policy.tokenizer("1+1")["input_ids"]


def test_a_saved_policy_loads_as_the_same_policy(policy: Policy, batch: RolloutBatch, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    loaded = Policy.from_pretrained(str(tmp_path), "float32", False, "sdpa")
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
