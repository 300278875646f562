"""The contract of every head: scores map to its reward range, and coefficients are constants."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from modules.objectives.objective import Objective, score_function_loss


@pytest.mark.parametrize("coefficients", [[2.0, -0.5], [[2.0, 1.0], [-0.5, 3.0]]])
def test_gradient_treats_coefficients_as_constants(coefficients: Any) -> None:
    weights = torch.tensor(coefficients, requires_grad=True)
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    score_function_loss(weights, logprobs, mask).sum().backward()
    wide = weights.detach() if weights.dim() == 2 else weights.detach()[:, None].expand(2, 2)
    assert_close(logprobs.grad, -wide * mask)
    assert weights.grad is None


@pytest.mark.parametrize(("score", "expected"), [(0.0, -3.0), (0.25, -1.0), (1.0, 5.0)])
def test_scores_map_linearly_to_the_reward_range(
    score: float, expected: float, make_head: Callable[..., Objective]
) -> None:
    mapped = make_head("reinforce", reward_range=[-3, 5]).mapped(torch.tensor([score, torch.nan]))
    assert_close(mapped, torch.tensor([expected, torch.nan]), equal_nan=True)


@pytest.mark.parametrize("reward_range", [[1, 1], [1, -1], [0, 1, 2], [float("nan"), 1]])
def test_an_empty_reward_range_is_refused(reward_range: list[float], make_head: Callable[..., Objective]) -> None:
    with pytest.raises(Exception, match=r"objective\.reinforce\.reward_range must be \[low, high\] with low < high"):
        make_head("reinforce", reward_range=reward_range)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_would_not_descend_is_refused(weight: float, make_head: Callable[..., Objective]) -> None:
    with pytest.raises(Exception, match=r"objective\.reinforce\.weight must be above 0"):
        make_head("reinforce", weight=weight)
