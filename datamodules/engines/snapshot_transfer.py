"""How a snapshot's weights reach a server: it reads their files itself, or they are sent to it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from datamodules.background import Background
from datamodules.engines.server_faults import ServerFault
from datamodules.engines.weight_group import BACKENDS, address_towards
from datamodules.engines.weight_sender import WeightSender
from datamodules.snapshots import Snapshot

Post = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LAST_SECONDS = 10.0  # between the word that all weights came and the end of sending them


class SnapshotTransfer(Protocol):
    """Brings the weights of a snapshot to a server."""

    carries_adapters: bool  # low-rank factors alone, too

    async def __call__(self, snapshot: Snapshot, url: str, seconds: float, post: Post) -> dict[str, Any]:
        """Return the server's answer to `post`, whose argument says where it gets the weights from.

        Args:
            snapshot: on a file system that this process sees.
            url: of the server.
            seconds: longest wait.
            post: asks the server to take them.

        Raises:
            ServerFault: they did not reach it.
        """
        ...


class SharedFiles:
    """The server reads the snapshot's directory, which it sees under the same path."""

    carries_adapters = True

    async def __call__(self, snapshot: Snapshot, url: str, seconds: float, post: Post) -> dict[str, Any]:
        """Name the directory."""
        return await post({"path": str(snapshot.path)})


class SentWeights:
    """This process sends the weights through vLLM's weight-transfer API; the server needs no file of the run.

    Each server has a process group of its own, made for each snapshot: one that fails holds up no other, and one that
    was started again needs nothing from before.

    Args:
        backend: "gloo" over TCP, or "nccl" between GPUs.
        host: address of this machine that the servers reach; null finds it for each of them.

    Raises:
        ValueError: there is no such backend here.
    """

    carries_adapters = False

    def __init__(self, backend: str, host: str | None) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"engine.transfer.backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if not getattr(dist, f"is_{backend}_available")():
            raise ValueError(f"engine.transfer.backend={backend}: this PyTorch has none; choose engine/transfer=gloo")
        if BACKENDS[backend] == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"engine.transfer.backend={backend} is for GPUs, and there is none: engine/transfer=gloo")
        self.backend = backend
        self.host = host

    async def __call__(self, snapshot: Snapshot, url: str, seconds: float, post: Post) -> dict[str, Any]:
        """Tell the server where to come for the weights, and send them all."""
        parts = urlsplit(url)
        try:
            address = self.host or address_towards(str(parts.hostname), parts.port or 80)
            sender = WeightSender(snapshot.path, self.backend, address, seconds)
        except OSError as error:
            raise ServerFault(f"no way to send weights to {url} (engine.transfer.host={self.host}): {error}") from error
        thread = Background()
        sending = asyncio.wrap_future(thread.submit(sender.send))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())  # is known, whoever still waits
        try:
            answer = await post(sender.invitation)
            await asyncio.wait_for(sending, LAST_SECONDS)
        except TimeoutError as error:
            raise ServerFault(f"{url} says that it took the weights, and did not") from error
        except ServerFault as fault:
            reason = sending.exception() if sending.done() and not sending.cancelled() else None
            raise fault if reason is None else ServerFault(f"{fault} ({type(reason).__name__} {reason})") from reason
        except (RuntimeError, OSError) as error:
            raise ServerFault(f"sending the weights to {url} failed: {type(error).__name__} {error}") from error
        finally:
            sender.cancel()
            thread.close(0.0)
        return answer
