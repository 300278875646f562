"""REINFORCE as it is: no correction for stale samples (Williams 1992; RLOO: arXiv:2402.14740).

On stale samples with failures among them it has no finite optimum: it pushes failures towards zero probability for
ever, and takes successes along. That is the collapse which TOPR, AsymRE and OAPL were made to avoid.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from datamodules.types import RolloutBatch
from modules.functional import check_choice, group_mean, leave_one_out_advantage
from modules.objectives.objective import Objective, ObjectiveOutput, score_function_loss


class Reinforce(Objective):
    """Policy gradient: loss = -mean A L over sequences.

    Args:
        weight: factor of this head where several are combined.
        reward_range: what a wrong and a right completion earn.
        baseline: `none` (A = r), `group_mean` (A = r - mean) or `leave_one_out` (RLOO: A = n/(n-1) (r - mean)).
    """

    def __init__(
        self,
        weight: float,
        reward_range: Sequence[float],
        baseline: Literal["none", "group_mean", "leave_one_out"],
    ) -> None:
        super().__init__(weight, reward_range)
        check_choice("objective.reinforce.baseline", baseline, ("none", "group_mean", "leave_one_out"))
        self.baseline = baseline
        self.needs_siblings = self.ignores_equal_groups = baseline != "none"

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return -A L, [B, C]."""
        rewards, group = self.mapped(batch.rewards), self.mapped(batch.group_rewards)
        if self.baseline == "group_mean":
            advantages = rewards - group_mean(group)
        elif self.baseline == "leave_one_out":
            advantages = leave_one_out_advantage(rewards, group)
        else:
            advantages = rewards
        coefficients = advantages[:, None] * batch.completion_mask
        return ObjectiveOutput(score_function_loss(coefficients, logprobs, batch.completion_mask), coefficients)
