"""TOPR: REINFORCE whose negatives fade as the policy leaves them (after arXiv:2503.14286).

Positives keep weight 1, so good completions are learned however unlikely the policy finds them. Negatives are
weighted by the ratio of the whole sequence, clipped to [0, 1]: once the policy has moved away from a bad
completion there is no more gradient in pushing it down, and the loss stays bounded without a KL term.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from datamodules.types import RolloutBatch
from modules.functional import bounded_exp, check_choice, lengths, log_ratio, sequence_sum
from modules.objectives.objective import Objective, ObjectiveOutput, score_function_loss

RATIOS = ("sequence", "token", "geometric")


def taper(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, *, ratio: str, low: Tensor, high: Tensor
) -> Tensor:
    """Return the clipped importance ratio that weighs each sequence or token, detached, [B, 1] or [B, C].

    Args:
        logprobs: [B, C] under the policy.
        sampling_logprobs: [B, C] under the snapshot that sampled the tokens.
        mask: [B, C] True on completion tokens.
        ratio: `sequence` is the product over tokens (the paper), `token` each token's own, `geometric` the
            per-token mean; the last two hardly taper a long negative.
        low: [B] lower clip.
        high: [B] upper clip.
    """
    drift = log_ratio(logprobs, sampling_logprobs, mask).detach()
    if ratio != "token":
        drift = sequence_sum(drift, mask)[:, None]
    if ratio == "geometric":
        drift = drift / lengths(mask)[:, None]
    return torch.minimum(torch.maximum(bounded_exp(drift), low[:, None]), high[:, None])


class TOPR(Objective):
    """Tapered off-policy REINFORCE.

    loss_i = -clip(ratio, a, b) (R_i - baseline) L_i / |y_i|, mean over sequences; the class, and so the bounds,
    come from the sign of R_i before the baseline.

    Args:
        weight: factor of this head where several are combined.
        reward_range: the paper scores +1 and -1, invalid answers -1.
        ratio: `sequence` (the paper), `token` or `geometric`.
        baseline: subtracted from the reward; strictly inside the reward range.
        positive_taper: [a, b] of R >= 0; [1, 1] is supervised learning on positives.
        negative_taper: [a, b] of R < 0; a above 0 makes the loss unbounded below.
    """

    requires = frozenset({"sampling_logprobs"})

    def __init__(
        self,
        weight: float,
        reward_range: Sequence[float],
        ratio: str,
        baseline: float,
        positive_taper: Sequence[float],
        negative_taper: Sequence[float],
    ) -> None:
        super().__init__(weight, reward_range)
        check_choice("objective.topr.ratio", ratio, RATIOS)
        if not self.low < baseline < self.high:
            raise ValueError(
                f"objective.topr.baseline must lie inside reward_range ({self.low}, {self.high}), got {baseline}"
            )
        for key, bounds in (("positive_taper", positive_taper), ("negative_taper", negative_taper)):
            if len(bounds) != 2 or not 0.0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"objective.topr.{key} must be [a, b] with 0 <= a <= b, got {list(bounds)}")
        self.ratio = ratio
        self.baseline = baseline
        self.positive_taper = (float(positive_taper[0]), float(positive_taper[1]))
        self.negative_taper = (float(negative_taper[0]), float(negative_taper[1]))

    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return -alpha R L / |y|, [B, C]."""
        assert batch.sampling_logprobs is not None
        mask = batch.completion_mask
        rewards = self.mapped(batch.rewards)
        is_positive = rewards >= 0.0
        low, high = (
            torch.where(is_positive, rewards.new_tensor(p), rewards.new_tensor(n))
            for p, n in zip(self.positive_taper, self.negative_taper, strict=True)
        )
        alpha = taper(logprobs, batch.sampling_logprobs, mask, ratio=self.ratio, low=low, high=high)
        coefficients = alpha * ((rewards - self.baseline) / lengths(mask))[:, None] * mask
        share = (alpha * mask).sum(-1) / lengths(mask)
        metrics = {
            "taper_of_negatives": torch.where(is_positive, torch.nan, share),
            "tapered_fraction_of_negatives": torch.where(is_positive, torch.nan, (share < 1.0).to(share.dtype)),
        }
        return ObjectiveOutput(score_function_loss(coefficients, logprobs, mask), coefficients, metrics)
