"""vLLM samples from the adapter that was synced last, and one that did not arrive is noticed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from canaries import check_canary

from datamodules.canary import CanaryError
from datamodules.engines.engine import Engine
from datamodules.snapshots import Snapshot, SnapshotStore
from datamodules.types import Probe, Sampling
from modules.lora import LoRA, adapted_layers, factors
from modules.policy import Policy
from modules.tiny_policy import tiny_policy

PROMPT = tuple(5 + i % 90 for i in range(70))  # two whole cache blocks, which a stale cache would keep


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    policy = tiny_policy(64, 2, 2, 128, 256, True, LoRA(12, 16.0, "all-linear", "adapter"))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2 and not parameter.requires_grad:
                parameter.mul_(4.0)
    return policy


@torch.no_grad()
def publish_trained(policy: Policy, directory: Path, version: int) -> Snapshot:
    for layer in adapted_layers(policy.model).values():
        for factor in factors(layer):
            factor.add_(0.1 * torch.randn_like(factor))
    store = SnapshotStore(directory)
    store.publish_base(policy.save_base)
    probe = Probe((*PROMPT, 7, 8), (20, 70, 71), 1.0)
    return store.publish(
        version,
        step=version,
        probe=probe,
        probe_logprobs=policy.probe_logprobs(probe),
        write=policy.save_snapshot,
        adapter_rank=12,
    )


@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_each_sync_reaches_the_probe_and_the_samples(
    name: str, policy: Policy, tmp_path: Path, make_engine: Callable[[str], Engine]
) -> None:
    engine = make_engine(name)
    try:
        for version in range(3):
            snapshot = publish_trained(policy, tmp_path, version)
            engine.load(snapshot)
            assert check_canary(engine, snapshot) == pytest.approx(snapshot.probe_logprobs, abs=1e-4)
            ((_, sample),) = engine.generate([PROMPT], Sampling(max_tokens=8), [version], [2])
            positions = tuple(range(len(PROMPT), len(PROMPT) + len(sample.token_ids)))
            expected = policy.probe_logprobs(Probe((*PROMPT, *sample.token_ids), positions, 1.0))
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
        if name == "vllm":
            assert_a_lost_adapter_is_noticed(engine, publish_trained(policy, tmp_path, 3))
    finally:
        engine.close()


def assert_a_lost_adapter_is_noticed(engine: Any, snapshot: Snapshot) -> None:
    """Load a snapshot under the number of the one before, under which vLLM keeps that one's adapter."""
    engine._num_adapters -= 1
    engine._adapter = None
    engine.load(snapshot)
    with pytest.raises(CanaryError, match="does not hold snapshot 3"):
        check_canary(engine, snapshot)
