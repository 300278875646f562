"""Supervised learning: maximise the log-prob of every token it is given, whatever its reward."""

import torch
from torch import Tensor

from datamodules.types import RolloutBatch
from modules.objectives.objective import Objective, ObjectiveOutput, score_function_loss


class Supervised(Objective):
    """Cross-entropy on demonstrations: loss = -sum of log-probs / tokens of the optimizer step."""

    normalizer = "tokens"

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return -log-prob of each token, [B, C]."""
        coefficients = torch.ones_like(logprobs).detach() * batch.completion_mask
        return ObjectiveOutput(score_function_loss(coefficients, logprobs, batch.completion_mask), coefficients)
