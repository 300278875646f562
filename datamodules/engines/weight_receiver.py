"""A weight-transfer engine of vLLM's: a server's worker receives what the trainer's `WeightSender` sends."""

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from datamodules.engines.weight_group import WORKERS, WeightGroup, address_towards


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where the sender waits."""

    backend: str
    host: str
    port: int
    seconds: float  # longest wait for it


@dataclass
class Announcement(WeightTransferUpdateInfo):
    """What it sends, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class WeightReceiver(WeightTransferEngine[Meeting, Announcement]):
    """Loads each weight as it comes; vLLM holds those that it puts together beside the model, until all are there."""

    init_info_cls = Meeting
    update_info_cls = Announcement
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join the sender and the other workers of this server."""
        store = dist.TCPStore(
            init_info.host, init_info.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=init_info.seconds),
        )  # fmt: skip
        workers = self.parallel_config.world_size
        store.set(WORKERS, str(workers))
        self._group = WeightGroup(
            backend=init_info.backend,
            store=store,
            rank=1 + self.parallel_config.rank,
            size=1 + workers,
            host=address_towards(init_info.host, init_info.port),
            seconds=init_info.seconds,
        )

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded as from a checkpoint."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load everything, and bring the layers into the form that vLLM computes with.

        That is done here, also after an error, so that neither a layer nor vLLM's worker stays half way: the next
        transfer would go on from there. vLLM's own method waits for an accelerator, where there may be none.
        """
        try:
            self.receive_weights(self.parse_update_info(update_info))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Announcement) -> None:
        """Receive each weight and load it."""
        assert self._group is not None, "init_transfer_engine comes first"
        never = threading.Event()
        for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self._group.device)
            self._group.broadcast(weight, never)
            self.model.load_weights([(name, weight)])

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` has done it."""

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
