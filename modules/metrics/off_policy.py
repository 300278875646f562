"""How far the policy is from the snapshots that sampled, as sums and counts that are divided once.

With d = log policy - log snapshot of a token and S = sum of d over a sequence: k1 = mean -d, k2 = mean d^2/2,
k3 = mean(e^d - d - 1) estimate the divergence (http://joschu.net/blog/kl-approx.html); the effective sample size is
(sum w)^2 / (n sum w^2) with w = e^S for sequences and w = e^d for tokens; chi^2 = mean w^2 - 1. Quantiles and the lag's
smallest and largest value are of single sequences: [S, lag] of each is kept until they are computed.
"""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from datamodules.types import RolloutBatch
from modules.functional import bounded_exp, log_ratio, masked

SUMS = (
    "num_sequences",
    "num_tokens",
    "num_negative_tokens",
    "d",
    "d2",
    "k3",
    "token_weight",
    "token_weight2",
    "sequence_weight",
    "sequence_weight2",
    "negative_logprob",
    "mass_positive",
    "mass_negative",
    "num_zero",
    "lag",
    "fresh_gap",
    "num_fresh_tokens",
)
MAXIMA = ("abs_d", "sequence_ratio", "fresh_gap")
QUANTILES = (0.05, 0.5, 0.95)


class OffPolicyMetrics(Metric):
    """Accumulates diagnostics over micro-batches, optimizer steps and ranks."""

    full_state_update = False
    sums: Tensor
    maxima: Tensor
    sequences: list[Tensor]  # each [B, 2]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(len(SUMS), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("maxima", torch.zeros(len(MAXIMA), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("sequences", [], dist_reduce_fx="cat")

    @torch.no_grad()
    def update(self, logprobs: Tensor, batch: RolloutBatch, coefficients: Tensor, global_step: int) -> None:
        """Add a micro-batch.

        Args:
            logprobs: [B, C] under the policy.
            batch: the rollouts.
            coefficients: [B] or [B, C], how hard each log-prob is pulled up, negative for down.
            global_step: optimizer steps that the policy has seen.
        """
        mask = batch.completion_mask
        behaviour = logprobs if batch.sampling_logprobs is None else batch.sampling_logprobs
        drift = log_ratio(logprobs, behaviour, mask)
        ratio = masked(bounded_exp(drift), mask)
        log_sequence_ratio = drift.sum(-1).double()
        sequence_ratio = bounded_exp(log_sequence_ratio)
        is_negative = (batch.rewards <= 0.5)[:, None] & mask
        per_token = coefficients if coefficients.dim() == 2 else coefficients[:, None] * mask
        lag = (global_step - batch.snapshot_step).double()
        values = {
            "num_sequences": mask.new_tensor(len(mask), dtype=torch.float64),
            "num_tokens": mask.sum(),
            "num_negative_tokens": is_negative.sum(),
            "d": drift.sum(),
            "d2": drift.square().sum(),
            "k3": masked(ratio - drift - 1.0, mask).sum(),
            "token_weight": ratio.double().sum(),
            "token_weight2": ratio.double().square().sum(),
            "sequence_weight": sequence_ratio.sum(),
            "sequence_weight2": sequence_ratio.square().sum(),
            "negative_logprob": masked(logprobs, is_negative).sum(),
            "mass_positive": per_token.clamp(min=0.0).sum(),
            "mass_negative": (-per_token).clamp(min=0.0).sum(),
            "num_zero": (per_token.abs().sum(-1) == 0.0).sum(),
            "lag": lag.sum(),
            "fresh_gap": (drift.abs().sum(-1) * (lag == 0)).sum(),
            "num_fresh_tokens": (mask.sum(-1) * (lag == 0)).sum(),
        }
        self.sequences.append(torch.stack([log_sequence_ratio, lag], dim=1))
        self.sums += torch.stack([values[name].double() for name in SUMS])
        fresh = drift.abs().amax(-1).double() * (lag == 0)
        peaks = {
            "abs_d": drift.abs().max(),
            "sequence_ratio": sequence_ratio.max(),
            "fresh_gap": fresh.max(),
        }
        self.maxima = torch.maximum(self.maxima, torch.stack([peaks[name].double() for name in MAXIMA]))

    def take_part(self) -> None:
        """Let a rank without a micro-batch add up with the others."""
        self.sequences.append(self.sums.new_zeros(0, 2))

    def compute(self) -> dict[str, float]:
        """Return the diagnostics since the last reset, names without the stage."""
        s = dict(zip(SUMS, self.sums.tolist(), strict=True))
        peak = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        tokens, sequences = max(1.0, s["num_tokens"]), max(1.0, s["num_sequences"])
        mass = s["mass_positive"] + s["mass_negative"]
        return {
            "off_policy/k1": -s["d"] / tokens,
            "off_policy/k2": s["d2"] / tokens / 2.0,
            "off_policy/k3": s["k3"] / tokens,
            "off_policy/sequence_ess": _effective_share(s["sequence_weight"], s["sequence_weight2"], sequences),
            "off_policy/token_ess": _effective_share(s["token_weight"], s["token_weight2"], tokens),
            "off_policy/sequence_chi2": s["sequence_weight2"] / sequences - 1.0,
            "off_policy/sequence_ratio_mean": s["sequence_weight"] / sequences,
            "off_policy/sequence_ratio_max": peak["sequence_ratio"],
            "off_policy/log_ratio_max": peak["abs_d"],
            "off_policy/fresh_gap_mean": s["fresh_gap"] / max(1.0, s["num_fresh_tokens"]),
            "off_policy/fresh_gap_max": peak["fresh_gap"],
            "coefficients/negative_share": s["mass_negative"] / mass if mass else 0.0,
            "coefficients/zero_fraction": s["num_zero"] / sequences,
            "logprob_of_negatives": s["negative_logprob"] / max(1.0, s["num_negative_tokens"]),
            "lag_steps_mean": s["lag"] / sequences,
            **self._of_sequences(),
        }

    def _of_sequences(self) -> dict[str, float]:
        if len(self.sequences) == 0:  # a list, or after adding up over ranks a tensor
            return {}
        ratio, lag = dim_zero_cat(self.sequences).unbind(1)
        quantiles = torch.quantile(ratio, ratio.new_tensor(QUANTILES)).tolist()
        names = [f"off_policy/sequence_log_ratio_p{100 * q:02.0f}" for q in QUANTILES]
        return dict(zip(names, quantiles, strict=True)) | {
            "lag_steps_min": float(lag.min()),
            "lag_steps_max": float(lag.max()),
        }


def _effective_share(weights: float, squares: float, count: float) -> float:
    return weights**2 / (count * squares) if squares else 0.0
