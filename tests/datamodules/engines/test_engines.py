"""What both engines promise, on real weights: the trainer's log-probs, own seeds, and really changed weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from canaries import check_canary

from datamodules.canary import CanaryError
from datamodules.engines.engine import Engine
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Sampling
from modules.policy import Policy

PROMPTS = [[3, 10, 11, 12, 4], [3, 20, 4], [3, *range(10, 90), 4], [3, 10, 11, 12, 4]]
STOP = 2


def draw(
    engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, *, seed: int = 7, max_tokens: int = 12, **how: float
) -> list[Completion]:
    seeds = [seed + i for i in range(len(prompts))]
    sampling = Sampling(max_tokens=max_tokens, **how)  # type: ignore[arg-type]
    completions = dict(engine.generate(prompts, sampling, seeds, [STOP]))
    return [completions[i] for i in range(len(prompts))]


def expected_logprobs(policy: Policy, prompt: Sequence[int], completion: Completion, temperature: float) -> list[float]:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logprobs = (policy.model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    start = len(prompt) - 1
    return [logprobs[start + t, token].item() for t, token in enumerate(completion.token_ids)]


def largest_gap(engine: Engine, policy: Policy, temperature: float = 1.0) -> float:
    completions = draw(engine, temperature=temperature)
    return max(
        abs(a - b)
        for prompt, c in zip(PROMPTS, completions, strict=True)
        for a, b in zip(c.logprobs, expected_logprobs(policy, prompt, c, temperature), strict=True)
    )


@pytest.fixture
def snapshots(
    tmp_path: Path, make_policy: Callable[..., Policy], publish: Callable[..., Snapshot]
) -> list[tuple[Policy, Snapshot]]:
    policies = [make_policy(seed) for seed in (0, 1)]
    for policy in policies:
        policy.model.set_attn_implementation("sdpa")  # to be asked for logits
    return [(policy, publish(policy, tmp_path, version)) for version, policy in enumerate(policies)]


def test_sampled_logprobs_are_the_trainers_after_temperature(
    engine: Engine, snapshots: list[tuple[Policy, Snapshot]]
) -> None:
    policy, snapshot = snapshots[0]
    engine.load(snapshot)
    assert largest_gap(engine, policy, temperature=0.6) < 1e-4


def test_a_loaded_snapshot_answers_and_earlier_weights_are_forgotten(
    engine: Engine, snapshots: list[tuple[Policy, Snapshot]]
) -> None:
    for policy, snapshot in [*snapshots, snapshots[0]]:  # the same prompts each time: a stale cache would show
        engine.load(snapshot)
        assert largest_gap(engine, policy) < 1e-4
        assert check_canary(engine, snapshot) == pytest.approx(snapshot.probe_logprobs, abs=1e-4)


def test_the_canary_stops_an_engine_that_kept_its_weights(
    engine: Engine, snapshots: list[tuple[Policy, Snapshot]]
) -> None:
    engine.load(snapshots[0][1])
    with pytest.raises(CanaryError, match="does not hold snapshot 1"):
        check_canary(engine, snapshots[1][1])


def test_a_completion_depends_on_its_seed_and_not_on_its_company(
    engine: Engine, snapshots: list[tuple[Policy, Snapshot]]
) -> None:
    engine.load(snapshots[0][1])
    together = draw(engine)
    ((_, alone),) = engine.generate(PROMPTS[3:], Sampling(max_tokens=12), [together[3].seed], [STOP])
    assert alone.token_ids == together[3].token_ids
    assert together[0].token_ids != together[3].token_ids  # siblings: one prompt, two seeds
    assert draw(engine) == together  # to the last bit


def test_a_completion_ends_with_its_stop_token_or_at_its_limit(
    engine: Engine, snapshots: list[tuple[Policy, Snapshot]]
) -> None:
    engine.load(snapshots[0][1])
    completions = draw(engine, PROMPTS[:1] * 200, max_tokens=60)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        stopped = completion.finish_reason == "stop"
        assert completion.token_ids.count(STOP) == stopped
        assert completion.token_ids[-1] == STOP if stopped else len(completion.token_ids) == 60


def test_more_prompt_tokens_than_fit_one_pass_are_all_answered(
    engine: Engine, snapshots: list[tuple[Policy, Snapshot]]
) -> None:
    policy, snapshot = snapshots[0]
    engine.load(snapshot)
    prompts = [[3, 5 + i % 95, 5 + i // 95, *range(5, 95), 4] for i in range(200)]
    completions = draw(engine, prompts, max_tokens=2)
    for i in (0, 99, 199):
        expected = expected_logprobs(policy, prompts[i], completions[i], 1.0)
        torch.testing.assert_close(list(completions[i].logprobs), expected, rtol=0.0, atol=1e-4)


def test_samples_follow_the_policys_distribution(engine: Engine, snapshots: list[tuple[Policy, Snapshot]]) -> None:
    policy, snapshot = snapshots[0]
    engine.load(snapshot)
    completions = draw(engine, PROMPTS[:1] * 2000, max_tokens=1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=policy.vocabulary)
    with torch.no_grad():
        expected = policy.model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].softmax(-1)
    distance = (counts / 2000 - expected).abs().sum() / 2
    assert distance < 0.12  # about 0.07 for 2000 true samples of these 100 tokens
    assert expected.max() > 0.03  # far enough from uniform for that to mean something


def test_top_k_keeps_only_the_likeliest(engine: Engine, snapshots: list[tuple[Policy, Snapshot]]) -> None:
    policy, snapshot = snapshots[0]
    engine.load(snapshot)
    completions = draw(engine, PROMPTS[:1] * 100, max_tokens=1, top_k=3)
    with torch.no_grad():
        best = policy.model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].topk(3).indices.tolist()
    assert {c.token_ids[0] for c in completions} == set(best)
