"""Send the weights of a snapshot to the workers of one server."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from datamodules.engines.weight_group import SENDER, TICK, WORKERS, WeightGroup


class WeightSender:
    """Opens a door for one server; `send` lets its workers in and sends, in another thread than `cancel` is called in.

    Args:
        directory: with the weights as safetensors.
        backend: of the group, "gloo" or "nccl".
        address: of this machine, that the server reaches; nothing listens on others.
        seconds: longest wait for the server.

    Raises:
        OSError: the address is none of this machine's.
    """

    def __init__(self, directory: Path, backend: str, address: str, seconds: float) -> None:
        self._directory = directory
        self._meeting: dict[str, Any] = {"backend": backend, "host": address, "seconds": seconds}
        self._cancelled = threading.Event()
        door = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._port = int(door.getsockname()[1])
        self._store = dist.TCPStore(
            address, self._port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds),
            master_listen_fd=door.detach(),
        )  # fmt: skip

    @property
    def invitation(self) -> dict[str, Any]:
        """What the server has to know: where the group meets, and which weights are sent in which order."""
        names, dtypes, shapes = [], [], []
        for name, weight in self._weights():
            names.append(name)
            dtypes.append(str(weight.dtype).removeprefix("torch."))
            shapes.append(list(weight.shape))
        return {
            "meeting": {**self._meeting, "port": self._port},
            "weights": {"names": names, "dtypes": dtypes, "shapes": shapes},
        }

    def send(self) -> None:
        """Send all weights, one after another; return when the last has left, or quietly after `cancel`.

        Raises:
            TimeoutError: nobody came for them.
            RuntimeError: the server is gone, or silent for too long.
        """
        end = time.monotonic() + self._meeting["seconds"]
        while not self._store.check([WORKERS]):
            if self._cancelled.wait(TICK):
                return
            if time.monotonic() > end:
                raise TimeoutError("the server did not come for the weights")
        size = 1 + int(self._store.get(WORKERS))
        with closing(WeightGroup(store=self._store, rank=SENDER, size=size, **self._meeting)) as group:
            for _, weight in self._weights():
                if not group.broadcast(weight.to(group.device), self._cancelled):
                    return

    def cancel(self) -> None:
        """Send nothing more."""
        self._cancelled.set()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight by the order of names; a file's pages are read when its values are used.

        Whatever file a weight is in, it so comes next to those of its layer, which vLLM puts together.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in self._directory.glob("model*.safetensors")]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (it is no dict)
            for name in sorted(places):
                yield name, places[name].get_tensor(name)
