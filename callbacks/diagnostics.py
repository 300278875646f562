"""Alarms: say once, with the remedy, when a run trains on noise or not at all."""

import logging
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from callbacks.rollout_metrics import rollout_metrics
from datamodules.types import Rollout

log = logging.getLogger(__name__)


class Diagnostics(Callback):
    """Warn once for each kind of trouble.

    Args:
        min_ess: smallest healthy share of the sequence effective sample size, in (0, 1).
        max_fresh_gap: largest healthy |log policy - log engine| of a token that the current weights sampled.
        max_truncated: largest healthy share of truncated completions while rewards do not differ.
        max_clipped: largest healthy share of clipped tokens, of positives or of negatives.
    """

    def __init__(self, min_ess: float, max_fresh_gap: float, max_truncated: float, max_clipped: float) -> None:
        self.min_ess = min_ess
        self.max_fresh_gap = max_fresh_gap
        self.max_truncated = max_truncated
        self.max_clipped = max_clipped
        self.raised: list[str] = []
        self._before: tuple[torch.Tensor, ...] | None = None

    def on_round_collected(self, trainer: L.Trainer, rollouts: Sequence[Rollout]) -> None:
        """Look at a judged round before it is trained."""
        metrics = rollout_metrics(rollouts)
        is_single = len({r.group_id for r in rollouts}) == len(rollouts)
        spread = len({r.reward for r in rollouts}) > 1 if is_single else metrics["rollout/groups_informative"]
        if metrics["rollout/truncated_fraction"] > self.max_truncated and not spread:
            self._alarm(
                "truncated",
                f"{metrics['rollout/truncated_fraction']:.0%} of the completions were cut at "
                "datamodule.sampling.max_tokens and no group has rewards that differ: raise max_tokens, or check that "
                "the policy can emit its end token",
            )
        if metrics["rollout/error_fraction"] > 0.0:
            self._alarm(
                "errors",
                f"{metrics['rollout/error_fraction']:.1%} of the completions could not be sampled or judged; they are "
                "left out, not scored 0 (rollout/error_fraction; the reasons are in the log)",
            )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Remember each weight's sum: a change that leaves them all as they were is no change."""
        self._before = self._weights(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at the diagnostics that were just logged."""
        m = {k.removeprefix("train/"): float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/")}
        if m.get("off_policy/sequence_ess", 1.0) < self.min_ess:
            self._alarm(
                "ess",
                f"the effective sample size is {m['off_policy/sequence_ess']:.2f} of the batch: the policy has left "
                "the snapshots that sampled; lower lag or optimizer.lr, or take fewer optimizer steps a round "
                "(raise datamodule.batch_size)",
            )
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if data.samples and m.get("off_policy/fresh_gap_max", 0.0) > self.max_fresh_gap:
            self._alarm(
                "fresh_gap",
                f"log-probs of freshly sampled tokens differ by {m['off_policy/fresh_gap_max']:.1e} between trainer "
                f"and engine: {self._gap_remedy(trainer)}",
            )
        clipped = [k for k, v in m.items() if "clipped_fraction" in k and v > self.max_clipped]
        if clipped:
            self._alarm(
                "clipped",
                f"most tokens are clipped and have no gradient ({', '.join(clipped)}): lower lag or optimizer.lr, "
                "or take fewer optimizer steps a round (raise datamodule.batch_size)",
            )
        if m.get("coefficients/zero_fraction", 0.0) == 1.0:
            self._alarm(
                "zero",
                "every coefficient is 0, so nothing is learned: all rewards of each group are equal, or everything is "
                "clipped (see rollout/groups_informative and the clipped fractions)",
            )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Check that a round with a gradient moved the weights."""
        moved = self._before is None or any(
            not torch.equal(a, b) for a, b in zip(self._before, self._weights(pl_module), strict=True)
        )
        if not moved and float(trainer.callback_metrics.get("train/grad_norm", 0.0)) > 0.0:
            self._alarm(
                "unchanged",
                "the gradient is not zero but no weight changed in a round: optimizer.lr is 0, or too small for the "
                "policy's dtype (train in float32)",
            )

    @staticmethod
    def _gap_remedy(trainer: L.Trainer) -> str:
        if trainer.datamodule.sampling.is_renormalised:  # type: ignore[attr-defined]
            return "datamodule.sampling.top_p < 1 or top_k > 0 make the engine's larger, so every ratio is biased"
        return "use the same dtype for both (policy.dtype and engine.dtype, with engine=auto engine.vllm.dtype)"

    @staticmethod
    def _weights(pl_module: Any) -> tuple[torch.Tensor, ...]:
        sums = (p.detach().double().sum() for p in pl_module.policy.parameters() if p.requires_grad)
        return tuple(s.full_tensor() if isinstance(s, DTensor) else s for s in sums)

    def _alarm(self, kind: str, message: str) -> None:
        if kind not in self.raised:
            self.raised.append(kind)
            log.warning("ALARM %s", message)
