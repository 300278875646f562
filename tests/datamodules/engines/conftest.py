"""Both engines, built as their configs say."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tqdm import tqdm

from datamodules.engines.engine import Engine

CONF = Path(__file__).parents[3] / "conf" / "engine"
SILENT = partial(tqdm, disable=True)


@pytest.fixture(scope="session")
def make_engine() -> Callable[[str], Engine]:
    """Return a maker of engines by the name of their config; vLLM is skipped where it is not installed."""

    def make(name: str) -> Engine:
        if name == "vllm" and importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        small = {"kv_cache_mb": 64} if name == "vllm" else {}
        engine: Engine = instantiate(OmegaConf.load(CONF / f"{name}.yaml"), **small)
        return engine

    return make


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[[str], Engine]) -> Iterator[Engine]:
    """Yield each engine in turn, one for the whole file."""
    engine = make_engine(request.param)
    yield engine
    engine.close()
