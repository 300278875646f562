"""What every test of a pool of vLLM servers draws, and with which key."""

import time

import pytest

from datamodules.engines.vllm_server import VLLMServerEngine
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Sampling

KEY = "a-key-that-nobody-should-see"
PROMPTS = [(3, 10 + i // 4, 4) for i in range(48)]  # twelve prompts of four siblings


def draw(engine: VLLMServerEngine, max_tokens: int = 12) -> list[Completion]:
    completions = dict(engine.generate(PROMPTS, Sampling(max_tokens=max_tokens), list(range(48)), [2]))
    return [completions[i] for i in range(len(PROMPTS))]


def assert_same(actual: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in actual] == [c.finish_reason for c in expected]
    for a, b in zip(actual, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def load_all(engine: VLLMServerEngine, snapshot: Snapshot) -> None:
    """Load a snapshot, and wait for the servers that a round would not wait for."""
    engine.load(snapshot)
    assert engine._pool is not None
    deadline = time.monotonic() + 60
    while any(member.holds != snapshot for member in engine._pool.members):
        assert time.monotonic() < deadline
        time.sleep(0.05)
