"""OAPL: a square of log-ratio against advantage, whose fixed point is mu exp(r / beta)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from modules.objectives.objective import Objective

ARMS = torch.tensor(numpy.random.RandomState(0).randn(10)).softmax(0)
IS_CORRECT = torch.tensor([float(arm in (0, 3, 7)) for arm in range(10)], dtype=torch.float64)


def bandit(make_batch: Any, beta: float) -> Any:
    """Return the batch of all arms, each a completion of one token, with the exact value of the snapshot."""
    _, batch = make_batch([[score] for score in IS_CORRECT.tolist()], [[1]] * 10)
    value = beta * float((ARMS @ (IS_CORRECT / beta).exp()).log())
    return replace(
        batch, sampling_logprobs=ARMS.log()[:, None], group_rewards=torch.full((10, 1), value, dtype=torch.float64)
    )


def minimise(head: Objective, batch: Any, shares: Tensor) -> Tensor:
    """Return the arms' probabilities that minimise the head's loss where arms are sampled by these shares."""
    logits = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (shares * head(logits.log_softmax(0)[:, None], batch).loss).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return logits.detach().softmax(0)


@pytest.mark.parametrize("shares", [ARMS, torch.full((10,), 0.1, dtype=torch.float64)], ids=["snapshot", "uniform"])
@pytest.mark.parametrize("scale", ["raw", "normalized"])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_fixed_point_is_the_tilted_snapshot_whatever_sampled(
    beta: float, scale: str, shares: Tensor, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    head = make_head("oapl", beta1=beta, beta2=beta, scale=scale)
    expected = ARMS * (IS_CORRECT / beta).exp()
    actual = minimise(head, bandit(make_batch, beta), shares)
    assert_close(actual, expected / expected.sum(), rtol=1e-5, atol=1e-7)


def test_fixed_point_has_the_known_share_of_correct_arms(make_head: Callable[..., Objective], make_batch: Any) -> None:
    policy = minimise(make_head("oapl", beta1=1.0, beta2=1.0), bandit(make_batch, 1.0), ARMS)
    assert round(float(policy @ IS_CORRECT), 4) == 0.7323


def test_loss_is_the_square_of_the_summed_drift_against_the_advantage(
    make_head: Callable[..., Objective], make_batch: Any
) -> None:
    head = make_head("oapl", beta1=0.5, beta2=0.25)
    output = head(*make_batch([[1.0, 0.0, 0.0]], [[2, 6, 3]], drift=-0.1))
    value = 0.5 * math.log((math.exp(2.0) + 2.0) / 3.0)
    residuals = torch.tensor([-0.05 - (1 - value), -0.15 + value, -0.075 + value], dtype=torch.float64)
    assert_close(output.loss, residuals**2)
    assert_close(output.coefficients, -0.5 * residuals)


def test_metrics_compare_the_anchor_with_the_advantage(make_head: Callable[..., Objective], make_batch: Any) -> None:
    metrics = make_head("oapl", beta2=0.25)(*make_batch([[1.0, 0.0]], [[2, 6]], drift=-0.1)).metrics
    value = math.log((math.e + 1.0) / 2.0)
    expected = {
        "value": [value, value],
        "anchor_abs": [0.05, 0.15],
        "anchor_abs_max": [0.05, 0.15],
        "advantage_abs": [1 - value, value],
        "residual": [-0.05 - (1 - value), -0.15 + value],
    }
    assert_close(metrics, {key: torch.tensor(row, dtype=torch.float64) for key, row in expected.items()})


def test_normalized_scale_is_the_raw_gradient_over_twice_the_anchor(
    make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    stale = make_batch([[1.0, 0.0, 0.25]], [[2, 6, 3]], drift=None)
    raw = gradient(make_head("oapl", beta2=0.01), *stale)
    assert_close(gradient(make_head("oapl", beta2=0.01, scale="normalized"), *stale), raw / 0.02)


def test_one_success_among_failures_is_worth_more_than_to_reinforce(
    make_head: Callable[..., Objective], make_batch: Any
) -> None:
    """V is at least the mean (Jensen), so failures are pushed harder and the success is pulled less."""
    output = make_head("oapl", beta1=0.1)(*make_batch([[1.0, 0.0, 0.0, 0.0]], [[1, 1, 1, 1]]))
    value = 1.0 + 0.1 * math.log((1.0 + 3.0 * math.exp(-10.0)) / 4.0)
    assert_close(output.metrics["value"], torch.full((4,), value, dtype=torch.float64))
    assert value > 0.25


@pytest.mark.parametrize(
    ("overrides", "key"),
    [({"beta1": 0.0}, "beta1"), ({"beta2": -1.0}, "beta2"), ({"beta1": math.nan}, "beta1"), ({"scale": "x"}, "scale")],
)
def test_a_senseless_setting_is_refused_by_its_key(
    overrides: Any, key: str, make_head: Callable[..., Objective]
) -> None:
    with pytest.raises(Exception, match=rf"objective\.oapl\.{key} must be"):
        make_head("oapl", **overrides)
