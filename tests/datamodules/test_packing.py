"""Packing: every trainable sample once a pass, groups whole, counts of the whole step."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from datamodules.counts import check_batch_size
from datamodules.micro_batches import Cut, packed_micro_batches, padded_micro_batches
from datamodules.packing import pack_round
from datamodules.types import OptimizerStep, PackedGroup, Rollout

MakeRollout = Callable[..., Rollout]
GROUPS, SIBLINGS = 6, 4


@pytest.fixture
def make_round(make_rollout: MakeRollout) -> Callable[..., list[Rollout]]:
    """Return a maker of rounds; `failed` are the (group, sibling) pairs that got no score.

    A sample's prompt starts with its group and its completion with its sibling; lengths differ throughout.
    """

    def make(failed: Sequence[tuple[int, int]] = ()) -> list[Rollout]:
        return [
            make_rollout(
                g, s,
                score=None if (g, s) in failed else float((g + s) % 3 == 0),
                prompt_ids=(g,) * (1 + g),
                completion_ids=(s,) * (1 + (g * 5 + s * 3) % 7),
                sampling_logprobs=(-0.5,) * (1 + (g * 5 + s * 3) % 7),
            )
            for g in range(GROUPS)
            for s in range(SIBLINGS)
        ]  # fmt: skip

    return make


def pack(
    rollouts: list[Rollout],
    *,
    batch_size: int = 8,
    passes: int = 1,
    max_tokens: int = 40,
    seed: int = 0,
    round_: int = 3,
    cut: Cut = packed_micro_batches,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[OptimizerStep]:
    return pack_round(
        rollouts, batch_size=batch_size, passes=passes, max_tokens=max_tokens, cut=cut, seed=seed, round_=round_,
        rank=rank, num_ranks=num_ranks,
    )  # fmt: skip


def samples(step: OptimizerStep) -> list[tuple[int, int]]:
    """Return the (group, sibling) pairs of a step, read from the token ids."""
    return [
        (int(batch.input_ids[place]), int(completion[0]))
        for batch in step.micro_batches
        for place, completion in zip(batch.predictors[:, 0], batch.completion_ids, strict=True)
    ]


FAILURES = {
    "none": [],
    "one sample": [(2, 1)],
    "one of each group": [(g, 0) for g in range(GROUPS)],
    "a whole group": [(4, s) for s in range(SIBLINGS)],
    "all but one group": [(g, s) for g in range(GROUPS - 1) for s in range(SIBLINGS)],
}


@pytest.mark.parametrize("failed", FAILURES)
@pytest.mark.parametrize(("batch_size", "passes"), [(4, 1), (6, 3), (8, 2), (24, 2)])
def test_every_trainable_sample_is_in_exactly_one_step_of_each_pass(
    make_round: Callable[..., list[Rollout]], failed: str, batch_size: int, passes: int
) -> None:
    rollouts = make_round(FAILURES[failed])
    counted = Counter(s for step in pack(rollouts, batch_size=batch_size, passes=passes) for s in samples(step))
    assert counted == {(r.group_id, r.sibling): passes for r in rollouts if r.is_trainable}


@pytest.mark.parametrize("failed", FAILURES)
@pytest.mark.parametrize(("batch_size", "num_steps"), [(4, 12), (6, 8), (8, 6), (24, 2)])
def test_the_number_of_steps_does_not_depend_on_which_samples_failed(
    make_round: Callable[..., list[Rollout]], failed: str, batch_size: int, num_steps: int
) -> None:
    assert len(pack(make_round(FAILURES[failed]), batch_size=batch_size, passes=2)) == num_steps


@pytest.mark.parametrize(("batch_size", "steps_of_a_group"), [(4, 1), (8, 1), (12, 1), (24, 1), (2, 2)])
def test_a_group_stays_in_one_step_where_steps_are_as_large_as_groups(
    make_round: Callable[..., list[Rollout]], batch_size: int, steps_of_a_group: int
) -> None:
    steps = pack(make_round(), batch_size=batch_size)
    for group in range(GROUPS):
        assert sum(any(g == group for g, _ in samples(step)) for step in steps) == steps_of_a_group


@pytest.mark.parametrize("max_tokens", [1, 15, 40, 10**6])
def test_counts_are_those_of_the_whole_step_however_it_is_cut(
    make_round: Callable[..., list[Rollout]], max_tokens: int
) -> None:
    rollouts = {(r.group_id, r.sibling): r for r in make_round([(2, 1), (3, 3)])}
    for step in pack(list(rollouts.values()), max_tokens=max_tokens):
        rows = [rollouts[key] for key in samples(step)]
        expected = (len(rows), sum(len(r.completion_ids) for r in rows), sum(r.reward == 1.0 for r in rows))
        assert {(b.num_sequences, b.num_tokens, b.num_positives) for b in step.micro_batches} == {expected}


def test_positives_are_scores_above_one_half(make_rollout: MakeRollout) -> None:
    (step,) = pack([make_rollout(0, s, score=score) for s, score in enumerate((0.0, 0.5, 0.51, 1.0))], batch_size=4)
    assert {b.num_positives for b in step.micro_batches} == {2}


def test_passes_are_shuffled_differently_and_repeat_for_the_same_seed_and_round(
    make_round: Callable[..., list[Rollout]],
) -> None:
    def order(seed: int = 0, round_: int = 3, passes: int = 2) -> list[list[tuple[int, int]]]:
        return [sorted(samples(s)) for s in pack(make_round(), batch_size=4, seed=seed, round_=round_, passes=passes)]

    first, second = order()[:GROUPS], order()[GROUPS:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert order() == order()
    assert order(passes=1) == first
    assert order(seed=1) != order()
    assert order(round_=4) != order()


def test_the_order_in_which_groups_were_sampled_does_not_matter(make_round: Callable[..., list[Rollout]]) -> None:
    rollouts = make_round()
    by_last_group_first = sorted(rollouts, key=lambda r: -r.group_id)
    assert [samples(s) for s in pack(by_last_group_first)] == [samples(s) for s in pack(rollouts)]


def test_a_step_in_which_every_sample_failed_keeps_its_place_and_has_no_micro_batch(
    make_round: Callable[..., list[Rollout]],
) -> None:
    complete = [samples(step) for step in pack(make_round(), batch_size=4)]
    steps = pack(make_round(FAILURES["a whole group"]), batch_size=4)
    assert [samples(step) for step in steps] == [[] if step[0][0] == 4 else step for step in complete]
    assert [step.micro_batches == () for step in steps] == [step[0][0] == 4 for step in complete]


def test_a_round_in_which_everything_failed_ends_the_run(make_round: Callable[..., list[Rollout]]) -> None:
    rollouts = make_round([(g, s) for g in range(GROUPS) for s in range(SIBLINGS)])
    with pytest.raises(RuntimeError, match=r"^round 3 has no trainable rollout: all 24 samples failed"):
        pack(rollouts)


@pytest.mark.parametrize(("batch_size", "round_size"), [(1, 512), (128, 512), (512, 512), (3, 9), (1, 1)])
def test_a_batch_size_that_divides_the_round_is_taken(batch_size: int, round_size: int) -> None:
    check_batch_size(batch_size, round_size)
    with pytest.raises(ValueError, match=rf"got {round_size + 1};"):
        check_batch_size(round_size + 1, round_size)


@pytest.mark.parametrize(
    ("batch_size", "round_size", "nearest"),
    [(100, 512, "64 and 128"), (5, 12, "4 and 6"), (513, 512, "512"), (1000, 7, "7"), (0, 12, "1"), (-4, 12, "1")],
)
def test_a_batch_size_that_does_not_divide_is_refused_with_the_nearest_that_do(
    batch_size: int, round_size: int, nearest: str
) -> None:
    message = (
        f"datamodule.batch_size must divide prompts_per_round x group_size = {round_size}, got {batch_size}; "
        f"the nearest valid sizes are {nearest}"
    )
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        check_batch_size(batch_size, round_size)


@pytest.mark.parametrize("failed", FAILURES)
@pytest.mark.parametrize("cut", [packed_micro_batches, padded_micro_batches])
@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_ranks_share_each_step_of_one_process_in_equally_many_micro_batches(
    num_ranks: int, cut: Cut, failed: str, make_round: Callable[..., list[Rollout]]
) -> None:
    rollouts = make_round(FAILURES[failed])
    whole = pack(rollouts, cut=cut)
    ranks = [pack(rollouts, cut=cut, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for number, step in enumerate(whole):
        parts = [of_rank[number] for of_rank in ranks]
        assert sorted(pair for part in parts for pair in samples(part)) == sorted(samples(step))
        assert len({len(part.micro_batches) for part in parts}) == 1
        counts = {(b.num_sequences, b.num_tokens, b.num_positives) for part in parts for b in part.micro_batches}
        assert counts == {(b.num_sequences, b.num_tokens, b.num_positives) for b in step.micro_batches}
        assert all(len(b.input_ids) <= 40 for part in parts for b in part.micro_batches)


def test_a_rank_without_samples_gets_one_token_and_no_row(make_round: Callable[..., list[Rollout]]) -> None:
    rollouts = make_round([(g, s) for g in range(GROUPS) for s in range(SIBLINGS) if (g, s) != (2, 1)])
    parts = [pack(rollouts, batch_size=24, rank=rank, num_ranks=2)[0].micro_batches for rank in range(2)]
    (full,), (empty,) = sorted(parts, key=lambda part: len(part[0].rewards), reverse=True)
    assert (len(full.rewards), len(empty.rewards)) == (1, 0)
    assert (len(empty.input_ids), len(empty.position_ids), empty.groups) == (1, 1, (PackedGroup(1, ()),))
    assert {len(x) for x in (empty.completion_ids, empty.completion_mask, empty.predictors, empty.group_rewards)} == {0}
    assert (empty.num_sequences, empty.num_tokens) == (1, full.num_tokens)


def test_ranks_get_nearly_the_same_load(make_rollout: MakeRollout) -> None:
    rollouts = [
        make_rollout(g, 0, prompt_ids=(g,), completion_ids=(1,) * (1 + 7 * g % 50), sampling_logprobs=None)
        for g in range(64)
    ]
    loads = [
        [
            len(b.input_ids)
            for b in pack(rollouts, batch_size=64, max_tokens=200, rank=rank, num_ranks=4)[0].micro_batches
        ]
        for rank in range(4)
    ]
    for together in zip(*loads, strict=True):
        assert max(together) - min(together) <= 0.1 * max(together)


def test_one_large_group_leaves_no_rank_idle(make_rollout: MakeRollout) -> None:
    rollouts = [make_rollout(0, s, completion_ids=(1,) * 20, sampling_logprobs=None) for s in range(8)]
    parts = [
        pack(rollouts, batch_size=8, max_tokens=1000, rank=rank, num_ranks=2)[0].micro_batches for rank in range(2)
    ]
    assert [[len(batch.rewards) for batch in part] for part in parts] == [[5], [3]]
