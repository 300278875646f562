"""A round as numbers: each share says of what, and a sample without a score is in no mean."""

import math
from collections.abc import Callable

import pytest

from callbacks.rollout_metrics import rollout_metrics
from datamodules.types import Rollout, Verdict

MakeRollout = Callable[..., Rollout]


@pytest.fixture
def mixed_round(make_rollout: MakeRollout) -> list[Rollout]:
    """Return two groups of four: lengths 1 to 8, two without a score, one unparseable, two truncated."""
    scores = [1.0, 0.0, None, 1.0, 0.0, 0.0, None, 0.0]
    rollouts = [
        make_rollout(i // 4, i % 4, score=score, completion_ids=(4,) * (i + 1), round=5, snapshot=3 if i < 4 else 1)
        for i, score in enumerate(scores)
    ]
    unparseable = {"verdict": Verdict("unparseable", 0.0), "finish_reason": "length"}
    rollouts[1] = make_rollout(0, 1, completion_ids=(4,) * 2, round=5, snapshot=3, **unparseable)
    rollouts[6] = make_rollout(
        1, 2, score=None, completion_ids=(4,) * 7, finish_reason="length", round=5, snapshot=1
    )  # fmt: skip
    return rollouts


def test_every_metric_of_a_mixed_round_worked_by_hand(mixed_round: list[Rollout]) -> None:
    assert rollout_metrics(mixed_round) == pytest.approx(
        {
            "rollout/num_sampled": 8,
            "rollout/num_excluded": 2,
            "rollout/reward_mean": 2 / 6,  # of the scored, not 2 / 8
            "rollout/truncated_fraction": 2 / 8,
            "rollout/snapshot": 2,
            "rollout/lag": 3,
            "rollout/entropy": (0.5 + 0.25) / 2,  # each has the same two log-probs
            "rollout/length_mean": (1 + 2 + 4 + 5 + 6 + 8) / 6,
            "rollout/length_mean_correct": (1 + 4) / 2,
            "rollout/length_mean_incorrect": (2 + 5 + 6 + 8) / 4,
            "rollout/correct_fraction": 2 / 8,
            "rollout/incorrect_fraction": 3 / 8,
            "rollout/unparseable_fraction": 1 / 8,
            "rollout/error_fraction": 2 / 8,
            "rollout/groups_all_correct": 0,
            "rollout/groups_all_wrong": 1 / 2,
            "rollout/groups_informative": 1 / 2,
        },
        rel=1e-12,
    )


def test_a_group_is_judged_by_its_scored_siblings(make_rollout: MakeRollout) -> None:
    groups = [(1.0, None), (0.0, None), (1.0, 0.0), (None, None)]
    metrics = rollout_metrics([make_rollout(g, s, score=x) for g, xs in enumerate(groups) for s, x in enumerate(xs)])
    shares = [metrics[f"rollout/groups_{kind}"] for kind in ("all_correct", "all_wrong", "informative")]
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3])  # the group without any score is in no share


def test_partial_scores_that_differ_are_informative_though_all_are_wrong(make_rollout: MakeRollout) -> None:
    metrics = rollout_metrics([make_rollout(0, 0, score=0.25), make_rollout(0, 1, score=0.5)])
    assert (metrics["rollout/groups_informative"], metrics["rollout/groups_all_wrong"]) == (1.0, 1.0)
    assert metrics["rollout/reward_mean"] == 0.375


def test_a_round_without_any_score_has_no_mean_rather_than_0(make_rollout: MakeRollout) -> None:
    metrics = rollout_metrics([make_rollout(0, s, score=None) for s in range(3)])
    missing = {key for key, value in metrics.items() if math.isnan(value)}
    assert missing == {
        f"rollout/{k}"
        for k in ("reward_mean", "entropy", "length_mean", "length_mean_correct", "length_mean_incorrect")
    }
    assert (metrics["rollout/error_fraction"], metrics["rollout/num_excluded"]) == (1.0, 3.0)
    assert metrics["rollout/groups_informative"] == 0.0
