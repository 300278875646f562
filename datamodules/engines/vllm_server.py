"""Sample with a pool of vLLM servers over HTTP, on any machines."""

import asyncio
import os
import secrets
import time
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch

from datamodules.engines.engine import EngineDied
from datamodules.engines.loop_thread import LoopThread
from datamodules.engines.serve import flags
from datamodules.engines.server import Server
from datamodules.engines.server_addresses import check_endpoints, trust
from datamodules.engines.server_faults import ServerFault, ServerLost
from datamodules.engines.server_member import Member
from datamodules.engines.server_pool import ServerPool
from datamodules.engines.server_process import ServerProcess, check_devices
from datamodules.engines.snapshot_transfer import SnapshotTransfer
from datamodules.engines.vllm_arguments import adapter_arguments, check_installed, vllm_arguments
from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Probe, Sampling

UP_TICK = 0.5  # seconds between looks at a server that starts
MAX_FAILED_STARTS = 3


class VLLMServerEngine:
    """vLLM servers that share each round's requests; one that fails is left out until it is right again.

    Args:
        endpoints: addresses of servers that run already; null starts servers on this machine.
        num_servers: how many to start.
        devices: what each started one may use, a list of "0,1" (GPUs, or CPU cores where there are none); null: all,
            for a single server.
        api_key_variable: environment variable with the key that the servers ask for.
        verify_tls: check certificates of https endpoints.
        tls_certificates: a file with the authorities that sign them; null takes the system's.
        transfer: how snapshots reach the servers.
        max_in_flight: requests that one server has at a time.
        start_seconds: longest start of a server.
        patience_seconds: longest time without any answer.
        directory: takes the logs of started servers.
        dtype: as `engine=vllm`, of started servers; so are the next four.
        kv_cache_mb: memory for keys and values.
        max_model_len: longest prompt plus completion; null takes the model's window.
        tensor_parallel_size: devices that share one copy of the model.
        enforce_eager: skip compilation.
        canary_tolerance: largest probe difference to the trainer's log-probs.
    """

    name = "vllm_server"
    is_in_process = False
    cpu_cores = None

    def __init__(
        self,
        endpoints: Sequence[str] | None,
        num_servers: int,
        devices: Sequence[str] | None,
        api_key_variable: str,
        verify_tls: bool,
        tls_certificates: str | None,
        transfer: SnapshotTransfer,
        max_in_flight: int,
        start_seconds: float,
        patience_seconds: float,
        directory: str,
        dtype: str,
        kv_cache_mb: int,
        max_model_len: int | None,
        tensor_parallel_size: int,
        enforce_eager: bool,
        canary_tolerance: float,
    ) -> None:
        counts = {"num_servers": num_servers, "max_in_flight": max_in_flight}
        _check_positive(**counts, start_seconds=start_seconds, patience_seconds=patience_seconds)
        if not isinstance(api_key_variable, str):
            raise ValueError(f"engine.api_key_variable must name an environment variable, got {api_key_variable!r}")
        if endpoints is not None:
            check_endpoints(endpoints)
        else:
            check_installed()
            check_devices(devices, num_servers)
        self.window = max_model_len
        self.canary_tolerance = canary_tolerance
        self._endpoints = None if endpoints is None else list(endpoints)
        self._devices: list[str | None] = [None] * num_servers if devices is None else list(map(str, devices))
        self._key_variable = api_key_variable
        self._tls = trust(verify_tls, tls_certificates)
        self._transfer = transfer
        self.loads_adapters = transfer.carries_adapters
        self._max_in_flight = max_in_flight
        self._start_seconds = start_seconds
        self._patience = patience_seconds
        self._directory = Path(directory)
        arguments = vllm_arguments(dtype, kv_cache_mb, max_model_len, tensor_parallel_size, enforce_eager)
        self._words = flags(arguments)
        self._loop: LoopThread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._pool: ServerPool | None = None
        self._servers: dict[str, Server] = {}
        self._processes: list[ServerProcess] = []
        self._snapshot: Snapshot | None = None

    def load(self, snapshot: Snapshot) -> None:
        """Have the servers read a snapshot, each proved by the canary; start them before the first."""
        if self._loop is None:
            self._loop = LoopThread("vllm-servers")
            self._loop.call(self._make_pool())
        assert self._pool is not None
        self._snapshot = snapshot
        self._loop.call(self._pool.load(snapshot))

    async def _make_pool(self) -> None:
        key = os.environ.get(self._key_variable)
        if self._endpoints is None:
            key = key or secrets.token_urlsafe(32)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        if self._endpoints is None:
            members = [self._own(number, devices, str(key)) for number, devices in enumerate(self._devices)]
        else:
            members = [self._given(url) for url in self._endpoints]
        starting = 0.0 if self._endpoints else self._start_seconds
        self._pool = ServerPool(members, self._max_in_flight, self._patience, starting)

    def _given(self, url: str) -> Member:
        assert self._session is not None
        server = self._servers[url] = Server(url, self._session, self._transfer, self.canary_tolerance)

        async def bring_up(snapshot: Snapshot) -> None:
            await server.load(snapshot, self._patience)

        return Member(url, bring_up, lambda: None)

    def _own(self, number: int, devices: str | None, key: str) -> Member:
        name = f"server {number}"
        process = ServerProcess(self._words, devices, key, self._directory / f"server-{number}.log")
        self._processes.append(process)

        async def bring_up(snapshot: Snapshot) -> None:
            if process.failed_starts == MAX_FAILED_STARTS:
                raise ServerLost(f"it did not start {MAX_FAILED_STARTS} times; see {process.log_file}")
            if not process.is_running:
                process.failed_starts += 1
                adapters = flags(adapter_arguments(snapshot.adapter_rank))
                url = process.start(snapshot.base or snapshot.path, adapters, has_gpus=torch.cuda.is_available())
                assert self._session is not None
                self._servers[name] = Server(url, self._session, self._transfer, self.canary_tolerance)
            await self._wait_until_up(self._servers[name], process)
            process.failed_starts = 0
            await self._servers[name].load(snapshot, self._patience)

        return Member(name, bring_up, process.kill)  # and started afresh

    async def _wait_until_up(self, server: Server, process: ServerProcess) -> None:
        end = time.monotonic() + self._start_seconds
        while not await server.is_up():
            if not process.is_running:
                raise ServerFault(f"it ended while it started: {process.last_words()} (whole log: {process.log_file})")
            if time.monotonic() > end:
                raise ServerFault(f"it did not start in {self._start_seconds:.0f} s (engine.start_seconds)")
            await asyncio.sleep(UP_TICK)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield one completion for each (prompt, seed), whichever server gives it."""
        assert self._loop is not None, "load a snapshot first"
        assert self._pool is not None
        assert self._snapshot is not None

        def ask(member: Member, index: int) -> Coroutine[Any, Any, Completion]:
            return self._servers[member.name].complete(prompts[index], seeds[index], sampling, stop_token_ids)

        yield from self._loop.stream(self._pool.complete(prompts, self._snapshot, ask))

    def score(self, probe: Probe) -> list[float]:
        """Return the log-prob of the token at each probe position, from the first server that answers.

        Every server was asked when it loaded the snapshot.
        """
        assert self._loop is not None, "load a snapshot first"
        return self._loop.call(self._score(probe))

    async def _score(self, probe: Probe) -> list[float]:
        assert self._pool is not None
        for member in self._pool.members:
            if member.holds == self._snapshot:
                try:
                    return await self._servers[member.name].score(probe, self._patience)
                except ServerFault as fault:
                    member.fail(fault)
        raise EngineDied("no server answers any more")

    def close(self) -> None:
        """End the servers that were started here, and all connections; who waits for an answer is told."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        if self._session is not None:
            loop.call(self._session.close())
        loop.close()
        for process in self._processes:
            process.end()
        self._pool = self._session = None
        self._servers.clear()
        self._processes.clear()


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"engine.{name} must be above 0, got {value}")
