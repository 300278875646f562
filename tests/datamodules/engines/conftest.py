"""All engines, built as their configs say."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from pools import KEY

from datamodules.engines.engine import Engine
from datamodules.engines.vllm_server import VLLMServerEngine

CONF = Path(__file__).parents[3] / "conf"


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """Return a maker of engines by the name of their config; vLLM is skipped where it is not installed."""
    logs = tmp_path_factory.mktemp("engines")

    def make(name: str) -> Engine:
        if name.startswith("vllm") and importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        servers = ["engine.kv_cache_mb=64", f"directory={logs}"]
        small = {
            "vllm": ["engine.kv_cache_mb=64"],
            "vllm_server": servers,
            "transformers_process": ["engine.engine.max_sequences=4"],
        }
        with initialize_config_dir(str(CONF), version_base="1.3"):
            engine: Engine = instantiate(
                compose("train", [f"engine={name}", "num_threads=1", *small.get(name, [])]).engine
            )
        return engine

    return make


@pytest.fixture(scope="module", params=["transformers", "transformers_process", "vllm", "vllm_server"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[[str], Engine]) -> Iterator[Engine]:
    """Yield each engine in turn, one for the whole file."""
    engine = make_engine(request.param)
    yield engine
    engine.close()


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., VLLMServerEngine]]:
    made: list[VLLMServerEngine] = []
    monkeypatch.setenv("OFFBEAT_TEST_KEY", KEY)

    def make(endpoints: list[str] | None, **settings: Any) -> VLLMServerEngine:
        defaults: dict[str, Any] = {
            "num_servers": 1, "devices": None, "api_key_variable": "OFFBEAT_TEST_KEY", "verify_tls": True,
            "tls_certificates": None,
            "max_in_flight": 8, "start_seconds": 120.0, "patience_seconds": 60.0, "directory": str(tmp_path / "logs"),
            "dtype": "float32", "kv_cache_mb": 64, "max_model_len": None, "tensor_parallel_size": 1,
            "enforce_eager": True, "canary_tolerance": 1e-3,
        }  # fmt: skip
        made.append(VLLMServerEngine(endpoints, **{**defaults, **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
