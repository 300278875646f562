"""From a round's rollouts to optimizer steps and their micro-batches."""

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.seeds import derive_seed
from datamodules.types import OptimizerStep, Rollout, RolloutBatch

log = logging.getLogger(__name__)

GroupKey = tuple[int, int]  # round and group_id


def pack_round(
    rollouts: Sequence[Rollout],
    *,
    batch_size: int,
    passes: int,
    max_tokens: int,
    seed: int,
    round_: int,
    num_groups: int | None = None,
) -> list[OptimizerStep]:
    """Cut rollouts into optimizer steps of `batch_size` slots, groups kept together, reshuffled each pass.

    A slot whose sample failed or was left out by curation stays empty, so the schedule never depends on rewards; a step
    without any trainable sample has no micro-batch and changes no weight.

    Args:
        rollouts: judged, of one round or, in replay, of several.
        batch_size: slots of one optimizer step; the last step of a pass has fewer where it does not divide.
        passes: times that the rollouts are trained on.
        max_tokens: largest padded size of a micro-batch, in tokens.
        seed: the run's seed.
        round_: number of the round that trains.
        num_groups: groups that each pass draws, without putting any back; None takes all.
    """
    groups: dict[GroupKey, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout.round, rollout.group_id), []).append(rollout)
    steps = []
    for number in range(passes):
        order = sorted(groups)
        random.Random(derive_seed(seed, "order", round_, number)).shuffle(order)
        slots = [rollout for key in order[:num_groups] for rollout in groups[key]]
        for start in range(0, len(slots), batch_size):
            trainable = [r for r in slots[start : start + batch_size] if r.is_trainable]
            if not trainable:
                log.warning("round %d has an optimizer step without any sample to train on", round_)
            steps.append(_optimizer_step(trainable, groups, max_tokens))
    if not any(r.has_score for r in rollouts):
        raise RuntimeError(f"round {round_} has no trainable rollout: all {len(rollouts)} samples failed (see the log)")
    return steps


def _optimizer_step(rollouts: list[Rollout], groups: dict[GroupKey, list[Rollout]], max_tokens: int) -> OptimizerStep:
    counts: dict[str, Any] = {
        "num_sequences": len(rollouts),
        "num_tokens": sum(len(r.completion_ids) for r in rollouts),
        "num_positives": sum(r.is_positive for r in rollouts),
    }
    return OptimizerStep(tuple(collate(part, groups, counts) for part in _micro_batches(rollouts, max_tokens)))


def _micro_batches(rollouts: list[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """Yield the rollouts longest first, as many together as fit into `max_tokens` with little padding."""
    ordered = sorted(rollouts, key=lambda r: len(r.prompt_ids) + len(r.completion_ids), reverse=True)
    start = 0
    while start < len(ordered):
        longest = len(ordered[start].prompt_ids) + len(ordered[start].completion_ids)
        count = max(1, max_tokens // max(1, longest))
        yield ordered[start : start + count]
        start += count


def collate(
    rollouts: Sequence[Rollout], groups: dict[GroupKey, list[Rollout]], counts: Mapping[str, Any]
) -> RolloutBatch:
    """Turn rollouts into the tensors of one micro-batch.

    Args:
        rollouts: rows of the batch, all trainable.
        groups: every group, whole.
        counts: `num_sequences`, `num_tokens` and `num_positives` of the optimizer step.

    Raises:
        ValueError: the rows were sampled at different temperatures, or log-probs are missing for some tokens.
    """
    for r in rollouts:
        if r.sampling_logprobs is not None and len(r.sampling_logprobs) != len(r.completion_ids):
            raise ValueError(
                f"sample {r.sibling} of prompt {r.prompt_id!r} has {len(r.completion_ids)} tokens and "
                f"{len(r.sampling_logprobs)} log-probs; each token needs one"
            )
    temperatures = {r.temperature for r in rollouts}
    if len(temperatures) != 1:
        raise ValueError(f"one batch needs one sampling temperature, got {sorted(temperatures)}")
    siblings = [groups[r.round, r.group_id] for r in rollouts]
    has_logprobs = all(r.sampling_logprobs is not None for r in rollouts)
    lengths = torch.tensor([len(r.completion_ids) for r in rollouts])
    completion_ids = _padded([r.completion_ids for r in rollouts], torch.long)
    return RolloutBatch(
        input_ids=_padded([r.prompt_ids + r.completion_ids for r in rollouts], torch.long),
        prompt_lengths=torch.tensor([len(r.prompt_ids) for r in rollouts]),
        completion_ids=completion_ids,
        completion_mask=torch.arange(completion_ids.shape[1]) < lengths[:, None],
        rewards=torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
        group_id=torch.tensor([r.group_id for r in rollouts]),
        group_rewards=_padded([[_score(s) for s in group] for group in siblings], torch.float32, math.nan),
        group_lengths=_padded([[_length(s) for s in group] for group in siblings], torch.float32, math.nan),
        snapshot_step=torch.tensor([r.snapshot_step for r in rollouts]),
        is_truncated=torch.tensor([r.finish_reason == "length" for r in rollouts]),
        temperature=temperatures.pop(),
        sampling_logprobs=(
            _padded([r.sampling_logprobs or () for r in rollouts], torch.float32) if has_logprobs else None
        ),
        **counts,
    )


def _score(rollout: Rollout) -> float:
    return rollout.reward if rollout.has_score and rollout.reward is not None else math.nan


def _length(rollout: Rollout) -> float:
    return float(len(rollout.completion_ids)) if rollout.has_score else math.nan


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0) -> Tensor:
    """Return rows right-padded to the longest, [B, longest]; at least one column."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
