"""From a round's rollouts to optimizer steps and their micro-batches."""

import logging
import random
from collections.abc import Sequence
from typing import Any

from datamodules.collate import GroupKey, collate
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
            steps.append(_optimizer_step(cut(trainable, max_tokens), groups))
    if not any(r.has_score for r in rollouts):
        raise RuntimeError(f"round {round_} has no trainable rollout: all {len(rollouts)} samples failed (see the log)")
    return steps


def _optimizer_step(parts: list[list[Rollout]], groups: dict[GroupKey, list[Rollout]]) -> OptimizerStep:
    rollouts = [rollout for part in parts for rollout in part]
    counts: dict[str, Any] = {
        "num_sequences": len(rollouts),
        "num_tokens": sum(len(r.completion_ids) for r in rollouts),
        "num_positives": sum(r.is_positive for r in rollouts),
    }
    return OptimizerStep(tuple(collate(part, groups, counts) for part in parts))
