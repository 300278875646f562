"""Off-policy diagnostics against closed forms; sums and counts make any split into micro-batches the same."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.types import RolloutBatch
from modules.metrics.off_policy import OffPolicyMetrics

DRIFT = torch.tensor([[0.5, -1.0], [0.2, 9.0]], dtype=torch.float64)  # 9 stands behind the completion
D = [0.5, -1.0, 0.2]
S = [-0.5, 0.2]


def measure(logprobs: Tensor, batch: RolloutBatch, coefficients: Tensor, *, step: int = 0) -> dict[str, float]:
    metrics = OffPolicyMetrics()
    metrics.update(logprobs, batch, coefficients, step)
    return metrics.compute()


@pytest.fixture
def stale(make_batch: Callable[..., Any]) -> tuple[Tensor, RolloutBatch]:
    return make_batch([[1.0, 0.0]], [[2, 1]], drift=DRIFT)


def test_each_diagnostic_is_its_closed_form(stale: tuple[Tensor, RolloutBatch]) -> None:
    logprobs, batch = stale
    w, t = [math.exp(s) for s in S], [math.exp(d) for d in D]
    expected = {
        "off_policy/k1": -sum(D) / 3,
        "off_policy/k2": sum(d * d for d in D) / 3 / 2,
        "off_policy/k3": sum(math.exp(d) - d - 1 for d in D) / 3,
        "off_policy/sequence_ess": sum(w) ** 2 / (2 * sum(x * x for x in w)),
        "off_policy/token_ess": sum(t) ** 2 / (3 * sum(x * x for x in t)),
        "off_policy/sequence_chi2": sum(x * x for x in w) / 2 - 1,
        "off_policy/sequence_ratio_mean": sum(w) / 2,
        "off_policy/sequence_ratio_max": w[1],
        "off_policy/log_ratio_max": 1.0,
        "off_policy/fresh_gap_mean": 0.0,
        "off_policy/fresh_gap_max": 0.0,
        "coefficients/negative_share": 0.25,
        "coefficients/zero_fraction": 0.0,
        "logprob_of_negatives": float(logprobs[1, 0]),
        "lag_steps_mean": 5.0,
        "lag_steps_min": 3.0,
        "lag_steps_max": 7.0,
        "off_policy/sequence_log_ratio_p05": -0.5 + 0.05 * 0.7,  # between the two sequences
        "off_policy/sequence_log_ratio_p50": -0.15,
        "off_policy/sequence_log_ratio_p95": 0.2 - 0.05 * 0.7,
    }
    aged = replace(batch, snapshot_step=torch.tensor([3, 7]))
    coefficients = torch.tensor([[1.0, 0.5], [-0.5, 0.0]], dtype=torch.float64)
    assert measure(logprobs, aged, coefficients, step=10) == pytest.approx(expected, rel=1e-9)


def test_fresh_samples_show_the_gap_between_trainer_and_engine(stale: tuple[Tensor, RolloutBatch]) -> None:
    logprobs, batch = stale
    aged = replace(batch, snapshot_step=torch.tensor([3, 10]))  # only the second row is fresh, drift 0.2
    values = measure(logprobs, aged, torch.ones(2, 2), step=10)
    assert values["off_policy/fresh_gap_max"] == pytest.approx(0.2)
    assert values["off_policy/fresh_gap_mean"] == pytest.approx(0.2)  # its one token; the stale row is not counted


def test_no_drift_is_the_neutral_point(make_batch: Callable[..., Any]) -> None:
    values = measure(*make_batch([[1.0, 0.0]], [[2, 5]]), torch.ones(2, 5))
    zero = ("k1", "k2", "k3", "sequence_chi2", "log_ratio_max", "fresh_gap_max")
    one = ("sequence_ess", "token_ess", "sequence_ratio_mean", "sequence_ratio_max")
    assert [values[f"off_policy/{key}"] for key in zero] == pytest.approx([0.0] * 6, abs=1e-12)
    assert [values[f"off_policy/{key}"] for key in one] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("length", [10, 100, 1000])
def test_the_sequence_ratio_is_the_product_over_all_tokens(length: int, make_batch: Callable[..., Any]) -> None:
    values = measure(*make_batch([[1.0]], [[length]], drift=0.012), torch.ones(1, length))
    assert values["off_policy/sequence_ratio_mean"] == pytest.approx(math.exp(0.012 * length), rel=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_split_into_micro_batches_gives_the_same(size: int, make_batch: Callable[..., Any]) -> None:
    logprobs, batch = make_batch([[1.0, 0.0, 0.25], [1.0, 0.0, 0.0]], [[3, 1, 5], [2, 2, 4]], drift=None)
    coefficients = torch.linspace(-1, 2, 30, dtype=torch.float64).view(6, 5) * batch.completion_mask
    metrics = OffPolicyMetrics()
    for rows in torch.arange(6).split(size):
        tensors = {name: getattr(batch, name) for name in batch.__slots__}
        part = replace(batch, **{k: v[rows] for k, v in tensors.items() if isinstance(v, Tensor)})
        metrics.update(logprobs[rows], part, coefficients[rows], 4)
    assert metrics.compute() == pytest.approx(measure(logprobs, batch, coefficients, step=4), rel=1e-9)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_stands_behind_a_completion_changes_nothing(garbage: float, stale: tuple[Tensor, RolloutBatch]) -> None:
    logprobs, batch = stale
    dirty = replace(batch, sampling_logprobs=torch.where(batch.completion_mask, batch.sampling_logprobs, garbage))
    coefficients = torch.tensor([0.3, -0.7], dtype=torch.float64)
    actual = measure(torch.where(batch.completion_mask, logprobs, garbage), dirty, coefficients)
    assert actual == pytest.approx(measure(logprobs, batch, coefficients), rel=1e-12)


def test_sequence_coefficients_count_once_for_each_token(stale: tuple[Tensor, RolloutBatch]) -> None:
    values = measure(*stale, torch.tensor([0.5, -1.0], dtype=torch.float64))  # two tokens and one
    assert values["coefficients/negative_share"] == pytest.approx(0.5)


def test_a_sequence_whose_tokens_all_have_no_pull_counts_as_zero(stale: tuple[Tensor, RolloutBatch]) -> None:
    values = measure(*stale, torch.tensor([[0.0, 0.5], [0.0, 0.0]], dtype=torch.float64))
    assert values["coefficients/zero_fraction"] == 0.5


def test_exploded_ratios_stay_finite_in_float32(make_batch: Callable[..., Any]) -> None:
    logprobs, batch = make_batch([[1.0, 0.0]], [[2, 5]], drift=1e3, dtype=torch.float32)
    values = measure(logprobs, batch, torch.ones(2, 5))
    assert all(map(math.isfinite, values.values()))
    assert values["off_policy/log_ratio_max"] == pytest.approx(1e3, rel=1e-6)
    assert values["off_policy/sequence_ratio_max"] == pytest.approx(math.exp(60.0), rel=1e-5)


def test_demonstrations_have_no_ratio_but_still_a_pull(stale: tuple[Tensor, RolloutBatch]) -> None:
    logprobs, batch = stale
    values = measure(logprobs, replace(batch, sampling_logprobs=None), torch.tensor([1.0, -1.0]))
    assert values["off_policy/k3"] == 0.0
    assert values["coefficients/negative_share"] == pytest.approx(1 / 3)


def test_reset_forgets_the_steps_before(stale: tuple[Tensor, RolloutBatch], make_batch: Callable[..., Any]) -> None:
    metrics = OffPolicyMetrics()
    metrics.update(*stale, torch.ones(2), 50)
    metrics.reset()
    fresh = make_batch([[1.0]], [[2]], drift=0.1)
    metrics.update(*fresh, torch.ones(1), 0)
    assert metrics.compute() == pytest.approx(measure(*fresh, torch.ones(1)))
