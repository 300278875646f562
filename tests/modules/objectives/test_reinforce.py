"""REINFORCE: the reward, minus a baseline from siblings if asked, times the plain sum of log-probs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from modules.objectives.objective import Objective


def advantages(head: Objective, make_batch: Any, scores: list[float]) -> list[float]:
    """Return the coefficient of each sibling of one group whose completions have one token."""
    logprobs, batch = make_batch([scores], [[1] * len(scores)], drift=None)
    return [round(value, 9) for value in head(logprobs, batch).coefficients[:, 0].tolist()]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("none", [1.0, -1.0, -1.0, -1.0]),
        ("group_mean", [1.5, -0.5, -0.5, -0.5]),
        ("leave_one_out", [2.0, -0.666666667, -0.666666667, -0.666666667]),
    ],
)
def test_one_success_among_four_earns_its_reward_less_the_baseline(
    baseline: str, expected: list[float], make_head: Callable[..., Objective], make_batch: Any
) -> None:
    assert advantages(make_head("reinforce", baseline=baseline), make_batch, [1.0, 0.0, 0.0, 0.0]) == expected


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_rewards_teach_nothing_with_a_baseline(
    baseline: str, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    assert advantages(make_head("reinforce", baseline=baseline), make_batch, [0.25] * 4) == [0.0] * 4


@pytest.mark.parametrize("score", [0.0, 0.25, 1.0])
def test_the_reward_range_maps_the_verifiers_score(
    score: float, make_head: Callable[..., Objective], make_batch: Any
) -> None:
    assert advantages(make_head("reinforce", reward_range=[-3, 5]), make_batch, [score]) == [-3.0 + 8.0 * score]


def test_long_completions_weigh_by_their_sum_of_logprobs(
    make_head: Callable[..., Objective], make_batch: Any, step_loss: Any
) -> None:
    logprobs, batch = make_batch([[1.0, 0.0]], [[2, 7]], drift=None)
    sums = (logprobs * batch.completion_mask).sum(-1)
    assert_close(step_loss(make_head("reinforce"), logprobs, batch), -(sums[0] - sums[1]) / 2)


def test_stale_samples_are_not_corrected(make_head: Callable[..., Objective], make_batch: Any) -> None:
    stale = make_head("reinforce")(*make_batch([[1.0, 0.0]], [[2, 7]], drift=-2.0)).coefficients
    fresh = make_head("reinforce")(*make_batch([[1.0, 0.0]], [[2, 7]], drift=0.0)).coefficients
    assert torch.equal(stale, fresh)


def test_an_unknown_baseline_is_refused_with_the_known_ones(make_head: Callable[..., Objective]) -> None:
    with pytest.raises(
        Exception, match=r"objective\.reinforce\.baseline must be one of none, group_mean, leave_one_out"
    ):
        make_head("reinforce", baseline="mean")
