"""Alarms: raised once, with the remedy, for the trouble that is there and for no other."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from callbacks.diagnostics import Diagnostics
from datamodules.types import Rollout, Sampling

MakeRollout = Callable[..., Rollout]
TRAINER: Any = None


@pytest.fixture
def diagnostics(caplog: pytest.LogCaptureFixture) -> Diagnostics:
    caplog.set_level(logging.WARNING)
    return Diagnostics(min_ess=0.3, max_fresh_gap=0.05, max_truncated=0.5, max_clipped=0.5)


def trainer(global_step: int = 10, log_every_n_steps: int = 5, *, top_p: float = 1.0, **metrics: float) -> Any:
    """Return one that just logged these; `coefficients_zero_fraction` stands for `train/coefficients/zero_fraction`."""
    names = {key: "train/" + key.replace("coefficients_", "coefficients/") for key in metrics}
    names |= {key: "train/off_policy/" + key for key in ("sequence_ess", "fresh_gap_max") if key in metrics}
    return SimpleNamespace(
        global_step=global_step,
        log_every_n_steps=log_every_n_steps,
        datamodule=SimpleNamespace(sampling=Sampling(max_tokens=4, top_p=top_p), samples=True),
        callback_metrics={names[key]: torch.tensor(value) for key, value in metrics.items()},
    )


def after_batch(diagnostics: Diagnostics, trainer: Any) -> list[str]:
    diagnostics.on_train_batch_end(trainer, None, None, None, 0)
    return diagnostics.raised


def module(*frozen: bool) -> Any:
    """Return a module with one linear layer for each flag."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False).requires_grad_(not is_frozen) for is_frozen in frozen)
    return SimpleNamespace(policy=layers)


@pytest.mark.parametrize(
    ("num_truncated", "scores", "raised"),
    [
        (3, (0.0, 0.0, 0.0, 0.0), ["truncated"]),
        (4, (1.0, 1.0, 1.0, 1.0), ["truncated"]),
        (2, (0.0, 0.0, 0.0, 0.0), []),  # not above the limit
        (4, (1.0, 0.0, 0.0, 0.0), []),  # there is something to learn
    ],
)
def test_truncation_alarms_when_it_hides_every_difference_of_reward(
    diagnostics: Diagnostics,
    make_rollout: MakeRollout,
    num_truncated: int,
    scores: tuple[float, ...],
    raised: list[str],
) -> None:
    diagnostics.on_round_collected(
        TRAINER,
        [
            make_rollout(0, s, score=x, finish_reason="length" if s < num_truncated else "stop")
            for s, x in enumerate(scores)
        ],
    )
    assert diagnostics.raised == raised


