"""A pool of real vLLM servers: whatever one does, a round's result is that of a healthy one, or an error says why."""

import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from aiohttp import web
from faulty_proxy import FAULTS, FaultyProxy, answer_slowly, wait_long
from pools import KEY, PROMPTS, assert_same, draw, load_all
from runs import command_line

from datamodules.canary import CanaryError
from datamodules.engines.engine import EngineDied
from datamodules.engines.server_pool import NoServerLeft
from datamodules.engines.vllm_server import VLLMServerEngine
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Sampling

MakePool = Callable[..., VLLMServerEngine]


def test_two_servers_share_a_round_and_give_what_one_gives(
    servers: list[str], snapshots: list[Snapshot], undisturbed: list[Completion], make_pool: MakePool
) -> None:
    proxies = [FaultyProxy(url, lambda *_: None) for url in servers]
    engine = make_pool([proxy.url for proxy in proxies])
    for snapshot in (snapshots[0], snapshots[1]):
        load_all(engine, snapshot)
        assert engine.score(snapshot.probe) == pytest.approx(snapshot.probe_logprobs, abs=1e-4)
    assert_same(draw(engine), undisturbed)
    assert [proxy.asked % 4 for proxy in proxies] == [0, 0]  # siblings stay together
    assert min(proxy.asked for proxy in proxies) >= 8
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("kind", FAULTS)
def test_what_a_server_fails_to_do_another_does_with_the_same_result(
    kind: str,
    servers: list[str],
    snapshots: list[Snapshot],
    undisturbed: list[Completion],
    make_pool: MakePool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault, message = FAULTS[kind]
    proxy = FaultyProxy(servers[1], fault, spared=0)
    engine = make_pool([servers[0], proxy.url])
    load_all(engine, snapshots[1])
    assert_same(draw(engine), undisturbed)
    assert proxy.spoiled
    proxy.close()
    assert re.search(rf"server {proxy.url} is left out: .*{message}", caplog.text)
    assert KEY not in caplog.text


@pytest.mark.parametrize("fault", [wait_long, answer_slowly])
def test_a_server_that_hangs_or_is_slow_does_not_hold_up_the_round(
    fault: Any,
    servers: list[str],
    snapshots: list[Snapshot],
    undisturbed: list[Completion],
    make_pool: MakePool,
) -> None:
    proxy = FaultyProxy(servers[1], fault)
    engine = make_pool([servers[0], proxy.url])
    load_all(engine, snapshots[1])
    start = time.monotonic()
    assert_same(draw(engine), undisturbed)
    assert time.monotonic() - start < 20
    assert proxy.asked > 3
    proxy.close()


@pytest.mark.parametrize("path", ["/snapshot", "/probe"])
def test_a_server_that_hangs_while_it_loads_is_not_waited_for(
    path: str, servers: list[str], snapshots: list[Snapshot], undisturbed: list[Completion], make_pool: MakePool
) -> None:
    def hang(proxy: FaultyProxy, request: web.Request, answer: bytes) -> Any:
        return wait_long(proxy, request, answer) if request.path == path else None

    proxy = FaultyProxy(servers[1], hang, spared=-1)
    engine = make_pool([servers[0], proxy.url])
    start = time.monotonic()
    engine.load(snapshots[1])
    assert_same(draw(engine), undisturbed)
    assert time.monotonic() - start < 25  # it hangs for 30 s
    assert proxy.asked == 0
    proxy.close()


def test_a_server_that_only_pretends_to_load_is_never_used(
    servers: list[str], snapshots: list[Snapshot], undisturbed: list[Completion], make_pool: MakePool
) -> None:
    class Pretender(FaultyProxy):
        async def _pass_on(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/snapshot":
                return web.json_response({"label": (await request.json())["label"]})
            return await super()._pass_on(request)

    proxy = Pretender(servers[1], lambda *_: None, spared=0)
    engine = make_pool([servers[0], proxy.url])
    make_pool([servers[1]]).load(snapshots[0])  # what it really holds
    engine.load(snapshots[1])
    assert_same(draw(engine), undisturbed)
    assert proxy.asked == 0
    with pytest.raises(CanaryError, match=r"does not hold snapshot 1"):
        make_pool([proxy.url]).load(snapshots[1])
    proxy.close()


def test_a_server_that_took_another_snapshot_than_it_was_told_is_left_out(
    servers: list[str], snapshots: list[Snapshot], make_pool: MakePool
) -> None:
    def say_otherwise(_: FaultyProxy, request: web.Request, answer: bytes) -> Any:
        return web.json_response({"label": "another"}) if request.path == "/snapshot" else None

    proxy = FaultyProxy(servers[0], say_otherwise, spared=-1)
    with pytest.raises(NoServerLeft, match="does not say that it took snapshot 1"):
        make_pool([proxy.url], patience_seconds=1.0).load(snapshots[1])
    proxy.close()


def test_a_pool_without_a_server_left_says_so_in_bounded_time(
    servers: list[str], snapshots: list[Snapshot], make_pool: MakePool
) -> None:
    proxies = [FaultyProxy(url, FAULTS["an error"][0]) for url in servers]
    engine = make_pool([proxy.url for proxy in proxies], patience_seconds=3.0)
    engine.load(snapshots[1])
    start = time.monotonic()
    with pytest.raises(NoServerLeft, match=r"no server answered for 3 s .*out of memory"):
        draw(engine)
    assert time.monotonic() - start < 30
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize(
    ("status", "message"), [(400, "no server can be used: .*400.*too long"), (500, "no server answered for 1 s")]
)
def test_requests_that_every_server_refuses_end_the_round(
    status: int, message: str, servers: list[str], snapshots: list[Snapshot], make_pool: MakePool
) -> None:
    def refuse(_: FaultyProxy, request: web.Request, answer: bytes) -> Any:
        return web.Response(status=status, text="too long") if request.path.endswith("/generate") else None

    proxies = [FaultyProxy(url, refuse, spared=0) for url in servers]
    engine = make_pool([proxy.url for proxy in proxies], patience_seconds=1.0)
    engine.load(snapshots[1])
    with pytest.raises(NoServerLeft, match=message):
        draw(engine)
    for proxy in proxies:
        proxy.close()


def test_who_waits_for_an_engine_that_is_closed_is_told(
    servers: list[str], snapshots: list[Snapshot], make_pool: MakePool
) -> None:
    proxy = FaultyProxy(servers[0], wait_long, spared=0)
    engine = make_pool([proxy.url])
    engine.load(snapshots[1])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(draw, engine)
        while not proxy.asked:
            time.sleep(0.01)
        engine.close()
        with pytest.raises(EngineDied, match="closed meanwhile"):
            waiting.result(timeout=10)
    proxy.close()


def test_nobody_there_and_a_wrong_key_are_told_apart(
    servers: list[str], snapshots: list[Snapshot], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoServerLeft, match=r"no server answered for 2 s .*127\.0\.0\.1:9: .*ClientConnectorError"):
        make_pool(["http://127.0.0.1:9"], patience_seconds=2.0).load(snapshots[0])
    monkeypatch.setenv("OFFBEAT_TEST_KEY", "wrong")
    with pytest.raises(RuntimeError, match=r"no server can be used: .*refuses the key \(401\); see engine\.api"):
        make_pool(servers).load(snapshots[0])


def groups_of(parent: psutil.Process) -> list[psutil.Process]:
    return [p for p in parent.children() if "engines.serve" in command_line(p)]


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_server_of_ours_that_dies_or_hangs_in_the_middle_is_started_again(
    end: signal.Signals,
    snapshots: list[Snapshot],
    undisturbed: list[Completion],
    make_pool: MakePool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("vllm")
    others = groups_of(psutil.Process())
    engine = make_pool(None, patience_seconds=15.0, max_in_flight=4)
    engine.load(snapshots[1])
    (server,) = [p for p in groups_of(psutil.Process()) if p not in others]
    family = [server, *server.children(recursive=True)]
    completions = {}
    for index, completion in engine.generate(PROMPTS, Sampling(max_tokens=12), list(range(48)), [2]):
        completions[index] = completion
        if len(completions) == 4:
            server.send_signal(end)
    assert_same([completions[i] for i in range(48)], undisturbed)
    assert "server 0 is left out" in caplog.text
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    engine.close()
    assert groups_of(psutil.Process()) == others


def test_every_path_asks_for_the_key(servers: list[str], undisturbed: list[Completion]) -> None:
    for path in ("/snapshot", "/probe", "/inference/v1/generate", "/v1/completions", "/metrics", "/version", "/docs"):
        for key in (None, "wrong"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            request = urllib.request.Request(servers[0] + path, headers=headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == 401
            refused.value.close()


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights", "/collective_rpc", "/sleep"])
def test_paths_that_replace_weights_stay_closed_also_to_who_has_the_key(path: str, servers: list[str]) -> None:
    request = urllib.request.Request(servers[0] + path, b"{}", {"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 404
    refused.value.close()
