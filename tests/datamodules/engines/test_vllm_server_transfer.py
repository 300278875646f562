"""Snapshots that are sent to servers which do not see their files."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from faulty_proxy import FaultyProxy
from pools import assert_same, draw, load_all
from torch import Tensor

from datamodules.engines import snapshot_transfer
from datamodules.engines.server_pool import NoServerLeft
from datamodules.engines.snapshot_transfer import SentWeights
from datamodules.engines.vllm_server import VLLMServerEngine
from datamodules.engines.weight_group import WORKERS, WeightGroup, address_towards
from datamodules.engines.weight_sender import WeightSender
from datamodules.snapshots import Snapshot
from datamodules.types import Completion
from modules.policy import Policy

MakePool = Callable[..., VLLMServerEngine]


class Listener(FaultyProxy):
    """Passes everything on, and remembers how the server was asked to take a snapshot."""

    def __init__(self, target: str) -> None:
        self.snapshot_bodies: list[dict[str, Any]] = []
        super().__init__(target, lambda *_: None)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/snapshot":
            self.snapshot_bodies.append(await request.json())
        return await super()._pass_on(request)


def test_two_servers_hold_each_snapshot_that_is_sent_and_never_hear_of_a_file(
    servers: list[str], snapshots: list[Snapshot], undisturbed: list[Completion], make_pool: MakePool
) -> None:
    proxies = [Listener(url) for url in servers]
    engine = make_pool([proxy.url for proxy in proxies], transfer=SentWeights("gloo", None))
    for snapshot in (snapshots[2], snapshots[0], snapshots[1]):
        load_all(engine, snapshot)
        assert engine.score(snapshot.probe) == pytest.approx(snapshot.probe_logprobs, abs=1e-4)
    assert_same(draw(engine), undisturbed)
    for proxy in proxies:
        assert len(proxy.snapshot_bodies) == 3
        assert not [body for body in proxy.snapshot_bodies if str(snapshots[0].path.parent) in str(body)]
        proxy.close()


def test_a_server_that_was_left_in_the_middle_of_the_weights_takes_the_next_ones_right(
    servers: list[str],
    snapshots: list[Snapshot],
    undisturbed: list[Completion],
    make_pool: MakePool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = WeightGroup.broadcast
    sent = []

    def fail_once(group: WeightGroup, weight: Tensor, cancelled: threading.Event) -> bool:
        sent.append(weight)
        if len(sent) == 5:
            raise RuntimeError("the disk is gone")
        return send(group, weight, cancelled)

    monkeypatch.setattr(WeightGroup, "broadcast", fail_once)
    engine = make_pool(servers[:1], transfer=SentWeights("gloo", None))
    engine.load(snapshots[1])
    names = WeightSender(snapshots[1].path, "gloo", "127.0.0.1", 1.0).invitation["weights"]["names"]
    assert len(sent) == 5 + len(names)  # the next attempt was the last
    assert names == sorted(names)
    assert_same(draw(engine), undisturbed)


def test_what_went_wrong_on_the_senders_side_is_told(
    servers: list[str], snapshots: list[Snapshot], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> bool:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(WeightGroup, "broadcast", fail)
    engine = make_pool(servers[:1], transfer=SentWeights("gloo", None), patience_seconds=3.0)
    with pytest.raises(NoServerLeft, match=r"answers 500 to /snapshot: .*\(RuntimeError the disk is gone\)"):
        engine.load(snapshots[1])


def test_an_error_at_the_very_end_of_sending_has_the_server_take_the_weights_again(
    servers: list[str],
    snapshots: list[Snapshot],
    make_pool: MakePool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    send = WeightSender.send
    calls = []

    def fail_once(sender: WeightSender) -> None:
        send(sender)
        calls.append(sender)
        if len(calls) == 1:
            raise RuntimeError("closed by peer")

    monkeypatch.setattr(WeightSender, "send", fail_once)
    engine = make_pool(servers[:1], transfer=SentWeights("gloo", None))
    engine.load(snapshots[2])
    assert f"sending the weights to {servers[0]} failed: RuntimeError closed by peer" in caplog.text
    assert engine.score(snapshots[2].probe) == pytest.approx(snapshots[2].probe_logprobs, abs=1e-4)


def test_a_server_that_only_says_that_it_took_the_weights_is_never_used(
    servers: list[str], snapshots: list[Snapshot], make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pretender(FaultyProxy):
        async def _pass_on(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"label": (await request.json())["label"]})

    monkeypatch.setattr(snapshot_transfer, "LAST_SECONDS", 0.2)
    proxy = Pretender(servers[0], lambda *_: None)
    engine = make_pool([proxy.url], transfer=SentWeights("gloo", None), patience_seconds=2.0)
    with pytest.raises(NoServerLeft, match="says that it took the weights, and did not"):
        engine.load(snapshots[1])
    proxy.close()


def test_an_address_that_is_not_this_machines_is_told_with_its_key(
    snapshots: list[Snapshot], make_pool: MakePool
) -> None:
    engine = make_pool(["http://127.0.0.1:9"], transfer=SentWeights("gloo", "192.0.2.7"), patience_seconds=1.0)
    with pytest.raises(NoServerLeft, match=r"engine\.transfer\.host=192\.0\.2\.7.*Cannot assign"):
        engine.load(snapshots[0])


class Worker:
    """A server's worker in a thread, without vLLM: receives so many of the announced weights."""

    def __init__(self, sender: WeightSender, rank: int, count: int | None, workers: int = 1) -> None:
        self.weights: dict[str, Tensor] = {}
        self._thread = threading.Thread(target=self._receive, args=(sender.invitation, rank, count, workers))
        self._thread.start()

    def _receive(self, invitation: dict[str, Any], rank: int, count: int | None, workers: int) -> None:
        meeting = dict(invitation["meeting"])
        store = dist.TCPStore(meeting["host"], meeting.pop("port"), is_master=False, wait_for_workers=False)
        store.set(WORKERS, str(workers))
        group = WeightGroup(store=store, rank=rank, size=1 + workers, **meeting)
        announced = invitation["weights"]
        triples = list(zip(announced["names"], announced["dtypes"], announced["shapes"], strict=True))
        for name, dtype, shape in triples[:count]:
            self.weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(self.weights[name], threading.Event())

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def sender(make_policy: Callable[..., Policy], tmp_path: Path) -> Iterator[WeightSender]:
    make_policy().save_pretrained(tmp_path)
    sender = WeightSender(tmp_path, "gloo", "127.0.0.1", 5.0)
    yield sender
    sender.cancel()


