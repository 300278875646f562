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

POSITIVE_SCORE = 0.5  # a score above this is a positive: R > 0 once scores are mapped to [-1, 1]


def check_batch_size(batch_size: int, round_size: int) -> None:
    """Refuse a batch size that does not cut a round into equal optimizer steps.

    Raises:
        ValueError: with the nearest sizes that do.
    """
    if 1 <= batch_size <= round_size and round_size % batch_size == 0:
        return
    valid = [n for n in range(1, round_size + 1) if round_size % n == 0]
    below = [n for n in valid if n < batch_size][-1:]
    above = [n for n in valid if n > batch_size][:1]
    raise ValueError(
        f"datamodule.batch_size must divide prompts_per_round x group_size = {round_size}, got {batch_size}; "
        f"the nearest valid sizes are {' and '.join(map(str, below + above))}"
    )


def pack_round(
    rollouts: Sequence[Rollout], *, batch_size: int, passes: int, max_tokens: int, seed: int, round_: int
) -> list[OptimizerStep]:
    """Cut a round into optimizer steps of `batch_size` slots, groups kept together, reshuffled each pass.

    A slot whose sample failed stays empty, so the schedule never depends on failures; a step without any
    trainable sample has no micro-batch and changes no weight.

    Args:
        rollouts: the whole round, judged.
        batch_size: slots of one optimizer step.
        passes: times that each rollout is trained on.
        max_tokens: largest padded size of a micro-batch, in tokens.
        seed: the run's seed.
        round_: number of the round.
    """
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    steps = []
    for number in range(passes):
        order = sorted(groups)
        random.Random(derive_seed(seed, "order", round_, number)).shuffle(order)
        slots = [rollout for group_id in order for rollout in groups[group_id]]
        for start in range(0, len(slots), batch_size):
            trainable = [r for r in slots[start : start + batch_size] if r.is_trainable]
            if not trainable:
                log.warning("round %d has an optimizer step whose %d samples all failed", round_, batch_size)
            steps.append(_optimizer_step(trainable, groups, max_tokens))
    if not any(step.micro_batches for step in steps):
        raise RuntimeError(f"round {round_} has no trainable rollout: all {len(rollouts)} samples failed (see the log)")
    return steps


def _optimizer_step(rollouts: list[Rollout], groups: dict[int, list[Rollout]], max_tokens: int) -> OptimizerStep:
    counts: dict[str, Any] = {
        "num_sequences": len(rollouts),
        "num_tokens": sum(len(r.completion_ids) for r in rollouts),
        "num_positives": sum((r.reward or 0.0) > POSITIVE_SCORE for r in rollouts),
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


def collate(rollouts: Sequence[Rollout], groups: dict[int, list[Rollout]], counts: Mapping[str, Any]) -> RolloutBatch:
    """Turn rollouts into the tensors of one micro-batch.

    Args:
        rollouts: rows of the batch, all trainable.
        groups: every group of the round, whole, by group id.
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
    siblings = [groups[r.group_id] for r in rollouts]
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
    return rollout.reward if rollout.is_trainable and rollout.reward is not None else math.nan


def _length(rollout: Rollout) -> float:
    return float(len(rollout.completion_ids)) if rollout.is_trainable else math.nan


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0) -> Tensor:
    """Return rows right-padded to the longest, [B, longest]; at least one column."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
