"""Curation decides on whole groups, by reward alone, and leaves baselines and schedule as they were."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callbacks.rollout_metrics import rollout_metrics
from datamodules.curation import (
    Balance,
    anna_karenina,
    balance,
    curate,
    equivalent_baseline,
    informative_only,
    keep_all,
)
from datamodules.micro_batches import packed_micro_batches
from datamodules.packing import pack_round
from datamodules.types import Rollout

MakeRollout = Callable[..., Rollout]
Scores = Sequence[Sequence[float | None]]
MIXED: Scores = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, None]]


@pytest.fixture
def make_groups(make_rollout: MakeRollout) -> Callable[[Scores], list[list[Rollout]]]:
    def make(scores: Scores) -> list[list[Rollout]]:
        return [
            [make_rollout(g, s, score=score, seed=7919 * (4 * g + s) % 101) for s, score in enumerate(group)]
            for g, group in enumerate(scores)
        ]

    return make


def test_nothing_is_left_out_by_default(make_groups: Callable[[Scores], list[list[Rollout]]]) -> None:
    assert keep_all(make_groups(MIXED)) == [[True] * 4] * 3


def test_groups_of_equal_rewards_are_left_out_whole(make_groups: Callable[[Scores], list[list[Rollout]]]) -> None:
    assert informative_only(make_groups(MIXED)) == [[True] * 4, [False] * 4, [False] * 4]


def test_of_each_prompt_the_first_success_and_all_failures_stay(
    make_groups: Callable[[Scores], list[list[Rollout]]],
) -> None:
    kept = anna_karenina(make_groups(MIXED))
    assert kept == [
        [True, True, False, True],
        [True] * 4,
        [True, False, False, True],
    ]  # one without score is no success


@pytest.mark.parametrize(
    ("share", "positives", "negatives"), [(0.5, 5, 5), (0.2, 2, 6), (0.8, 5, 1), (0.45, 5, 6), (0.999, 5, 1)]
)
def test_balance_leaves_out_as_few_as_bring_the_share_of_positives_to_its_target(
    share: float, positives: int, negatives: int, make_groups: Callable[[Scores], list[list[Rollout]]]
) -> None:
    groups = make_groups(MIXED)  # 5 positives, 6 negatives, one without a score
    kept = balance(groups, share)
    left = [r for group, keeps in zip(groups, kept, strict=True) for r, keep in zip(group, keeps, strict=True) if keep]
    assert [sum(r.is_positive for r in left), sum(not r.is_positive for r in left)] == [positives, negatives]
    assert balance(groups, share) == kept


@pytest.mark.parametrize("scores", [[[0.0] * 4], [[1.0] * 4], [[None] * 4]])
def test_balance_keeps_a_round_of_one_kind(
    scores: Scores, make_groups: Callable[[Scores], list[list[Rollout]]]
) -> None:
    assert balance(make_groups(scores), 0.2) in ([[True] * 4], [[False] * 4])
    if scores[0][0] is not None:
        assert balance(make_groups(scores), 0.2) == [[True] * 4]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_a_share_that_cannot_be_reached_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"curation\.positive_share must be in \(0, 1\)"):
        Balance(share)


@pytest.mark.parametrize("curation", [keep_all, informative_only, anna_karenina, partial(balance, positive_share=0.3)])
def test_baselines_and_schedule_are_those_of_the_whole_round(
    curation: Callable[..., list[list[bool]]], make_groups: Callable[[Scores], list[list[Rollout]]]
) -> None:
    rollouts = [r for group in make_groups(MIXED) for r in group]
    curated = curate(rollouts, curation)
    assert [(r.group_id, r.sibling) for r in curated] == [(r.group_id, r.sibling) for r in rollouts]
    kept = [r for r in curated if r.is_trainable]
    packing = {"batch_size": 2, "passes": 1, "max_tokens": 64, "cut": packed_micro_batches, "seed": 0, "round_": 3}
    steps, whole = (pack_round(part, **packing) for part in (curated, rollouts))  # type: ignore[arg-type]
    assert len(steps) == len(whole) == 6
    batches = [batch for step in steps for batch in step.micro_batches]
    assert sum(len(batch.rewards) for batch in batches) == len(kept)
    assert sum(batch.num_sequences for step in steps for batch in step.micro_batches[:1]) == len(kept)
    for batch in batches:
        for group_id, row in zip(batch.group_id.tolist(), batch.group_rewards, strict=True):
            whole_group = [math.nan if s is None else s for s in MIXED[group_id]]
            assert row.tolist() == pytest.approx(whole_group, nan_ok=True)


@given(p=st.floats(0.01, 0.99), target=st.floats(0.01, 0.99))
def test_the_equivalent_baseline_moves_the_effective_share_to_what_is_left(p: float, target: float) -> None:
    c = equivalent_baseline(p, target)
    assert p * (1 - c) / (1 + c * (1 - 2 * p)) == pytest.approx(target)


def test_what_was_left_out_is_told_by_length_and_reward(make_groups: Callable[[Scores], list[list[Rollout]]]) -> None:
    rollouts = [r for group in make_groups(MIXED) for r in group]
    metrics = rollout_metrics(curate(rollouts, anna_karenina))
    curation = {k.removeprefix("rollout/curation/"): v for k, v in metrics.items() if "curation" in k}
    assert curation == pytest.approx(
        {
            "left_out_fraction": 3 / 11,
            "length_mean_kept": 2.0,
            "length_mean_left_out": 2.0,
            "reward_mean_kept": 2 / 8,
            "reward_mean_left_out": 1.0,
            "positive_share_sampled": 5 / 11,
            "positive_share_trained": 2 / 8,
            "equivalent_baseline": equivalent_baseline(5 / 11, 2 / 8),
        }
    )
    assert not any("curation" in key for key in rollout_metrics(rollouts))
