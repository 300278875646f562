"""TOPR: positives in full, negatives by the clipped ratio of the whole sequence; and the paper's five-arm toy."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from modules.objectives.objective import Objective


def weight_of_a_negative(head: Objective, make_batch: Any, drift: float, length: int) -> float:
    """Return the taper of one negative whose tokens all drifted alike."""
    logprobs, batch = make_batch([[0.0]], [[length]], drift=drift)
    return float(-head(logprobs, batch).coefficients[0].sum())


@pytest.mark.parametrize("length", [10, 100, 1000])
def test_the_sequence_ratio_is_the_product_over_all_tokens(
    length: int, make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    actual = weight_of_a_negative(make_head("topr"), make_batch, -0.012, length)
    assert_close(actual, math.exp(-0.012 * length))


@pytest.mark.parametrize(
    ("ratio", "expected"), [("sequence", math.exp(-3.0)), ("token", math.exp(-0.01)), ("geometric", math.exp(-0.01))]
)
def test_a_long_negative_fades_only_by_its_sequence_ratio(
    ratio: str, expected: float, make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    actual = weight_of_a_negative(make_head("topr", ratio=ratio), make_batch, -0.01, 300)
    assert_close(actual, expected)
    assert round(expected, 3) == {"sequence": 0.050, "token": 0.990, "geometric": 0.990}[ratio]


def test_token_and_geometric_ratios_differ_when_tokens_drift_apart(
    make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    drift = torch.tensor([[-1.0, 0.4]], dtype=torch.float64)
    logprobs, batch = make_batch([[0.0]], [[2]], drift=drift)
    by_token = make_head("topr", ratio="token")(logprobs, batch).coefficients
    assert_close(by_token, torch.tensor([[-math.exp(-1.0) / 2, -0.5]], dtype=torch.float64))
    geometric = make_head("topr", ratio="geometric")(logprobs, batch).coefficients
    assert_close(geometric, torch.full((1, 2), -math.exp(-0.3) / 2, dtype=torch.float64))


@pytest.mark.parametrize("drift", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("score", [0.5, 0.75, 1.0])
def test_a_positive_keeps_its_reward_whatever_its_ratio(
    score: float, drift: float, make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    output = make_head("topr")(*make_batch([[score]], [[4]], drift=drift))
    assert_close(output.coefficients, torch.full((1, 4), (2 * score - 1) / 4, dtype=torch.float64))
    assert output.metrics["taper_of_negatives"].isnan().all()


def test_a_negative_that_grew_more_likely_is_pushed_no_harder_than_its_reward(
    make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    output = make_head("topr")(*make_batch([[0.0]], [[4]], drift=0.5))
    assert_close(output.coefficients, torch.full((1, 4), -0.25, dtype=torch.float64))
    assert_close(output.metrics["taper_of_negatives"], torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("ratio", ["sequence", "geometric", "token"])
def test_the_metric_is_the_mean_taper_of_the_negatives_tokens(
    ratio: str, make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    logprobs, batch = make_batch([[0.0, 1.0]], [[2, 3]], drift=-0.1)
    share = make_head("topr", ratio=ratio)(logprobs, batch).metrics["taper_of_negatives"]
    expected = math.exp(-0.2) if ratio == "sequence" else math.exp(-0.1)
    assert_close(share, torch.tensor([expected, math.nan], dtype=torch.float64), equal_nan=True)


def test_the_class_comes_from_the_reward_before_the_baseline(
    make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    logprobs, batch = make_batch([[0.55, 0.45]], [[1, 1]], drift=-1.0)  # rewards 0.1 and -0.1
    coefficients = make_head("topr", baseline=0.5)(logprobs, batch).coefficients
    expected = torch.tensor([[0.1 - 0.5], [math.exp(-1.0) * (-0.1 - 0.5)]], dtype=torch.float64)
    assert_close(coefficients, expected)


@pytest.mark.parametrize(
    ("tapers", "expected"),
    [
        (([1, 1], [0, 0]), (1.0, 0.0)),  # positives only
        (([1, 1], [1, 1]), (1.0, -1.0)),  # naive REINFORCE
        (([0, 1e9], [0, 1e9]), (math.exp(0.5), -math.exp(0.5))),  # importance-sampled REINFORCE
        (([0, 1], [0, 1]), (1.0, -1.0)),  # truncated importance sampling
        (([0, 1.2], [0, 1.5]), (1.2, -1.5)),  # one bound for each sign
    ],
)
def test_the_taper_table_holds_its_relatives(
    tapers: Any, expected: Any, make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    head = make_head("topr", positive_taper=tapers[0], negative_taper=tapers[1])
    coefficients = head(*make_batch([[1.0, 0.0]], [[1, 1]], drift=0.5)).coefficients
    assert_close(coefficients[:, 0], torch.tensor(expected, dtype=torch.float64))


ARMS = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05], dtype=torch.float64)
IS_CORRECT = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)


@torch.no_grad()
def climb(head: Objective, make_batch: Any, num_steps: int) -> Tensor:
    """Return the arms' log-probs after exact gradient steps on the five-arm toy; an arm is a completion of one token.

    The battery proves that the gradient with respect to a log-prob is -coefficient; the softmax adds its own.
    """
    _, batch = make_batch([[score] for score in IS_CORRECT.tolist()], [[1]] * 5)
    batch = replace(batch, sampling_logprobs=ARMS.log()[:, None])
    logits = ARMS.log()
    for _ in range(num_steps):
        logprobs = logits.log_softmax(0)
        pull = ARMS * head(logprobs[:, None], batch).coefficients[:, 0]
        logits = logits + 0.1 * (pull - logprobs.exp() * pull.sum())
    return logits.log_softmax(0)


@pytest.mark.parametrize(("num_steps", "expected"), [(100, 0.846), (1_000, 0.986), (20_000, 0.9995)])
def test_five_arm_toy_learns_the_two_correct_arms(
    num_steps: int, expected: float, make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    probability = climb(make_head("topr"), make_batch, num_steps).exp() @ IS_CORRECT
    digits = len(str(expected)) - 2
    assert round(float(probability), digits) == expected


def test_five_arm_toy_collapses_without_the_taper(
    make_head: Callable[..., Objective], make_batch: Callable[..., Any]
) -> None:
    naive = climb(make_head("reinforce"), make_batch, 1_000)
    tapered = climb(make_head("topr"), make_batch, 1_000)
    assert naive.min() < -100.0
    assert tapered.min() > -10.0


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"ratio": "mean"}, "ratio must be one of sequence, token, geometric"),
        ({"baseline": 1.0}, "baseline must lie inside reward_range"),
        ({"negative_taper": [1.0, 0.5]}, "negative_taper must be"),
        ({"positive_taper": [-0.1, 1.0]}, "positive_taper must be"),
        ({"reward_range": [1, 1]}, "reward_range must be"),
        ({"weight": 0.0}, "weight must be above 0"),
    ],
)
def test_a_senseless_setting_is_refused_by_its_key(
    overrides: Any, key: str, make_head: Callable[..., Objective]
) -> None:
    with pytest.raises(Exception, match=rf"objective\.topr\.{key}"):
        make_head("topr", **overrides)
