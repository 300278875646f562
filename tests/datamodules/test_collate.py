"""From rollouts to tensors: masks from lengths, failed siblings as NaN, never as 0."""

import math
from collections.abc import Callable

import pytest
import torch

from datamodules.collate import collate
from datamodules.types import PackedGroup, Rollout, RolloutBatch

MakeRollout = Callable[..., Rollout]
COUNTS = {"num_sequences": 5, "num_tokens": 60, "num_positives": 2}
PAD = END = 0  # the pad token is the end token; 2 also ends a completion


def keyed(groups: dict[int, list[Rollout]]) -> dict[tuple[int, int], list[Rollout]]:
    return {(group[0].round, group_id): group for group_id, group in groups.items()}


def batch_of(*rows: Rollout, groups: dict[int, list[Rollout]] | None = None) -> RolloutBatch:
    return collate(rows, keyed(groups or {0: list(rows)}), COUNTS)


def assert_same(actual: torch.Tensor | None, expected: list[object], dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=dtype), equal_nan=True, rtol=0, atol=0)


def test_the_mask_counts_the_end_token_although_it_is_the_pad_token(make_rollout: MakeRollout) -> None:
    batch = batch_of(
        make_rollout(0, 0, completion_ids=(5, END), sampling_logprobs=(-1.0, -2.0)),
        make_rollout(0, 1, completion_ids=(5, 6, 7, 8), sampling_logprobs=(-1.0,) * 4, finish_reason="length"),
        make_rollout(0, 2, completion_ids=(END,), sampling_logprobs=(-3.0,)),
        make_rollout(0, 3, completion_ids=(5, END, 2), sampling_logprobs=(-1.0, -4.0, -5.0)),
    )
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert_same(batch.completion_mask, expected, torch.bool)
    assert_same(batch.completion_ids, [[5, 0, 0, 0], [5, 6, 7, 8], [0, 0, 0, 0], [5, 0, 2, 0]], torch.long)
    assert_same(batch.is_truncated, [False, True, False, False], torch.bool)


@pytest.mark.parametrize("end", [0, 2, 9])
def test_each_of_several_end_tokens_is_a_sampled_token(make_rollout: MakeRollout, end: int) -> None:
    batch = batch_of(
        make_rollout(0, 0, completion_ids=(5, end), sampling_logprobs=(-1.0, -2.0)),
        make_rollout(0, 1, completion_ids=(5, 6, end), sampling_logprobs=(-1.0, -2.0, -3.0)),
    )
    assert_same(batch.completion_mask, [[1, 1, 0], [1, 1, 1]], torch.bool)
    assert_same(batch.completion_ids, [[5, end, 0], [5, 6, end]], torch.long)


def test_inputs_are_packed_and_log_probs_stand_at_their_tokens(make_rollout: MakeRollout) -> None:
    batch = batch_of(
        make_rollout(0, 0, prompt_ids=(7, 8, 9), completion_ids=(4, 2), sampling_logprobs=(-0.5, -0.25)),
        make_rollout(0, 1, prompt_ids=(7,), completion_ids=(3, 3, 2), sampling_logprobs=(-1.0, -2.0, -4.0)),
    )
    assert_same(batch.input_ids, [7, 8, 9, 4, 2, 7, 3, 3, 2], torch.long)
    assert_same(batch.position_ids, [0, 1, 2, 3, 4, 0, 1, 2, 3], torch.long)
    assert_same(batch.predictors, [[2, 3, 0], [5, 6, 7]], torch.long)
    assert batch.groups == (PackedGroup(3, (2,)), PackedGroup(1, (3,)))
    assert_same(batch.sampling_logprobs, [[-0.5, -0.25, 0.0], [-1.0, -2.0, -4.0]], torch.float32)


