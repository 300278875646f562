"""A process group of its own that carries weights from one sender to the workers of one server."""

import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}  # and where their tensors are
SENDER = 0  # rank; the workers are 1 and up
WORKERS = "workers"  # key under which the server tells how many they are
TICK = 0.002  # seconds between looks at what is on its way


class WeightGroup:
    """One end of the group, which has nothing to do with the groups that a run trains in.

    Args:
        backend: "gloo" over TCP, or "nccl" between GPUs.
        store: where its members meet.
        rank: in the group.
        size: number of its members.
        host: address of the machine that calls this, by which the others reach it.
        seconds: longest wait for another member.
    """

    def __init__(self, *, backend: str, store: dist.Store, rank: int, size: int, host: str, seconds: float) -> None:
        self.device = BACKENDS[backend]
        kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
        options = kind._Options() if backend == "gloo" else kind.Options()
        options._timeout = timedelta(seconds=seconds)
        if backend == "gloo":
            options._devices = [kind.create_device(hostname=host)]
        self._group: Any = kind(store, rank, size, options)

    def broadcast(self, tensor: Tensor, cancelled: threading.Event) -> bool:
        """Send a tensor, or fill it with what is sent; return whether that is done, which it is not once cancelled.

        Raises:
            RuntimeError: another member is gone, or silent for too long.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        work = self._group.broadcast([tensor.contiguous()], options)
        while not work.is_completed():
            if cancelled.wait(TICK):
                return False
        work.wait()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return True

    def close(self) -> None:
        """Leave; the others notice, once what is on its way has come or taken too long."""
        self._group = None


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine by which it talks to a host; nothing is sent to find out.

    Raises:
        OSError: there is no way to that host.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
