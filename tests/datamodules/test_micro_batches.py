"""Micro-batches: every sample once, siblings in a row, equal loads within the limit."""

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datamodules.micro_batches import load, packed_micro_batches, padded_micro_batches
from datamodules.types import Rollout, Verdict

Sizes = list[tuple[int, list[int]]]  # prompt and completion lengths of each group


def step(sizes: Sizes) -> list[Rollout]:
    return [
        Rollout(
            prompt_id=f"p{g}", group_id=g, sibling=s, prompt_text="", answer="", prompt_ids=(g,) * prompt,
            completion_ids=(s,) * length, sampling_logprobs=None, text="", finish_reason="stop", temperature=1.0,
            seed=0, round=0, snapshot=0, snapshot_step=0, verdict=Verdict("correct", 1.0),
        )
        for g, (prompt, lengths) in enumerate(sizes)
        for s, length in enumerate(lengths)
    ]  # fmt: skip


def loads(batches: list[list[Rollout]]) -> list[int]:
    """Return the load of each micro-batch."""
    return [sum(load([r for r in batch if r.group_id == g]) for g in {r.group_id for r in batch}) for batch in batches]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (1000, [[(0, 0), (0, 1), (1, 0), (1, 1)]]),
        (18, [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]),  # 4 + 6 + 5 and 2 + 3 + 2: of 22 tokens in all
        (11, [[(0, 0)], [(0, 1)], [(1, 0), (1, 1)]]),
        (1, [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]),  # one alone may be longer than the limit
    ],
)
def test_siblings_stay_together_until_the_limit_parts_them(max_tokens: int, expected: list[object]) -> None:
    batches = packed_micro_batches(step([(4, [6, 5]), (2, [3, 2])]), max_tokens)
    assert [[(r.group_id, r.sibling) for r in batch] for batch in batches] == expected


def test_one_sequence_beyond_the_limit_is_alone_and_leaves_the_others_packed() -> None:
    batches = packed_micro_batches(step([(50, [900]), *((50, [40]) for _ in range(30))]), 512)
    assert [len(batch) for batch in batches] == [1, 5, 5, 5, 5, 5, 5]


def test_copies_of_a_long_shared_prompts_keys_count_an_eighth_of_a_token_each() -> None:
    batches = packed_micro_batches(step([(4000, [100] * 64)]), 16384)
    assert [len(batch) for batch in batches] == [20, 20, 20, 4]
    assert loads(batches)[0] == 4000 + 20 * 100 + 20 * 4000 // 8


def test_padded_ones_are_longest_first_and_their_padded_size_is_within_the_limit() -> None:
    rollouts = step([(1, [9, 8, 4, 4, 1, 0])])

    def widths(max_tokens: int) -> list[list[int]]:
        return [[1 + len(r.completion_ids) for r in batch] for batch in padded_micro_batches(rollouts, max_tokens)]

    assert widths(1000) == [[10, 9, 5, 5, 2, 1]]
    assert widths(20) == [[10, 9], [5, 5, 2, 1]]
    assert widths(19) == [[10], [9, 5], [5, 2, 1]]
    assert widths(7) == [[10], [9], [5], [5], [2, 1]]  # one alone may be longer than the limit


def test_loads_are_equal_as_far_as_the_longest_first_rule_gets() -> None:
    batches = packed_micro_batches(step([(1, [n]) for n in (9, 8, 7, 6, 5, 4, 3, 2)]), 26)
    assert loads(batches) == [26, 26]


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=5)), max_size=8)


@settings(max_examples=200, deadline=None)
@example(sizes=[(17, [14, 21]), (2, [7, 30, 27, 30]), (16, [30]), (9, [2])], max_tokens=59)
@given(sizes=GROUPS, max_tokens=st.integers(1, 120))
def test_every_sample_is_in_one_micro_batch_next_to_its_siblings(sizes: Sizes, max_tokens: int) -> None:
    rollouts = step(sizes)
    batches = packed_micro_batches(rollouts, max_tokens)
    assert Counter(r for batch in batches for r in batch) == Counter(rollouts)
    assert all(batch for batch in batches)
    for batch, size in zip(batches, loads(batches), strict=True):
        runs = [group for group, _ in groupby(r.group_id for r in batch)]
        assert len(runs) == len(set(runs))
        assert size <= max_tokens or len(batch) == 1
    assert batches == packed_micro_batches(rollouts, max_tokens)


def test_a_step_without_samples_has_none() -> None:
    assert packed_micro_batches([], 100) == []
