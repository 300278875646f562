"""What every test of a pool of vLLM servers draws, and with which key."""

import time
import urllib.request
from typing import Any

import pytest

from datamodules.engines.snapshot_transfer import SharedFiles
from datamodules.engines.vllm_server import VLLMServerEngine
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Sampling

KEY = "a-key-that-nobody-should-see"
KEY_VARIABLE = "OFFBEAT_TEST_KEY"
PROMPTS = [(3, 10 + i // 4, 4) for i in range(48)]  # twelve prompts of four siblings


def pool_of(endpoints: list[str] | None, **settings: Any) -> VLLMServerEngine:
    """Return an engine, small and impatient unless a setting says otherwise; `KEY_VARIABLE` has to be set."""
    defaults: dict[str, Any] = {
        "num_servers": 1, "devices": None, "api_key_variable": KEY_VARIABLE, "verify_tls": True,
        "tls_certificates": None, "transfer": SharedFiles(), "max_in_flight": 8, "start_seconds": 120.0,
        "patience_seconds": 60.0, "directory": "", "dtype": "float32", "kv_cache_mb": 64, "max_model_len": None,
        "tensor_parallel_size": 1, "enforce_eager": True, "canary_tolerance": 1e-3,
    }  # fmt: skip
    return VLLMServerEngine(endpoints, **{**defaults, **settings})


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


def wait_until_up(url: str) -> None:
    end = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.5)
