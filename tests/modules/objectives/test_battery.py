"""What every objective must satisfy on any batch: exact gradients, and indifference to packing and garbage."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from datamodules.types import RolloutBatch
from modules.objectives.objective import Objective

NAN = math.nan
SCORES = [[1.0, 0.0, 0.25], [0.0, 1.0, NAN], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.75, 0.0]]
LENGTHS = [[3, 5, 1], [2, 4, 4], [1, 2, 5], [5, 3, 1], [4, 2, 3]]


def log_mean_exp(group: list[float]) -> float:
    return math.log(statistics.mean(math.exp(s) for s in group))


def grpo(s: float, group: list[float]) -> float:
    deviation = statistics.stdev(group) if len(group) > 1 else 0.0
    return (s - statistics.mean(group)) / (deviation + 1e-6) if deviation else 0.0


def leave_one_out(s: float, group: list[float]) -> float:
    return 2 * (s - (sum(group) - s) / (len(group) - 1)) if len(group) > 1 else 0.0


Coefficient = Callable[[float, list[float], int], float]
# At policy == snapshot: each token's coefficient from its score in [0, 1], its group's scores and its length; and what
# the sum over tokens is divided by.
ON_POLICY: dict[str, tuple[Coefficient, str]] = {
    "topr": (lambda s, _, n: (2 * s - 1) / n, "sequences"),
    "topr-token": (lambda s, _, n: (2 * s - 1) / n, "sequences"),
    "topr-geometric": (lambda s, _, n: (2 * s - 1) / n, "sequences"),
    "topr-baseline": (lambda s, _, n: (2 * s - 1 - 0.2) / n, "sequences"),
    "asymre": (lambda s, g, _: 2 * (s - statistics.mean(g)) + 0.1, "sequences"),
    "asymre-mean": (lambda s, g, n: (2 * (s - statistics.mean(g)) + 0.1) / n, "sequences"),
    "oapl": (lambda s, g, _: 2e-3 * (s - log_mean_exp(g)), "sequences"),
    "oapl-normalized": (lambda s, g, _: s - log_mean_exp(g), "sequences"),
    "positives_only": (lambda s, *_: float(s > 0.5), "positives"),
    "reinforce": (lambda s, *_: 2 * s - 1, "sequences"),
    "reinforce-group_mean": (lambda s, g, _: 2 * (s - statistics.mean(g)), "sequences"),
    "reinforce-leave_one_out": (lambda s, g, _: leave_one_out(s, g), "sequences"),
    "supervised": (lambda *_: 1.0, "tokens"),
    "grpo": (lambda s, g, n: grpo(s, g) / n, "sequences"),
    "grpo-no_std": (lambda s, g, n: (s - statistics.mean(g)) / n, "sequences"),
    "grpo-token_mean": (lambda s, g, _: grpo(s, g), "tokens"),
    "grpo-sequence_sum": (lambda s, g, _: grpo(s, g), "sequences"),
    "grpo-sequence_sum_norm": (lambda s, g, _: grpo(s, g) / 16, "sequences"),
}


def tapered(x: Tensor) -> Tensor:
    """Return the scalar whose derivative is min(exp(x), 1)."""
    return torch.where(x < 0.0, x.clamp(max=0.0).exp(), 1.0 + x)


def topr_potential(head: Objective, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    """TOPR holds its ratio constant; this is the scalar without stop-gradient that has the same gradient."""
    drift = torch.where(batch.completion_mask, logprobs - batch.sampling_logprobs, 0.0)
    reward, length = 2 * batch.rewards - 1, batch.completion_mask.sum(-1)
    negative = {
        "sequence": lambda: tapered(drift.sum(-1)) / length,
        "token": lambda: (tapered(drift) * batch.completion_mask).sum(-1) / length,
        "geometric": lambda: tapered(drift.sum(-1) / length),
    }[head.ratio]()
    scalar = torch.where(reward < 0.0, negative, drift.sum(-1) / length)
    return -((reward - head.baseline) * scalar).sum() / batch.num_sequences


POTENTIALS = {"topr": topr_potential}  # by stem, for heads with a stop-gradient on something that moves


@pytest.fixture
def stale(make_batch: Callable[..., Any]) -> tuple[Tensor, RolloutBatch]:
    """Log-probs that moved away from the snapshot, both ways and beyond every clip."""
    return make_batch(SCORES, LENGTHS, drift=None)


def rows(batch: RolloutBatch, index: Tensor) -> RolloutBatch:
    """Return some rows, with the counts of the whole step."""
    tensors = {name: getattr(batch, name) for name in batch.__slots__}
    return replace(batch, **{k: v[index] for k, v in tensors.items() if isinstance(v, Tensor)})


def with_garbage(logprobs: Tensor, batch: RolloutBatch, value: float) -> tuple[Tensor, RolloutBatch]:
    optional = ("sampling_logprobs", "old_logprobs", "ref_logprobs")
    filled = {name: torch.where(batch.completion_mask, getattr(batch, name), value) for name in optional}
    return torch.where(batch.completion_mask, logprobs, value), replace(batch, **filled)


@pytest.mark.parametrize(("scores", "lengths"), [(SCORES, LENGTHS), ([[1.0], [0.0], [0.75]], [[3], [2], [4]])])
def test_on_policy_the_gradient_is_reinforce_with_the_objectives_advantage(
    case: str, head: Objective, scores: Any, lengths: Any, make_batch: Any, gradient: Any
) -> None:
    if case not in ON_POLICY:
        pytest.fail(f"conf/objective/{case}.yaml has no entry in ON_POLICY: add its coefficient at policy == snapshot")
    coefficient, denominator = ON_POLICY[case]
    logprobs, batch = make_batch(scores, lengths)
    expected = torch.zeros_like(logprobs)
    for row, (score, group) in enumerate(zip(batch.rewards.tolist(), batch.group_rewards.tolist(), strict=True)):
        length = int(batch.completion_mask[row].sum())
        present = [s for s in group if not math.isnan(s)]
        expected[row, :length] = -coefficient(score, present, length)
    counted = {"sequences": batch.rewards > -1, "tokens": batch.completion_mask, "positives": batch.rewards > 0.5}
    assert_close(gradient(head, logprobs, batch), expected / counted[denominator].sum())


def test_autograd_agrees_with_the_coefficients(head: Objective, stale: tuple[Tensor, RolloutBatch]) -> None:
    logprobs, batch = stale
    leaf = logprobs.requires_grad_()
    output = head(leaf, batch)
    (actual,) = torch.autograd.grad(output.loss.sum(), leaf)
    weights = output.coefficients if output.coefficients.dim() == 2 else output.coefficients[:, None]
    assert_close(actual, -weights.expand_as(actual) * batch.completion_mask)
    assert not output.coefficients.requires_grad


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 1e30])
def test_what_stands_behind_a_completion_changes_nothing(
    value: float, head: Objective, stale: tuple[Tensor, RolloutBatch], step_loss: Any, gradient: Any
) -> None:
    dirty = with_garbage(*stale, value)
    assert_close(step_loss(head, *dirty), step_loss(head, *stale))
    assert_close(gradient(head, *dirty), gradient(head, *stale))
    metrics = head(*dirty).metrics
    assert all(torch.equal(m.nan_to_num(9.0), metrics[k].nan_to_num(9.0)) for k, m in head(*stale).metrics.items())


def test_order_of_sequences_changes_nothing(head: Objective, stale: tuple[Tensor, RolloutBatch], gradient: Any) -> None:
    logprobs, batch = stale
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(1))
    assert_close(gradient(head, logprobs[order], rows(batch, order)), gradient(head, logprobs, batch)[order])


def test_more_padding_changes_nothing(head: Objective, stale: tuple[Tensor, RolloutBatch], gradient: Any) -> None:
    logprobs, batch = stale
    names = ("sampling_logprobs", "old_logprobs", "ref_logprobs", "completion_mask", "completion_ids")
    wider = {name: nn.functional.pad(getattr(batch, name), (0, 3)) for name in names}
    expected = nn.functional.pad(gradient(head, logprobs, batch), (0, 3))
    assert_close(gradient(head, nn.functional.pad(logprobs, (0, 3)), replace(batch, **wider)), expected)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_split_into_micro_batches_changes_nothing(
    size: int, head: Objective, stale: tuple[Tensor, RolloutBatch], step_loss: Any, gradient: Any
) -> None:
    logprobs, batch = stale
    parts = [(logprobs[index], rows(batch, index)) for index in torch.arange(len(logprobs)).split(size)]
    assert_close(torch.cat([gradient(head, *part) for part in parts]), gradient(head, logprobs, batch))
    assert_close(sum(step_loss(head, *part) for part in parts), step_loss(head, logprobs, batch))


@pytest.mark.parametrize("drift", [1e3, -1e3])
def test_exploded_ratios_leave_loss_and_gradient_finite(
    drift: float, head: Objective, make_batch: Any, step_loss: Any, gradient: Any
) -> None:
    exploded = make_batch(SCORES, LENGTHS, drift=drift, dtype=torch.float32)
    assert torch.isfinite(step_loss(head, *exploded))
    assert torch.isfinite(gradient(head, *exploded)).all()


def test_no_gradient_reaches_the_recorded_logprobs(
    head: Objective, stale: tuple[Tensor, RolloutBatch], step_loss: Any
) -> None:
    logprobs, batch = stale
    names = ("sampling_logprobs", "old_logprobs", "ref_logprobs")
    leaves = {name: getattr(batch, name).clone().requires_grad_() for name in names}
    loss = step_loss(head, logprobs.requires_grad_(), replace(batch, **leaves))
    assert torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) == (None, None, None)


@pytest.mark.parametrize("value", [0.0, NAN])
def test_an_all_masked_micro_batch_has_a_graph_and_no_gradient(
    value: float, head: Objective, stale: tuple[Tensor, RolloutBatch], step_loss: Any
) -> None:
    logprobs, batch = stale
    empty = replace(batch, completion_mask=torch.zeros_like(batch.completion_mask))
    leaf, empty = with_garbage(logprobs, empty, value)
    loss = step_loss(head, leaf.requires_grad_(), empty)
    assert_close(torch.autograd.grad(loss, leaf)[0], torch.zeros_like(leaf))
    assert_close(loss.detach(), torch.zeros_like(loss))


def test_a_completion_of_no_tokens_adds_nothing(
    head: Objective, stale: tuple[Tensor, RolloutBatch], step_loss: Any, gradient: Any
) -> None:
    logprobs, batch = stale
    mask = batch.completion_mask.clone()
    mask[4] = False
    batch = replace(batch, completion_mask=mask)
    others = torch.tensor([row for row in range(len(logprobs)) if row != 4])
    assert_close(step_loss(head, logprobs, batch), step_loss(head, logprobs[others], rows(batch, others)))
    assert_close(gradient(head, logprobs, batch)[4], torch.zeros_like(logprobs[4]))


def test_a_sibling_without_a_score_counts_for_nothing(head: Objective, make_batch: Any, gradient: Any) -> None:
    lengths = [[3, 2, 4], [1, 5, 2]]
    logprobs, batch = make_batch([[1.0, NAN, 0.0], [NAN, 0.25, 1.0]], lengths, drift=None)
    without = batch.group_rewards[~batch.group_rewards.isnan()].view(-1, 2)
    assert_close(gradient(head, logprobs, batch), gradient(head, logprobs, replace(batch, group_rewards=without)))


def test_finite_differences_agree_with_the_gradient(
    case: str, head: Objective, stale: tuple[Tensor, RolloutBatch], step_loss: Any, gradient: Any
) -> None:
    logprobs, batch = stale
    scalar = POTENTIALS.get(case.partition("-")[0], step_loss)
    expected, step = torch.zeros_like(logprobs), 1e-6
    for row, column in batch.completion_mask.nonzero().tolist():
        nudge = torch.zeros_like(logprobs)
        nudge[row, column] = step
        rise = scalar(head, logprobs + nudge, batch) - scalar(head, logprobs - nudge, batch)
        expected[row, column] = rise / (2 * step)
    assert_close(gradient(head, logprobs, batch), expected, rtol=1e-6, atol=1e-8)
