"""Builders shared by the tests of what learns: batches with known drift, and the gradient of a step."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from datamodules.collate import collate
from datamodules.types import Rollout, RolloutBatch
from modules.objectives.objective import Objective
from modules.policy_module import PolicyModule

VOCABULARY = 10


def _make_batch(
    scores: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    *,
    drift: float | None = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, RolloutBatch]:
    """Return log-probs under the policy and the batch of all siblings with a score, in group order.

    Args:
        scores: of each group's siblings; NaN for one without a score, which gets no row.
        lengths: tokens of each sibling.
        drift: log policy - log snapshot of each token; None draws it from a normal of deviation 0.7.
        dtype: of every float tensor.
    """
    random = torch.Generator().manual_seed(0)
    index = [(g, i) for g, group in enumerate(scores) for i, score in enumerate(group) if not math.isnan(score)]
    sizes = torch.tensor([lengths[g][i] for g, i in index])
    shape = (len(index), max(1, int(sizes.max())))
    mask = torch.arange(shape[1]) < sizes[:, None]
    groups = torch.tensor([g for g, _ in index])
    group_rewards = torch.tensor(scores, dtype=dtype)[groups]
    rewards = torch.tensor([scores[g][i] for g, i in index], dtype=dtype)
    sampling = -3.0 * torch.rand(shape, generator=random, dtype=dtype) - 0.1
    moved = 0.7 * torch.randn(shape, generator=random, dtype=dtype) if drift is None else drift
    batch = RolloutBatch(
        input_ids=torch.zeros(shape[0], dtype=torch.long),  # the model's part, which no objective sees
        position_ids=torch.zeros(shape[0], dtype=torch.long),
        predictors=torch.zeros(shape, dtype=torch.long),
        groups=(),
        completion_ids=torch.randint(VOCABULARY, shape, generator=random),
        completion_mask=mask,
        rewards=rewards,
        group_id=groups,
        group_rewards=group_rewards,
        group_lengths=torch.where(group_rewards.isnan(), torch.nan, torch.tensor(lengths, dtype=dtype)[groups]),
        snapshot_step=torch.zeros(shape[0], dtype=torch.long),
        is_truncated=torch.zeros(shape[0], dtype=torch.bool),
        temperature=1.0,
        num_sequences=shape[0],
        num_tokens=int(mask.sum()),
        num_positives=int((rewards > 0.5).sum()),
        sampling_logprobs=sampling,
        old_logprobs=sampling + 0.1,
        ref_logprobs=sampling - 0.1,
    )
    return sampling + moved, batch


def _step_loss(head: Objective, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    one_rank = SimpleNamespace(num_shares=1)
    return PolicyModule.reduce(one_rank, head, head(logprobs, batch), batch)  # type: ignore[arg-type]


def _gradient(head: Objective, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    leaf = logprobs.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_step_loss(head, leaf, batch), leaf)
    return gradient


@pytest.fixture
def make_packed(make_rollout: Callable[..., Rollout]) -> Callable[..., RolloutBatch]:
    """Return a maker of batches from (prompt, completion) pairs of token ids."""

    def make(*sequences: tuple[Sequence[int], Sequence[int]], temperature: float = 1.0) -> RolloutBatch:
        rows = [
            make_rollout(
                0, s, prompt_ids=tuple(prompt), completion_ids=tuple(completion), sampling_logprobs=None,
                temperature=temperature,
            )
            for s, (prompt, completion) in enumerate(sequences)
        ]  # fmt: skip
        return collate(rows, {(rows[0].round, 0): rows}, {"num_sequences": 1, "num_tokens": 1, "num_positives": 0})

    return make


@pytest.fixture
def make_batch() -> Callable[..., tuple[Tensor, RolloutBatch]]:
    """Build log-probs and a batch from scores and lengths."""
    return _make_batch


@pytest.fixture
def step_loss() -> Callable[[Objective, Tensor, RolloutBatch], Tensor]:
    """Reduce a head's loss to the micro-batch's share of the step, as the PolicyModule does."""
    return _step_loss


@pytest.fixture
def gradient() -> Callable[[Objective, Tensor, RolloutBatch], Tensor]:
    """Differentiate a head's reduced loss with respect to the log-probs, [B, C]."""
    return _gradient
