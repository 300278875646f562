"""AsymRE: a baseline below the group's mean, no ratios; and the 100-arm bandit against its closed form."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from modules.objectives.objective import Objective

REWARDS = torch.tensor(numpy.random.RandomState(1).rand(100))
ARMS = (torch.arange(100, dtype=torch.float64) / 10).softmax(0)
VALUE = float(ARMS @ REWARDS)
LIMITS = {-1.0: 0.6058, -0.5: 0.6847, -0.3: 0.7411, -0.2: 0.7741, -0.1: 0.8249, -0.05: 0.8881, -0.02: 0.9160}
SUPPORTS = {-1.0: 100, -0.5: 72, -0.3: 32, -0.2: 21, -0.1: 12, -0.05: 6, -0.02: 2}
SHIFTS = [*LIMITS, 0.0, 0.1]


def bandit(make_batch: Any) -> Any:
    """Return the batch of all arms, each a completion of one token whose siblings' mean is the exact value."""
    _, batch = make_batch([[reward] for reward in REWARDS.tolist()], [[1]] * len(ARMS))
    return replace(batch, group_rewards=torch.full((len(ARMS), 1), VALUE, dtype=torch.float64))


def pull(head: Objective, logprobs: Tensor, batch: Any) -> Tensor:
    """Return minus the gradient of the exact expected loss with respect to each arm's log-prob."""
    leaf = logprobs[:, None].detach().requires_grad_()
    loss = (ARMS[:, None] * head(leaf, batch).loss).sum()
    return -torch.autograd.grad(loss, leaf)[0][:, 0]


def limit_policy(delta_v: float) -> Tensor:
    """Return (mu (r - V) - tau)+ / (V_mu - V) with tau by bisection, so that it sums to 1."""
    strengths = ARMS * (REWARDS - VALUE - delta_v)
    low, high = -10.0, float(strengths.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (strengths - middle).clamp(min=0).sum() > -delta_v else (low, middle)
    return (strengths - low).clamp(min=0) / -delta_v


@pytest.fixture(scope="module")
def climbed() -> dict[float, Tensor]:
    """Hold the arms' probabilities after 20 000 exact steps of rate 1, by shift; filled by the first test to ask."""
    return {}


@pytest.fixture
def policies(climbed: dict[float, Tensor], make_head: Callable[..., Objective], make_batch: Any) -> Any:
    """Climb for all shifts side by side; AsymRE's pull on log-probs is constant, which is checked at the end."""
    if not climbed:
        batch = bandit(make_batch)
        heads = [make_head("asymre", reward_range=[0, 1], delta_v=shift) for shift in SHIFTS]
        logits = ARMS.log().repeat(len(SHIFTS), 1)
        pulls = torch.stack([pull(head, ARMS.log(), batch) for head in heads])
        for _ in range(20_000):
            logits += pulls - logits.softmax(-1) * pulls.sum(-1, keepdim=True)
        ends = torch.stack([pull(head, row, batch) for head, row in zip(heads, logits.log_softmax(-1), strict=True)])
        assert_close(ends, pulls)
        climbed.update(zip(SHIFTS, logits.softmax(-1), strict=True))
    return climbed


def test_bandit_is_the_papers() -> None:
    assert round(VALUE, 4) == 0.5249
    assert round(float(REWARDS.max()), 3) == 0.989


@pytest.mark.parametrize("delta_v", LIMITS)
def test_exact_steps_reach_the_closed_form(delta_v: float, policies: dict[float, Tensor]) -> None:
    expected = limit_policy(delta_v)
    assert (policies[delta_v] - expected).abs().sum() < 1.25e-3  # delta_v = -0.5 is the slowest, 1.249e-3
    assert round(float(expected @ REWARDS), 4) == LIMITS[delta_v]
    assert abs(float(policies[delta_v] @ REWARDS) - LIMITS[delta_v]) < 4e-4


@pytest.mark.parametrize("delta_v", LIMITS)
def test_the_support_shrinks_as_the_baseline_rises(delta_v: float, policies: dict[float, Tensor]) -> None:
    assert int((limit_policy(delta_v) > 0).sum()) == SUPPORTS[delta_v]
    inside = limit_policy(delta_v) > 1e-3
    assert (policies[delta_v][inside] > 5e-4).all()
    assert policies[delta_v][limit_policy(delta_v) == 0.0].sum() < 1e-3


@pytest.mark.parametrize("delta_v", [0.0, 0.1])
def test_a_baseline_at_the_mean_or_above_collapses_to_one_arm(delta_v: float, policies: dict[float, Tensor]) -> None:
    assert round(float(policies[delta_v].max()), 6) == 1.0
    assert round(float(policies[delta_v] @ REWARDS), 4) == 0.9034


@pytest.mark.parametrize("delta_v", [-0.3, -0.1])
@pytest.mark.parametrize("aggregation", ["sequence_sum", "sequence_mean"])
def test_gradient_is_the_mean_baselines_plus_a_share_of_supervised_learnings(
    aggregation: str, delta_v: float, make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0, 0.25], [0.0, 0.0, 1.0]], [[3, 5, 1], [2, 4, 4]], drift=None)
    lengths = batch.completion_mask.sum(-1, keepdim=True) if aggregation == "sequence_mean" else 1.0
    mean_baseline = gradient(make_head("reinforce", baseline="group_mean"), logprobs, batch) / lengths
    supervised = gradient(make_head("supervised"), logprobs, batch) * batch.num_tokens / batch.num_sequences / lengths
    actual = gradient(make_head("asymre", delta_v=delta_v, aggregation=aggregation), logprobs, batch)
    assert_close(actual, mean_baseline + abs(delta_v) * supervised)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_group_of_equal_rewards_keeps_a_small_pull_towards_its_completions(
    score: float, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    output = make_head("asymre")(*make_batch([[score, score]], [[2, 2]], drift=None))
    assert_close(output.coefficients, torch.full((2, 2), 0.1, dtype=torch.float64))


def test_half_the_shift_on_half_the_range_is_half_the_gradient(
    make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0, 0.0]], [[3, 5, 1]], drift=None)
    halved = gradient(make_head("asymre", reward_range=[0, 1], delta_v=-0.05), logprobs, batch)
    assert_close(2.0 * halved, gradient(make_head("asymre"), logprobs, batch))


def test_the_age_of_a_sample_does_not_matter(
    make_head: Callable[..., Objective], make_batch: Any, gradient: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0]], [[3, 5]], drift=None)
    aged = replace(batch, sampling_logprobs=batch.sampling_logprobs - 7.0, snapshot_step=batch.snapshot_step + 400)
    assert_close(gradient(make_head("asymre"), logprobs, aged), gradient(make_head("asymre"), logprobs, batch))
    assert not make_head("asymre").requires


@pytest.mark.parametrize("delta_v", [-2.1, 2.1, float("nan")])
def test_a_shift_beyond_the_reward_range_is_refused(delta_v: float, make_head: Callable[..., Objective]) -> None:
    with pytest.raises(Exception, match=r"objective\.asymre\.delta_v"):
        make_head("asymre", delta_v=delta_v)
