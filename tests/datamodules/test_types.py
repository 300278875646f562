"""The values of the data's way: what they refuse, derive and carry along."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from datamodules.types import OptimizerStep, Rollout, RolloutBatch, Sampling, Verdict

TENSORS = {
    "input_ids", "position_ids", "predictors", "completion_ids", "completion_mask", "rewards", "group_id",
    "group_rewards", "group_lengths", "snapshot_step", "is_truncated", "sampling_logprobs", "old_logprobs",
}  # fmt: skip


@pytest.fixture
def batch() -> RolloutBatch:
    tensors = {name: torch.ones(2, 3) for name in TENSORS}
    return RolloutBatch(**tensors, groups=(), temperature=0.6, num_sequences=8, num_tokens=24, num_positives=5)


def devices(batch: RolloutBatch) -> dict[str, str]:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: value.device.type for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "datamodule.sampling.max_tokens must be at least 1, got 0"),
        ({"temperature": 0.0}, "datamodule.sampling.temperature must be above 0"),
        ({"temperature": -1.0}, "datamodule.sampling.temperature must be above 0"),
        ({"temperature": float("nan")}, "datamodule.sampling.temperature must be above 0"),
        ({"top_p": 0.0}, "datamodule.sampling.top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "datamodule.sampling.top_p must be in (0, 1], got 1.1"),
        ({"top_p": float("nan")}, "datamodule.sampling.top_p must be in (0, 1], got nan"),
        ({"top_k": -1}, "datamodule.sampling.top_k must be 0 (keep all) or positive, got -1"),
    ],
)
def test_sampling_refuses_what_leaves_nothing_to_learn_from(changes: dict[str, Any], message: str) -> None:
    options = {"max_tokens": 16} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**options)


@pytest.mark.parametrize(
    ("top_p", "top_k", "is_renormalised"), [(1.0, 0, False), (0.99, 0, True), (1.0, 1, True), (0.5, 5, True)]
)
def test_only_top_p_and_top_k_cut_the_softmax(top_p: float, top_k: int, is_renormalised: bool) -> None:
    assert Sampling(16, temperature=0.6, top_p=top_p, top_k=top_k).is_renormalised is is_renormalised


def test_an_unjudged_rollout_has_no_reward_rather_than_0(make_rollout: Callable[..., Rollout]) -> None:
    rollout = make_rollout(verdict=None)
    assert (rollout.reward, rollout.is_trainable) == (None, False)


@pytest.mark.parametrize(
    ("finish_reason", "score", "is_trainable"),
    [("stop", 0.0, True), ("length", 1.0, True), ("stop", None, False), ("error", None, False), ("error", 0.0, False)],
)
def test_a_sample_is_trainable_when_drawn_and_scored(
    make_rollout: Callable[..., Rollout], finish_reason: str, score: float | None, is_trainable: bool
) -> None:
    rollout = make_rollout(score=score, finish_reason=finish_reason)
    assert (rollout.is_trainable, rollout.reward) == (is_trainable, score)


def test_judging_makes_a_new_rollout_and_leaves_the_first_alone(make_rollout: Callable[..., Rollout]) -> None:
    unjudged = make_rollout(verdict=None)
    verdict = Verdict("incorrect", 0.0)
    assert unjudged.judged(verdict) == make_rollout(verdict=verdict)
    assert unjudged.verdict is None


def test_moving_a_batch_moves_every_tensor_and_keeps_the_counts(batch: RolloutBatch) -> None:
    moved = batch.to("meta")
    assert devices(moved) == dict.fromkeys(TENSORS, "meta")
    assert devices(batch) == dict.fromkeys(TENSORS, "cpu")
    assert (moved.temperature, moved.num_sequences, moved.num_tokens, moved.num_positives) == (0.6, 8, 24, 5)
    assert moved.ref_logprobs is None


def test_moving_an_optimizer_step_moves_all_its_micro_batches(batch: RolloutBatch) -> None:
    moved = OptimizerStep((batch, batch, batch)).to("meta")
    assert [devices(b) for b in moved.micro_batches] == [dict.fromkeys(TENSORS, "meta")] * 3
