"""Positives only: supervised learning on the completions that succeeded (RFT, STaR, ReST)."""

from torch import Tensor

from datamodules.types import RolloutBatch
from modules.objectives.objective import Objective, ObjectiveOutput, score_function_loss


class PositivesOnly(Objective):
    """Rejection-sampling fine-tuning: loss = -sum over positives of L / their number.

    A positive is a completion with a score above one half, which is R > 0 for rewards of +1 and -1. The number is that
    of the whole optimizer step.
    """

    normalizer = "positives"

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return -1{R > 0} L, [B, C]."""
        coefficients = (batch.rewards > 0.5).to(logprobs.dtype)[:, None] * batch.completion_mask
        return ObjectiveOutput(score_function_loss(coefficients, logprobs, batch.completion_mask), coefficients)
