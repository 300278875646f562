"""The contract between the policy's log-probs and a loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from datamodules.types import RolloutBatch
from modules.functional import Normalizer, masked


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """What a head gives for one micro-batch; only the PolicyModule divides and sums."""

    loss: Tensor  # [B] or [B, C], unreduced, zero off the mask
    coefficients: Tensor  # [B] or [B, C], detached c with grad loss = -c * grad logprobs
    metrics: dict[str, Tensor] = field(default_factory=dict)  # each [B]; averaged, or the largest where `_max` ends it


class Objective(nn.Module, ABC):
    """A head: hyper-parameters around a pure loss function.

    Args:
        weight: factor of this head where several are combined.
        reward_range: the verifier's 0 and 1 are mapped to these two numbers.
    """

    requires: ClassVar[frozenset[str]] = frozenset()  # optional batch tensors, checked at set-up
    normalizer: Normalizer = "sequences"
    needs_siblings: bool = False  # meaningless with one completion a prompt
    needs_one_snapshot: ClassVar[bool] = False  # all sequences of an optimizer step must come from one snapshot
    ignores_equal_groups: bool = False  # a group whose rewards are all equal has no gradient

    def __init__(self, weight: float, reward_range: Sequence[float]) -> None:
        super().__init__()
        name = self.name
        if not weight > 0.0:
            raise ValueError(f"objective.{name}.weight must be above 0, got {weight}")
        if len(reward_range) != 2 or not reward_range[0] < reward_range[1]:
            raise ValueError(f"objective.{name}.reward_range must be [low, high] with low < high, got {reward_range}")
        self.weight = weight
        self.low, self.high = (float(bound) for bound in reward_range)

    @property
    def name(self) -> str:
        """The file's stem, which names the head in configs, metrics and errors."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def mapped(self, scores: Tensor) -> Tensor:
        """Map verifier scores in [0, 1] to the head's reward range."""
        return self.low + (self.high - self.low) * scores

    @abstractmethod
    def forward(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """Return the unreduced loss of a micro-batch.

        Args:
            logprobs: [B, C] of the sampled tokens under the policy, with gradient; garbage off the mask.
            batch: the rollouts.
        """


def score_function_loss(coefficients: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return -c * log-prob of each token with c held constant, zero off the mask, [B, C].

    Args:
        coefficients: [B] or [B, C].
        logprobs: [B, C] with gradient.
        mask: [B, C].
    """
    weights = coefficients if coefficients.dim() == 2 else coefficients[:, None]
    return -weights.detach() * masked(logprobs, mask)
