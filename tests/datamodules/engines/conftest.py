"""All engines, built as their configs say."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from datamodules.engines.engine import Engine

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
