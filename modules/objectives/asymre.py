"""AsymRE: REINFORCE with a baseline just below the group's mean (after arXiv:2506.20520).

The baseline r_mean + delta_v with delta_v < 0 leans on successes more than on failures. That small asymmetry alone
keeps off-policy training stable; at delta_v >= 0 it collapses. It needs no ratio, so no sampling log-probs.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from datamodules.types import RolloutBatch
from modules.functional import aggregation_weight, check_choice, group_mean
from modules.objectives.objective import Objective, ObjectiveOutput, score_function_loss


class AsymRE(Objective):
    """Asymmetric REINFORCE: loss = -mean (r - group mean - delta_v) L.

    Args:
        weight: factor of this head where several are combined.
        reward_range: the paper scores +1 and -1.
        delta_v: shift of the baseline, in units of the mapped reward; halve it when the range is [0, 1].
        aggregation: `sequence_sum` (plain L) or `sequence_mean` (L / |y|).
    """

    needs_siblings = True

    def __init__(
        self,
        weight: float,
        reward_range: Sequence[float],
        delta_v: float,
        aggregation: Literal["sequence_sum", "sequence_mean"],
    ) -> None:
        super().__init__(weight, reward_range)
        check_choice("objective.asymre.aggregation", aggregation, ("sequence_sum", "sequence_mean"))
        if not abs(delta_v) <= self.high - self.low:
            raise ValueError(
                "objective.asymre.delta_v must not exceed the span of reward_range, "
                f"{self.high - self.low}, got {delta_v}"
            )
        self.delta_v = delta_v
        self.aggregation = aggregation

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return -(r - group mean - delta_v) L, [B, C]; groups of equal rewards keep the pull -delta_v."""
        mask = batch.completion_mask
        advantages = self.mapped(batch.rewards) - group_mean(self.mapped(batch.group_rewards)) - self.delta_v
        coefficients = advantages[:, None] * aggregation_weight(mask, self.aggregation) * mask
        return ObjectiveOutput(score_function_loss(coefficients, logprobs, mask), coefficients)
