"""All engines, built as their configs say."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from pools import KEY, KEY_VARIABLE, draw, pool_of, wait_until_up

from datamodules.engines.engine import Engine
from datamodules.engines.server_process import ServerProcess
from datamodules.engines.vllm_server import VLLMServerEngine
from datamodules.snapshots import Snapshot
from datamodules.types import Completion
from modules.policy import Policy

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
    monkeypatch.setenv(KEY_VARIABLE, KEY)

    def make(endpoints: list[str] | None, **settings: Any) -> VLLMServerEngine:
        made.append(pool_of(endpoints, **{"directory": str(tmp_path / "logs"), **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def snapshots(
    tmp_path_factory: pytest.TempPathFactory, make_policy: Callable[..., Policy], publish: Callable[..., Snapshot]
) -> list[Snapshot]:
    directory = tmp_path_factory.mktemp("snapshots")
    return [publish(make_policy(version), directory, version) for version in range(3)]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, snapshots: list[Snapshot]) -> Iterator[list[str]]:
    """Start two real servers."""
    pytest.importorskip("vllm")
    logs = tmp_path_factory.mktemp("servers")
    words = ["--dtype", "float32", "--kv-cache-memory-bytes", str(2**26), "--enforce-eager"]
    processes = [ServerProcess(words, str(i), KEY, logs / f"{i}.log") for i in range(2)]  # a core for each
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_SERVER_DEV_MODE", "1")  # which must open nothing
        urls = [process.start(snapshots[0].path, [], has_gpus=False) for process in processes]
    for url in urls:
        wait_until_up(url)
    yield urls
    for process in processes:
        process.end()


@pytest.fixture(scope="session")
def undisturbed(servers: list[str], snapshots: list[Snapshot]) -> list[Completion]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(KEY_VARIABLE, KEY)
        engine = pool_of(servers[:1])
        engine.load(snapshots[1])
        completions = draw(engine)
        engine.close()
    return completions