def test_an_alarm_names_the_share_and_the_remedy_and_is_given_once(
    diagnostics: Diagnostics, make_rollout: MakeRollout, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        diagnostics.on_round_collected(TRAINER, [make_rollout(0, 0, score=0.0, finish_reason="length")])
    (message,) = caplog.messages
    assert message.startswith("ALARM 100% of the completions were cut at datamodule.sampling.max_tokens")
    assert "raise max_tokens, or check that the policy can emit its end token" in message


def test_unscored_completions_alarm_with_their_share(
    diagnostics: Diagnostics, make_rollout: MakeRollout, caplog: pytest.LogCaptureFixture
) -> None:
    diagnostics.on_round_collected(TRAINER, [make_rollout(0, s, score=x) for s, x in enumerate((1.0, 0.0, None))])
    assert diagnostics.raised == ["errors"]
    assert caplog.messages[0].startswith(
        "ALARM 33.3% of the completions could not be sampled or judged; they are left out"
    )


@pytest.mark.parametrize(
    ("metrics", "raised"),
    [
        ({"sequence_ess": 0.29}, ["ess"]),
        ({"sequence_ess": 0.31}, []),
        ({"fresh_gap_max": 0.06}, ["fresh_gap"]),
        ({"fresh_gap_max": 0.04}, []),
        ({"fresh_gap_max": float("nan"), "sequence_ess": 1.0}, []),  # nothing fresh in the batch
        ({"coefficients_zero_fraction": 1.0}, ["zero"]),
        ({"coefficients_zero_fraction": 0.99}, []),
        ({}, []),
        ({"sequence_ess": 0.1, "fresh_gap_max": 1.0, "coefficients_zero_fraction": 1.0}, ["ess", "fresh_gap", "zero"]),
    ],
)
def test_each_logged_diagnostic_alarms_beyond_its_limit_only(
    diagnostics: Diagnostics, metrics: dict[str, float], raised: list[str]
) -> None:
    assert after_batch(diagnostics, trainer(**metrics)) == raised


def test_each_remedy_names_the_config_keys_to_turn(diagnostics: Diagnostics, caplog: pytest.LogCaptureFixture) -> None:
    after_batch(diagnostics, trainer(sequence_ess=0.1, fresh_gap_max=0.75, coefficients_zero_fraction=1.0))
    ess, gap, zero = caplog.messages
    assert "effective sample size is 0.10 of the batch" in ess
    assert "lower lag or optimizer.lr, or take fewer optimizer steps a round (raise datamodule.batch_size)" in ess
    assert "differ by 7.5e-01 between trainer and engine" in gap
    assert "(policy.dtype and engine.dtype, with engine=auto engine.vllm.dtype)" in gap
    assert "see rollout/groups_informative and the clipped fractions" in zero


@pytest.mark.parametrize(
    ("is_moved", "grad_norm", "raised"), [(False, 0.5, ["unchanged"]), (True, 0.5, []), (False, 0.0, [])]
)
def test_a_round_with_a_gradient_whose_weights_did_not_move_alarms(
    diagnostics: Diagnostics, is_moved: bool, grad_norm: float, raised: list[str]
) -> None:
    pl_module = module(False, False)
    diagnostics.on_train_epoch_start(TRAINER, pl_module)
    if is_moved:
        with torch.no_grad():
            pl_module.policy[1].weight += 1e-3
    diagnostics.on_train_epoch_end(trainer(grad_norm=grad_norm), pl_module)
    assert diagnostics.raised == raised


@pytest.mark.parametrize("num_frozen", [1, 4, 7])
def test_a_policy_whose_first_layers_are_frozen_is_watched_at_those_that_train(
    diagnostics: Diagnostics, num_frozen: int
) -> None:
    pl_module = module(*[True] * num_frozen, False)
    diagnostics.on_train_epoch_start(TRAINER, pl_module)
    with torch.no_grad():
        pl_module.policy[num_frozen].weight += 1e-3
    diagnostics.on_train_epoch_end(trainer(grad_norm=0.5), pl_module)
    assert diagnostics.raised == []


@pytest.mark.parametrize(("top_p", "remedy"), [(1.0, "use the same dtype for both"), (0.9, "top_p < 1 or top_k > 0")])
def test_the_gap_alarm_names_what_can_cause_it(
    diagnostics: Diagnostics, caplog: pytest.LogCaptureFixture, top_p: float, remedy: str
) -> None:
    after_batch(diagnostics, trainer(fresh_gap_max=0.5, top_p=top_p))
    assert remedy in caplog.messages[0]


@pytest.mark.parametrize(("share", "raised"), [(0.51, ["clipped"]), (0.49, []), (float("nan"), [])])
def test_a_batch_that_is_mostly_clipped_alarms(diagnostics: Diagnostics, share: float, raised: list[str]) -> None:
    run = trainer()
    run.callback_metrics["train/grpo/clipped_fraction_of_negatives"] = torch.tensor(share)
    assert after_batch(diagnostics, run) == raised


@pytest.mark.parametrize(("scores", "raised"), [((0.0, 1.0, 0.0), []), ((0.0, 0.0, 0.0), ["truncated"])])
def test_with_one_completion_a_prompt_rewards_are_compared_over_the_round(
    diagnostics: Diagnostics, make_rollout: MakeRollout, scores: tuple[float, ...], raised: list[str]
) -> None:
    diagnostics.on_round_collected(
        TRAINER, [make_rollout(g, 0, score=score, finish_reason="length") for g, score in enumerate(scores)]
    )
    assert diagnostics.raised == raised