def test_neighbours_with_the_same_prompt_share_it(make_rollout: MakeRollout) -> None:
    batch = batch_of(
        make_rollout(0, 0, prompt_ids=(7, 8), completion_ids=(4, 2), sampling_logprobs=None),
        make_rollout(0, 1, prompt_ids=(7, 8), completion_ids=(), sampling_logprobs=None),
        make_rollout(0, 2, prompt_ids=(7, 8), completion_ids=(3,), sampling_logprobs=None),
        make_rollout(0, 3, prompt_ids=(9,), completion_ids=(5,), sampling_logprobs=None),
    )
    assert_same(batch.input_ids, [7, 8, 4, 2, 3, 9, 5], torch.long)
    assert_same(batch.position_ids, [0, 1, 2, 3, 2, 0, 1], torch.long)
    assert_same(batch.predictors, [[1, 2], [0, 0], [1, 0], [5, 0]], torch.long)
    assert batch.groups == (PackedGroup(2, (2, 0, 1)), PackedGroup(1, (1,)))


def test_each_row_carries_its_own_groups_rewards_and_lengths(make_rollout: MakeRollout) -> None:
    groups = {
        g: [make_rollout(g, s, score=score, completion_ids=(4,) * (1 + g + s), sampling_logprobs=(-1.0,) * (1 + g + s))
            for s, score in enumerate(scores)]
        for g, scores in {3: (1.0, 0.0), 8: (0.25, 0.75)}.items()
    }  # fmt: skip
    batch = collate([groups[8][1], groups[3][0]], keyed(groups), COUNTS)
    assert_same(batch.rewards, [0.75, 1.0], torch.float32)
    assert_same(batch.group_id, [8, 3], torch.long)
    assert_same(batch.group_rewards, [[0.25, 0.75], [1.0, 0.0]], torch.float32)
    assert_same(batch.group_lengths, [[9.0, 10.0], [4.0, 5.0]], torch.float32)


@pytest.mark.parametrize("failure", ["judging", "sampling", "not judged"])
def test_a_failed_sibling_is_not_a_number_in_the_group_and_never_a_reward_of_0(
    make_rollout: MakeRollout, failure: str
) -> None:
    changes = {"judging": {"score": None}, "sampling": {"finish_reason": "error"}, "not judged": {"verdict": None}}
    group = [make_rollout(0, 0), make_rollout(0, 1, **changes[failure]), make_rollout(0, 2, score=0.0)]
    batch = batch_of(group[0], group[2], groups={0: group})
    assert_same(batch.group_rewards, [[1.0, math.nan, 0.0]] * 2, torch.float32)
    assert_same(batch.group_lengths, [[2.0, math.nan, 2.0]] * 2, torch.float32)
    assert batch.group_rewards.nanmean(1).tolist() == [0.5, 0.5]


def test_a_smaller_group_is_filled_up_with_nan(make_rollout: MakeRollout) -> None:
    groups = {0: [make_rollout(0, 0)], 1: [make_rollout(1, 0, score=0.0), make_rollout(1, 1)]}
    batch = collate([groups[0][0], groups[1][0]], keyed(groups), COUNTS)
    assert_same(batch.group_rewards, [[1.0, math.nan], [0.0, 1.0]], torch.float32)


def test_rows_that_nothing_sampled_leave_no_sampling_log_probs(make_rollout: MakeRollout) -> None:
    assert batch_of(make_rollout(0, 0, sampling_logprobs=None)).sampling_logprobs is None


def test_provenance_temperature_and_counts_are_carried_over(make_rollout: MakeRollout) -> None:
    batch = batch_of(
        make_rollout(0, 0, temperature=0.6, snapshot_step=40), make_rollout(0, 1, temperature=0.6, snapshot_step=20)
    )
    assert_same(batch.snapshot_step, [40, 20], torch.long)
    assert (batch.temperature, batch.num_sequences, batch.num_tokens, batch.num_positives) == (0.6, 5, 60, 2)


def test_rows_of_different_temperatures_are_refused(make_rollout: MakeRollout) -> None:
    rows = [make_rollout(0, 0, temperature=1.0), make_rollout(0, 1, temperature=0.6)]
    with pytest.raises(ValueError, match=r"^one batch needs one sampling temperature, got \[0\.6, 1\.0\]$"):
        batch_of(*rows)
