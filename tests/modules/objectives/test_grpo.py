"""GRPO: PPO's clip on each token's ratio, and advantages that float residue cannot explode."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from modules.objectives.objective import Objective

SUCCESS, FAILURE = 0, 1
ADVANTAGE = 0.5 / (math.sqrt(0.5) + 1e-6)  # of the success in a group [1, 0]


def weight(head: Objective, make_batch: Any, ratio: float, row: int) -> float:
    """Return the coefficient in units of the advantage's size, where all tokens have this ratio."""
    logprobs, batch = make_batch([[1.0, 0.0]], [[1, 1]], drift=math.log(ratio))
    return float(head(logprobs, batch).coefficients[row, 0]) / ADVANTAGE


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.01, 0.01), (0.5, 0.5), (1.0, 1.0), (1.19, 1.19), (1.21, 0.0), (5.0, 0.0)],
)
def test_a_success_is_pulled_until_its_ratio_passes_the_upper_clip(
    ratio: float, expected: float, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    assert_close(weight(make_head("grpo"), make_batch, ratio, SUCCESS), expected)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.01, 0.0), (0.79, 0.0), (0.81, -0.81), (1.0, -1.0), (2.9, -2.9), (3.1, 0.0), (100.0, 0.0)],
)
def test_a_failure_is_pushed_between_the_lower_clip_and_the_dual_clip(
    ratio: float, expected: float, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    assert_close(weight(make_head("grpo"), make_batch, ratio, FAILURE), expected)


@pytest.mark.parametrize(
    ("ratio", "success", "failure"),
    [(0.5, -0.5, 0.8), (1.0, -1.0, 1.0), (1.1, -1.1, 1.1), (2.0, -1.2, 2.0), (50.0, -1.2, 3.0)],
)
def test_loss_is_the_clipped_surrogate(
    ratio: float, success: float, failure: float, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    loss = make_head("grpo")(*make_batch([[1.0, 0.0]], [[1, 1]], drift=math.log(ratio))).loss
    assert_close(loss, ADVANTAGE * torch.tensor([[success], [failure]], dtype=torch.float64))


def test_clip_higher_leaves_unlikely_successes_more_room(make_head: Callable[..., Objective], make_batch: Any) -> None:
    assert_close(weight(make_head("grpo", clip_high=0.28), make_batch, 1.25, SUCCESS), 1.25)
    assert weight(make_head("grpo"), make_batch, 1.25, SUCCESS) == 0.0


def test_clipped_fraction_counts_tokens_without_gradient_by_sign(
    make_head: Callable[..., Objective], make_batch: Any
) -> None:
    drift = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 1.0, 0.0]], dtype=torch.float64)
    metrics = make_head("grpo")(*make_batch([[1.0, 0.0]], [[3, 3]], drift=drift)).metrics
    positives, negatives = metrics["clipped_fraction_of_positives"], metrics["clipped_fraction_of_negatives"]
    assert_close(positives.double(), torch.tensor([2 / 3, torch.nan]).double(), equal_nan=True)
    assert_close(negatives.double(), torch.tensor([torch.nan, 1 / 3]).double(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.35, 0.1, 0.7])
def test_float_residue_is_no_spread(
    score: float, dtype: torch.dtype, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    output = make_head("grpo")(*make_batch([[score] * 8], [[3] * 8], drift=None, dtype=dtype))
    assert_close(output.coefficients, torch.zeros_like(output.coefficients), rtol=0.0, atol=0.0)


def test_one_success_among_four_has_the_textbook_advantage(
    make_head: Callable[..., Objective], make_batch: Any
) -> None:
    coefficients = make_head("grpo")(*make_batch([[1.0, 0.0, 0.0, 0.0]], [[1] * 4])).coefficients[:, 0]
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64) / (0.5 + 1e-6)
    assert_close(coefficients, expected)


def test_a_wider_reward_range_leaves_normalized_advantages_alone(
    make_head: Callable[..., Objective], make_batch: Any
) -> None:
    batch = make_batch([[1.0, 0.0, 0.25]], [[1, 2, 3]], drift=None)
    wide = make_head("grpo", reward_range=[-1, 1])(*batch).coefficients
    assert_close(wide, make_head("grpo")(*batch).coefficients, rtol=3e-6, atol=0.0)  # epsilon weighs half as much


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [1 / 2 / 2, 1 / 5 / 2]),
        ("token_mean", [1 / 7, 1 / 7]),
        ("sequence_sum", [1 / 2, 1 / 2]),
        ("sequence_sum_norm", [1 / 2 / 16, 1 / 2 / 16]),
    ],
)
def test_each_aggregation_weighs_tokens_as_its_name_says(
    aggregation: str, expected: list[float], make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0]], [[2, 5]])
    weights = gradient(make_head("grpo", aggregation=aggregation), logprobs, batch)[:, 0] / ADVANTAGE
    assert_close(weights, torch.tensor([-expected[0], expected[1]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"horizon": 0}, "horizon"),
        ({"aggregation": "mean"}, "aggregation"),
    ],
)
def test_a_senseless_setting_is_refused_by_its_key(
    overrides: Any, key: str, make_head: Callable[..., Objective]
) -> None:
    with pytest.raises(Exception, match=rf"objective\.grpo\..*{key}"):
        make_head("grpo", **overrides)
