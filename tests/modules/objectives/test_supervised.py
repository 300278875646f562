"""Supervised learning: the mean negative log-prob of the step's tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from modules.objectives.objective import Objective


def test_loss_is_the_cross_entropy_of_all_tokens(
    make_head: Callable[..., Objective], make_batch: Any, step_loss: Any
) -> None:
    _, batch = make_batch([[1.0, 0.0]], [[2, 4]])
    logits = torch.randn(2, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logprobs = logits.log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
    mask = batch.completion_mask
    expected = cross_entropy(logits[mask], batch.completion_ids[mask])
    assert_close(step_loss(make_head("supervised"), logprobs, batch), expected)


def test_rewards_are_not_read(make_head: Callable[..., Objective], make_batch: Any, gradient: Any) -> None:
    logprobs, batch = make_batch([[1.0, 0.0]], [[2, 4]], drift=None)
    unjudged = replace(batch, rewards=batch.rewards * torch.nan, group_rewards=batch.group_rewards * torch.nan)
    expected = -batch.completion_mask.double() / 6
    assert_close(gradient(make_head("supervised"), logprobs, unjudged), expected)


def test_loss_exists_without_sampling_logprobs(
    make_head: Callable[..., Objective], make_batch: Any, step_loss: Any
) -> None:
    logprobs, batch = make_batch([[1.0]], [[3]])
    demonstration = replace(batch, sampling_logprobs=None, old_logprobs=None, ref_logprobs=None)
    assert_close(step_loss(make_head("supervised"), logprobs, demonstration), -logprobs.mean())
