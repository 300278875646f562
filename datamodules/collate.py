"""From rollouts to the tensors of one micro-batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from datamodules.types import PackedGroup, Rollout, RolloutBatch

GroupKey = tuple[int, int]  # round and group_id


def collate(
    rollouts: Sequence[Rollout], groups: dict[GroupKey, list[Rollout]], counts: Mapping[str, Any]
) -> RolloutBatch:
    """Turn rollouts into the tensors of one micro-batch.

    Args:
        rollouts: rows of the batch, all trainable; neighbours with the same prompt share one copy of it.
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
        **_packed(rollouts),
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


def empty_batch(rollout: Rollout, counts: Mapping[str, Any]) -> RolloutBatch:
    """Return a micro-batch without rows for a rank that has nothing to train on while others have.

    Its single token keeps the rank in step with the others' forward and backward passes.

    Args:
        rollout: any of the step, for what a batch has one of.
        counts: as `collate` takes them.
    """
    batch = collate(
        [
            replace(
                rollout,
                prompt_ids=rollout.prompt_ids[:1],
                completion_ids=(),
                sampling_logprobs=None if rollout.sampling_logprobs is None else (),
            )
        ],
        {(rollout.round, rollout.group_id): [rollout]},
        counts,
    )
    rows: dict[str, Any] = {
        f.name: value[:0] for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)
    }
    return replace(
        batch,
        **rows | {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "groups": (PackedGroup(1, ()),)},
    )


def _packed(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the model's inputs: each run of rows with the same prompt as that prompt and their completions."""
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[list[int]] = []
    groups = []
    for prompt, rows in groupby(rollouts, key=lambda r: r.prompt_ids):
        assert prompt, "a prompt has at least one token, which predicts the first of its completions"
        ids.extend(prompt)
        positions.extend(range(len(prompt)))
        last = len(ids) - 1
        lengths = []
        for completion in (row.completion_ids for row in rows):
            start, length = len(ids), len(completion)
            predictors.append([last, *range(start, start + length - 1)][:length])
            ids.extend(completion)
            positions.extend(range(len(prompt), len(prompt) + length))
            lengths.append(length)
        groups.append(PackedGroup(len(prompt), tuple(lengths)))
    return {
        "input_ids": torch.tensor(ids),
        "position_ids": torch.tensor(positions),
        "predictors": _padded(predictors, torch.long),
        "groups": tuple(groups),
    }


def _score(rollout: Rollout) -> float:
    return rollout.reward if rollout.has_score and rollout.reward is not None else math.nan


def _length(rollout: Rollout) -> float:
    return float(len(rollout.completion_ids)) if rollout.has_score else math.nan


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0) -> Tensor:
    """Return rows right-padded to the longest, [B, longest]; at least one column."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
