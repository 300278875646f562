"""OAPL: regress the sequence's log-ratio on its advantage over the snapshot (after arXiv:2602.19362).

The optimum of reward minus beta * KL(policy | snapshot) satisfies beta * log-ratio = r - V. OAPL makes that
equation a square loss, which holds for samples of any age, with V estimated from the group. There is no importance
weight, clip or KL term.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from datamodules.types import RolloutBatch
from modules.functional import check_choice, log_mean_exp, log_ratio, sequence_sum
from modules.objectives.objective import Objective, ObjectiveOutput


class OAPL(Objective):
    """Optimal advantage-based policy optimization with a lagged inference policy.

    loss = mean (beta2 (L - B) - (r - V))^2 with V = beta1 log mean exp(r / beta1) over the group and B the engine's own
    log-probs: the trainer's mismatch with the engine is part of the anchor.

    Args:
        weight: factor of this head where several are combined.
        reward_range: the paper scores 1 and 0.
        beta1: temperature of V; towards 0 it is the group's maximum, towards infinity its mean.
        beta2: strength of the anchor to the snapshot.
        scale: `raw` is the paper's square, whose gradient is 2 beta2 times REINFORCE's; `normalized` divides by that.
    """

    requires = frozenset({"sampling_logprobs"})
    needs_siblings = True
    needs_one_snapshot = True

    def __init__(
        self,
        weight: float,
        reward_range: Sequence[float],
        beta1: float,
        beta2: float,
        scale: Literal["raw", "normalized"],
    ) -> None:
        super().__init__(weight, reward_range)
        for key, value in (("beta1", beta1), ("beta2", beta2)):
            if not value > 0.0:
                raise ValueError(f"objective.oapl.{key} must be above 0, got {value}")
        check_choice("objective.oapl.scale", scale, ("raw", "normalized"))
        self.beta1 = beta1
        self.beta2 = beta2
        self.factor = 1.0 if scale == "raw" else 1.0 / (2.0 * beta2)

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return the squared residual of each sequence, [B]."""
        assert batch.sampling_logprobs is not None
        mask = batch.completion_mask
        value = log_mean_exp(self.mapped(batch.group_rewards), self.beta1)
        advantages = self.mapped(batch.rewards) - value
        anchor = self.beta2 * sequence_sum(log_ratio(logprobs, batch.sampling_logprobs, mask), mask)
        residual = anchor - advantages
        is_empty = ~mask.any(-1)
        metrics = {
            "value": value,
            "anchor_abs": anchor.detach().abs(),
            "anchor_abs_max": anchor.detach().abs(),
            "advantage_abs": advantages.abs(),
            "residual": residual.detach(),
        }
        loss = torch.where(is_empty, 0.0, self.factor * residual.square())
        coefficients = torch.where(is_empty, 0.0, -2.0 * self.beta2 * self.factor * residual.detach())
        return ObjectiveOutput(loss, coefficients, metrics)
