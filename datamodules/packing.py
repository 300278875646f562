"""From a round's rollouts to optimizer steps and their micro-batches."""

import logging
import random
from collections.abc import Sequence
from typing import Any

from datamodules.collate import GroupKey, collate, empty_batch
from datamodules.micro_batches import Cut
from datamodules.seeds import derive_seed
from datamodules.types import OptimizerStep, Rollout

log = logging.getLogger(__name__)


def pack_round(
    rollouts: Sequence[Rollout],
    *,
    batch_size: int,
    passes: int,
    max_tokens: int,
    cut: Cut,
    seed: int,
    round_: int,
    num_groups: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[OptimizerStep]:
    """Cut rollouts into optimizer steps of `batch_size` slots, groups kept together, reshuffled each pass.

    A slot whose sample failed or was left out by curation stays empty, so the schedule never depends on rewards; a step
    without any trainable sample has no micro-batch and changes no weight.

    Args:
        rollouts: judged, of one round or, in replay, of several.
        batch_size: slots of one optimizer step; the last step of a pass has fewer where it does not divide.
        passes: times that the rollouts are trained on.
        max_tokens: most tokens of a micro-batch.
        cut: cuts a step into micro-batches.
        seed: the run's seed.
        round_: number of the round that trains.
        num_groups: groups that each pass draws, without putting any back; None takes all.
        rank: whose micro-batches are returned; each rank gets as many as any other, of nearly the same load.
        num_ranks: ranks that share each step.
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
            parts = cut(trainable, max_tokens, num_ranks)
            steps.append(_optimizer_step(trainable, part_of_rank(parts, rank, num_ranks), groups))
    if not any(r.has_score for r in rollouts):
        raise RuntimeError(f"round {round_} has no trainable rollout: all {len(rollouts)} samples failed (see the log)")
    return steps


def part_of_rank(parts: Sequence[list[Rollout]], rank: int, num_ranks: int) -> list[list[Rollout]]:
    """Return a rank's micro-batches: the heaviest go round the ranks, the next back again."""
    ordered = sorted(parts, key=_num_tokens, reverse=True)
    rows = [ordered[start : start + num_ranks] for start in range(0, len(ordered), num_ranks)]
    return [row[rank if number % 2 == 0 else num_ranks - 1 - rank] for number, row in enumerate(rows)]


def _num_tokens(part: Sequence[Rollout]) -> int:
    return sum(len(r.completion_ids) for r in part) + sum(map(len, {r.prompt_ids for r in part}))


def _optimizer_step(
    rollouts: Sequence[Rollout], parts: list[list[Rollout]], groups: dict[GroupKey, list[Rollout]]
) -> OptimizerStep:
    counts: dict[str, Any] = {
        "num_sequences": len(rollouts),
        "num_tokens": sum(len(r.completion_ids) for r in rollouts),
        "num_positives": sum(r.is_positive for r in rollouts),
    }
    return OptimizerStep(
        tuple(collate(part, groups, counts) if part else empty_batch(rollouts[0], counts) for part in parts)
    )
