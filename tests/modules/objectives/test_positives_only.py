"""Positives only: the mean over positives of their summed log-probs, whatever the failures do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from modules.objectives.objective import Objective


def test_loss_is_the_mean_over_positives_of_their_summed_logprobs(
    make_head: Callable[..., Objective], make_batch: Any, step_loss: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0, 0.75, 0.0]], [[2, 7, 3, 1]], drift=None)
    sums = (logprobs * batch.completion_mask).sum(-1)
    assert_close(step_loss(make_head("positives_only"), logprobs, batch), -(sums[0] + sums[2]) / 2)


@pytest.mark.parametrize(("score", "expected"), [(0.0, 0.0), (0.5, 0.0), (0.51, 1.0), (1.0, 1.0)])
def test_a_positive_scores_above_one_half(
    score: float, expected: float, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    coefficients = make_head("positives_only")(*make_batch([[score]], [[3]])).coefficients
    assert_close(coefficients, torch.full((1, 3), expected, dtype=torch.float64))


def test_a_step_without_positives_has_no_gradient(
    make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    logprobs, batch = make_batch([[0.0, 0.25]], [[2, 7]], drift=None)
    assert batch.num_positives == 0
    assert_close(gradient(make_head("positives_only"), logprobs, batch), torch.zeros_like(logprobs))


def test_the_count_is_that_of_the_whole_step(
    make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0]], [[2, 7]], drift=None)
    step = replace(batch, num_positives=5)  # four more stand in other micro-batches
    head = make_head("positives_only")
    assert_close(gradient(head, logprobs, step), gradient(head, logprobs, batch) / 5)


def test_more_failures_change_nothing(make_head: Callable[..., Objective], make_batch: Any, gradient: Any) -> None:
    few = gradient(make_head("positives_only"), *make_batch([[1.0, 0.0]], [[2, 2]]))
    many = gradient(make_head("positives_only"), *make_batch([[1.0, 0.0, 0.0, 0.0, 0.0]], [[2] * 5]))
    assert_close(many[0], few[0])
    assert_close(few[0], torch.full((2,), -1.0, dtype=torch.float64))
