"""GRPO: PPO's clipped ratio with a group-normalised advantage (arXiv:2402.03300; clip-higher: arXiv:2503.14476).

The ratio is taken to the snapshot that sampled, by the engine's own log-probs, so that stale rollouts are corrected for
what really sampled them and no extra forward pass is needed.
"""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from datamodules.types import RolloutBatch
from modules.functional import (
    MAX_LOG_RATIO,
    NORMALIZERS,
    Aggregation,
    aggregation_weight,
    check_choice,
    group_mean,
    log_ratio,
    masked,
    normalized_advantage,
)
from modules.objectives.objective import Objective, ObjectiveOutput


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """Return max(-ratio A, -clip(ratio) A), capped at -dual_clip A for A < 0, and where its gradient is alive; [B, C].

    Args:
        ratio: [B, C] policy over snapshot, with gradient.
        advantages: [B, 1].
        clip_low: the ratio of a negative stops counting below 1 - clip_low.
        clip_high: the ratio of a positive stops counting above 1 + clip_high.
        dual_clip: largest ratio of a negative that still has a gradient.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    loss = torch.where(advantages < 0.0, torch.minimum(loss, -dual_clip * advantages), loss)
    is_alive = torch.where(advantages < 0.0, (ratio >= 1.0 - clip_low) & (ratio <= dual_clip), ratio <= 1.0 + clip_high)
    return loss, is_alive


class GRPO(Objective):
    """Group relative policy optimization.

    Args:
        weight: factor of this head where several are combined.
        reward_range: what a wrong and a right completion earn.
        clip_low: in (0, 1); 0.2 in the paper.
        clip_high: above 0; 0.2 in the paper, 0.28 with DAPO's clip-higher.
        dual_clip: above 1; bounds the loss of a negative whose ratio exploded.
        normalize_std: divide by the group's standard deviation; off in Dr. GRPO.
        aggregation: `sequence_mean` (the paper), `token_mean` (DAPO), `sequence_sum_norm` (Dr. GRPO), `sequence_sum`.
        horizon: the constant of `sequence_sum_norm`, usually the longest completion.
    """

    requires = frozenset({"sampling_logprobs"})
    needs_siblings = True
    ignores_equal_groups = True

    def __init__(
        self,
        weight: float,
        reward_range: Sequence[float],
        clip_low: float,
        clip_high: float,
        dual_clip: float,
        normalize_std: bool,
        aggregation: Aggregation,
        horizon: float,
    ) -> None:
        super().__init__(weight, reward_range)
        if not 0.0 < clip_low < 1.0 or not clip_high > 0.0:
            raise ValueError(
                f"objective.grpo.clip_low must be in (0, 1) and clip_high above 0, got {clip_low} and {clip_high}"
            )
        if not dual_clip > 1.0 or not horizon > 0.0:
            raise ValueError(
                f"objective.grpo.dual_clip must be above 1 and horizon above 0, got {dual_clip} and {horizon}"
            )
        check_choice("objective.grpo.aggregation", aggregation, get_args(Aggregation))
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip
        self.normalize_std = normalize_std
        self.aggregation = aggregation
        self.horizon = horizon
        self.normalizer = NORMALIZERS[aggregation]

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return the clipped surrogate of each token, [B, C]."""
        assert batch.sampling_logprobs is not None
        mask = batch.completion_mask
        rewards, group = self.mapped(batch.rewards), self.mapped(batch.group_rewards)
        if self.normalize_std:
            advantages = normalized_advantage(rewards, group, self.high - self.low)
        else:
            advantages = rewards - group_mean(group)
        drift = log_ratio(logprobs, batch.sampling_logprobs, mask)
        ratio = drift.clamp(max=MAX_LOG_RATIO).exp()
        loss, is_alive = clipped_surrogate(
            ratio,
            advantages[:, None],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        weight = aggregation_weight(mask, self.aggregation, self.horizon)
        coefficients = masked(weight * advantages[:, None] * ratio.detach() * is_alive, mask)
        clipped = (~is_alive & mask).sum(-1) / mask.sum(-1).clamp(min=1)
        metrics = {
            "clipped_fraction_of_positives": torch.where(advantages > 0.0, clipped, torch.nan),
            "clipped_fraction_of_negatives": torch.where(advantages < 0.0, clipped, torch.nan),
        }
        return ObjectiveOutput(masked(weight * loss, mask), coefficients, metrics)
