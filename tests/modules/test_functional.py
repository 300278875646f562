"""Masked algebra against closed forms: ratios, group statistics, aggregation."""

import math
import statistics

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from modules.functional import (
    aggregation_weight,
    bounded_exp,
    check_choice,
    group_mean,
    group_std,
    leave_one_out_advantage,
    lengths,
    log_mean_exp,
    log_ratio,
    masked,
    normalized_advantage,
    sequence_sum,
)

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
def test_masked_hides_garbage_from_value_and_gradient(garbage: float) -> None:
    x = torch.where(MASK, 2.0, garbage).requires_grad_()
    masked(x, MASK).square().sum().backward()
    assert_close(x.grad, torch.where(MASK, 4.0, 0.0))


def test_sequence_sum_adds_only_what_counts() -> None:
    assert_close(sequence_sum(rows([1, 2, NAN], [4, NAN, 5], [6, 7, 8]), MASK), torch.tensor([3.0, 4.0, 0.0]).double())


def test_lengths_count_tokens_and_never_divide_by_zero() -> None:
    assert_close(lengths(MASK), torch.tensor([2.0, 1.0, 1.0]))


def test_log_ratio_holds_the_snapshot_constant_and_hides_garbage() -> None:
    logprobs = rows([-1, -2, NAN], [-3, NAN, NAN], [NAN, NAN, NAN]).requires_grad_()
    sampling = rows([-1.5, -1, math.inf], [-1, NAN, NAN], [NAN, NAN, NAN]).requires_grad_()
    drift = log_ratio(logprobs, sampling, MASK)
    drift.sum().backward()
    assert_close(drift.detach(), rows([0.5, -1, 0], [-2, 0, 0], [0, 0, 0]))
    assert_close(logprobs.grad, MASK.double())
    assert sampling.grad is None


@pytest.mark.parametrize(
    ("x", "low", "high", "expected"),
    [
        (0.5, 0.0, math.inf, math.exp(0.5)),
        (0.5, 0.0, 1.0, 1.0),
        (-5.0, 0.2, 1.0, 0.2),
        (-1e3, 0.0, 1.0, 0.0),
        (1e9, 0.0, math.inf, math.exp(60.0)),
    ],
)
def test_bounded_exp_clips_and_never_overflows(x: float, low: float, high: float, expected: float) -> None:
    assert_close(bounded_exp(torch.tensor(x), low, high), torch.tensor(expected))


def test_group_statistics_leave_out_siblings_without_a_value() -> None:
    groups = rows([1, 0, NAN, 0.25], [NAN, 1, 1, 0], [0.3, NAN, NAN, NAN])
    present = [[1, 0, 0.25], [1, 1, 0]]
    assert_close(group_mean(groups), rows([*map(statistics.mean, present), 0.3])[0])
    assert_close(group_std(groups), rows([*map(statistics.stdev, present), 0.0])[0])


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    groups = rows([1, 0, NAN, 0.25], [0.3, NAN, NAN, NAN])
    advantage = leave_one_out_advantage(torch.tensor([1.0, 0.3]).double(), groups)
    assert_close(advantage, torch.tensor([1.0 - 0.125, 0.0]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage_even_with_float_residue(dtype: torch.dtype) -> None:
    rewards = torch.full((1, 8), 0.35, dtype=dtype)
    rewards[0, 3] += 1e-7
    assert torch.equal(normalized_advantage(rewards[:, 3], rewards, 1.0), torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(("span", "expected"), [(1.0, math.sqrt(0.5)), (20.0, 0.0)])
def test_a_spread_counts_relative_to_the_reward_range(span: float, expected: float) -> None:
    group = rows([0.0, 2e-3])
    advantage = normalized_advantage(group[:, 1], group, span, epsilon=0.0)
    assert_close(advantage, torch.tensor([expected]).double())


def test_normalized_advantage_is_the_standard_score() -> None:
    group = rows([1, 0, 0, NAN])
    assert_close(normalized_advantage(group[:, 0], group, 1.0), rows([2 / 3 / (math.sqrt(1 / 3) + 1e-6)])[0])


def test_log_mean_exp_is_exact_and_survives_low_temperatures() -> None:
    group = rows([1, 0, NAN, 0])
    assert_close(log_mean_exp(group, 0.5), rows([0.5 * math.log((math.exp(2) + 2) / 3)])[0])
    assert_close(log_mean_exp(group, 1e-4), rows([1.0 - 1e-4 * math.log(3)])[0])


def test_log_mean_exp_of_a_vanishing_temperature_is_the_maximum() -> None:
    assert_close(log_mean_exp(rows([1, 0, NAN, 0.5]), 1e-9), torch.ones(1).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_mean_exp_of_a_high_temperature_is_the_mean(dtype: torch.dtype) -> None:
    group = rows([1, 0, NAN, 0.5]).to(dtype)
    assert_close(log_mean_exp(group, 1e6), torch.tensor([0.5], dtype=dtype), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1.0, 1.0, 1.0]),
        ("sequence_mean", [0.5, 1.0, 1.0]),
        ("sequence_sum", [1.0, 1.0, 1.0]),
        ("sequence_sum_norm", [0.125, 0.125, 0.125]),
    ],
)
def test_aggregation_weighs_each_row(aggregation: str, expected: list[float]) -> None:
    assert_close(aggregation_weight(MASK, aggregation, horizon=8.0), torch.tensor(expected)[:, None])


def test_an_unknown_choice_is_refused_with_key_value_and_choices() -> None:
    with pytest.raises(ValueError, match=r"objective\.x\.y must be one of a, b, got 'c'"):
        check_choice("objective.x.y", "c", ("a", "b"))
