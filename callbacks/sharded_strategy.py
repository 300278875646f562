"""Weights, gradients and optimizer state in shards over all ranks: FSDP2 through Lightning."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from datamodules.ranks import from_main, rank
from datamodules.shared_directory import shared_directory
from modules.decoder_layers import decoder_layers
from modules.policy import Policy
from modules.tensor_parallel import split_layers

METHODS = ("logprobs", "logprobs_and_entropy", "probe_logprobs")  # by which a policy is asked


def make_policy(strategy: object, make: Callable[[], Policy]) -> Policy:
    """Make a policy; where it is to be sharded, ranks other than the first make one without values, at no cost."""
    with torch.device("meta") if isinstance(strategy, ShardedStrategy) and rank() else nullcontext():
        return make()


class ShardedStrategy(ModelParallelStrategy):
    """Each decoder layer is sharded by itself, what is left of the policy together.

    Args:
        tensor_parallel_size: ranks that split each layer's matrices between them and see the same samples; neighbours.
        param_dtype: "float32", or "bfloat16" to compute in it while the shards stay float32.
        reduce_every_micro_batch: reduce gradients after each backward pass; false once a step, which communicates less
            and keeps whole gradients on each rank meanwhile.
        cpu_offload: keep shards and optimizer state in the memory of the CPU, which steps; only what a layer needs
            is on the GPU, while it computes.
        save_distributed_checkpoint: each rank writes its shards; false gathers everything in one file.
    """

    def __init__(
        self,
        tensor_parallel_size: int,
        param_dtype: str,
        reduce_every_micro_batch: bool,
        cpu_offload: bool,
        save_distributed_checkpoint: bool,
    ) -> None:
        if param_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"trainer.strategy.param_dtype must be float32 or bfloat16, got {param_dtype!r}")
        if cpu_offload and not torch.cuda.is_available():
            raise ValueError("trainer.strategy.cpu_offload is for GPUs, and there is none; set it to false")
        if type(tensor_parallel_size) is not int or tensor_parallel_size < 1:
            raise ValueError(f"trainer.strategy.tensor_parallel_size must be 1 or more, got {tensor_parallel_size!r}")
        self.tensor_parallel_size = tensor_parallel_size
        super().__init__(
            tensor_parallel_size=tensor_parallel_size, save_distributed_checkpoint=save_distributed_checkpoint
        )
        self._mixed_precision = MixedPrecisionPolicy(
            param_dtype=None if param_dtype == "float32" else torch.bfloat16, reduce_dtype=torch.float32
        )
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self._offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()

    def setup_environment(self) -> None:
        """Give each rank a shard.

        Raises:
            ValueError: the ranks cannot be grouped so.
        """
        if self.num_processes % self.tensor_parallel_size:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size is {self.tensor_parallel_size}, which {self.num_processes} "
                "processes of a node cannot be grouped into"
            )
        self._data_parallel_size = self.num_nodes * self.num_processes // self.tensor_parallel_size
        super().setup_environment()

    def shard(self, policy: Policy) -> None:
        """Shard a policy in place, with the values that rank 0 has; the others may have skeletons.

        The root is sharded again after each use: otherwise a forward pass without gradient between the backward pass
        and the optimizer's step leaves the old embeddings and head in use, silently.
        """
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "reshard_after_forward": True,
            "mp_policy": self._mixed_precision,
            "offload_policy": self._offload,
        }
        whole = _taken_out(policy)
        if self.tensor_parallel_size > 1:
            split_layers(policy.model, self.device_mesh["tensor_parallel"])
        for layer in decoder_layers(policy.model):
            fully_shard(layer, **options)
        fully_shard(policy, **options)
        for name in METHODS:
            register_fsdp_forward_method(policy, name)
        policy.to_empty(device="cpu" if isinstance(self._offload, CPUOffloadPolicy) else self.root_device)
        _put_back(policy, whole, self.root_device)

    def average_copies(self, policy: Policy) -> None:
        """Keep weights equal that ranks with the same samples all have: each computes their gradients by itself."""
        if self.tensor_parallel_size == 1:
            return
        mesh = self.device_mesh["tensor_parallel"]
        for parameter in policy.parameters():
            gradient: Any = parameter.grad
            if gradient is not None and gradient.device_mesh.ndim == 1:
                dist.all_reduce(gradient.to_local(), group=mesh.get_group())
                gradient.to_local().div_(mesh.size())

    def model_to_device(self) -> None:
        """Leave offloaded shards where they are; all else goes to the device."""
        if not isinstance(self._offload, CPUOffloadPolicy):
            super().model_to_device()
            return
        module: Any = self.lightning_module
        for child in module.children():
            if child is not module.policy:
                child.to(self.root_device)
        for part in module.policy.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = buffer.to(self.root_device)
        module._device = self.root_device

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Add up gradients locally, unless each backward pass is to reduce them."""
        assert self.lightning_module is not None
        sharded = [module for module in self.lightning_module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(self.reduce_every_micro_batch, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, whole or not at all."""
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with shared_directory(Path(from_main(lambda: str(filepath)))) as directory:
            super().save_checkpoint(checkpoint, directory, storage_options)


def _tensors(policy: Policy) -> dict[str, Tensor]:
    """Return parameters and buffers by name, shared ones once."""
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def _taken_out(policy: Policy) -> dict[str, Tensor]:
    """Make a skeleton of a policy and return what it held.

    Raises:
        RuntimeError: rank 0's skeleton is another one.
    """
    whole = _tensors(policy)
    policy.to("meta")
    policy.model.tie_weights()
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _tensors(policy).items()}
    if from_main(lambda: shapes) != shapes:
        raise RuntimeError("the ranks of trainer=fsdp made different models of one configuration")
    return whole


@torch.no_grad()
def _put_back(policy: Policy, whole: dict[str, Tensor], device: torch.device) -> None:
    """Give every rank its share of what rank 0 holds, one tensor at a time."""
    for name, tensor in _tensors(policy).items():
        if rank() == 0:
            value = whole.pop(name).detach().to(device)
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(value, src=0)
        if isinstance(tensor, DTensor):
            sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            mine = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            tensor.to_local().copy_(value[mine])
        else:
            tensor.copy_(value)