def test_every_worker_of_a_server_receives_every_weight_to_the_bit(
    sender: WeightSender, make_policy: Callable[..., Policy]
) -> None:
    workers = [Worker(sender, rank, None, workers=2) for rank in (1, 2)]
    sender.send()
    expected = dict(make_policy().model.named_parameters())
    for worker in workers:
        worker.join()
        assert worker.weights.keys() == expected.keys()
        for name, weight in worker.weights.items():
            assert torch.equal(weight, expected[name])


def test_a_sender_ends_when_its_worker_is_gone_when_nobody_comes_and_when_it_is_told(sender: WeightSender) -> None:
    worker = Worker(sender, 1, 2)
    with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer|Broken pipe|timed out"):
        sender.send()
    worker.join()
    alone = WeightSender(sender._directory, "gloo", "127.0.0.1", 0.5)
    with pytest.raises(TimeoutError, match="did not come for the weights"):
        alone.send()
    told = WeightSender(sender._directory, "gloo", "127.0.0.1", 60.0)
    told.cancel()
    start = time.monotonic()
    told.send()
    assert time.monotonic() - start < 30


def test_the_door_for_a_server_here_is_open_to_this_machine_alone(sender: WeightSender) -> None:
    assert address_towards("127.0.0.1", 8000) == "127.0.0.1"
    port = f"{sender.invitation['meeting']['port']:04X}"
    lines = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [address for address, _, state in lines if state == "0A" and address.endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]


def test_backends_that_are_not_there_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"engine\.transfer\.backend must be one of gloo, nccl, got 'mpi'"):
        SentWeights("mpi", None)
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match=re.escape("choose engine/transfer=gloo")):
            SentWeights("nccl", None)
