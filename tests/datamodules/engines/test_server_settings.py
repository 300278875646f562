"""Settings of vLLM servers that cannot be are refused before anything is asked of one."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pools import KEY

from datamodules.engines.serve import ENDS_WITH_PARENT, check_host, main
from datamodules.engines.server_process import ServerProcess
from datamodules.engines.vllm_server import VLLMServerEngine
from datamodules.snapshots import Snapshot
from modules.policy import Policy

MakePool = Callable[..., VLLMServerEngine]


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(
    make_policy: Callable[..., Policy],
    publish: Callable[..., Snapshot],
    tmp_path: Path,
    make_pool: MakePool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("vllm")
    engine = make_pool(None, max_model_len=10**6)
    with pytest.raises(RuntimeError, match=r"no server can be used: server 0: it did not start 3 times; see .*-0\.log"):
        engine.load(publish(make_policy(), tmp_path))
    assert re.search(r"it ended while it started: \S.* \(whole log: .*server-0\.log\)", caplog.text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoints": []}, r"engine\.endpoints must list different addresses"),
        ({"endpoints": ["http://a:1", "http://a:1"]}, r"engine\.endpoints must list different addresses"),
        ({"endpoints": ["node3:8000"]}, r"engine\.endpoints must look like http://node3:8000, got 'node3:8000'"),
        ({"endpoints": ["http://node3:8000/v1"]}, r"engine\.endpoints must look like http://node3:8000, got .*/v1"),
        ({"endpoints": ["http://a:1"], "api_key_variable": None}, r"engine\.api_key_variable must name an environment"),
        ({"endpoints": ["http://me:secret@node3:8000"]}, r"engine\.endpoints must not hold a key"),
        ({"endpoints": ["http://secret@node3:8000"]}, r"engine\.endpoints must not hold a key"),
        ({"endpoints": ["http://node3:8000?key=secret"]}, r"engine\.endpoints must not hold a key"),
        ({"endpoints": ["http://a:1"], "max_in_flight": 0}, r"engine\.max_in_flight must be above 0, got 0"),
        ({"endpoints": ["http://a:1"], "patience_seconds": 0}, r"engine\.patience_seconds must be above 0"),
        (
            {"endpoints": ["https://a:1"], "tls_certificates": "no-such.pem"},
            r"engine\.tls_certificates: no-such\.pem holds no cert",
        ),
        ({"endpoints": None, "num_servers": 2}, r"engine\.devices must have one entry for each of 2 .* got None"),
        ({"endpoints": None, "num_servers": 2, "devices": "01"}, r"engine\.devices must have one entry for each of 2"),
        ({"endpoints": None, "num_servers": 2, "devices": ["0"]}, r"engine\.devices must have one entry for each of 2"),
    ],
)
def test_settings_that_name_no_servers_are_refused_by_their_key(
    settings: dict[str, Any], message: str, make_pool: MakePool
) -> None:
    if settings["endpoints"] is None:
        pytest.importorskip("vllm")
    with pytest.raises(ValueError, match=message) as raised:
        make_pool(**settings)
    assert "secret" not in str(raised.value)


def test_what_is_no_servers_fault_is_raised_at_once(
    make_policy: Callable[..., Policy], publish: Callable[..., Snapshot], tmp_path: Path, make_pool: MakePool
) -> None:
    pytest.importorskip("vllm")
    (tmp_path / "file").touch()
    engine = make_pool(None, num_servers=2, devices=[0, 1], directory=str(tmp_path / "file"))
    start = time.monotonic()
    with pytest.raises(OSError, match="file"):
        engine.load(publish(make_policy(), tmp_path))
    assert time.monotonic() - start < 30  # and not after start_seconds


def test_a_server_whose_driver_is_gone_before_it_is_up_ends_itself() -> None:
    words = [sys.executable, "-m", "datamodules.engines.serve", "no-model"]
    environment = {**os.environ, ENDS_WITH_PARENT: "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the process 1 that started this server has ended" in done.stderr


def test_a_server_lets_others_in_only_with_a_key() -> None:
    check_host("127.0.0.1", None)
    check_host("localhost", None)
    check_host("0.0.0.0", KEY)
    for host in ("0.0.0.0", "10.1.2.3", "::", "node3"):
        for no_key in (None, ""):
            with pytest.raises(ValueError, match=rf"--host {host} lets everyone .* set VLLM_API_KEY here"):
                check_host(host, no_key)


def test_so_does_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 lets everyone"):
        main([str(tmp_path), "--host", "0.0.0.0"])


def test_a_server_gets_its_share_of_the_gpus_or_of_the_cores_where_there_are_none(tmp_path: Path) -> None:
    process = ServerProcess([], "2,3", KEY, tmp_path / "log")
    for has_gpus, variable in ((True, "CUDA_VISIBLE_DEVICES"), (False, "VLLM_CPU_OMP_THREADS_BIND")):
        given = {name: value for name, value in process._environment(has_gpus).items() if "2,3" in value}
        assert given == {variable: "2,3"}
