"""Log-probs and gradients of a policy whose weights, head included, are sharded over two processes by FSDP2."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from datamodules.types import RolloutBatch
from modules.decoder_layers import decoder_layers
from modules.policy import Policy
from modules.tiny_policy import tiny_policy

LENGTHS = ((4, 6), (3, 2)), ((9, 1), (5, 12))  # prompt and completion of each sequence, for each rank


def make_policy(tied: bool) -> Policy:
    torch.manual_seed(0)
    return tiny_policy(64, 2, 2, 96, 64, tie_word_embeddings=tied)  # 101 tokens: no multiple of the two processes


def logprobs_and_gradients(policy: Policy, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    logprobs = policy.logprobs(batch)
    logprobs.sum().backward()
    found = {"logprobs": logprobs.detach()}
    for name, parameter in policy.named_parameters():
        gradient: Any = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def rank_main(rank: int, tied: bool, batches: list[RolloutBatch], directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    policy = make_policy(tied)
    for module in (*decoder_layers(policy.model), policy):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)  # the head is gathered again for the backward pass
    register_fsdp_forward_method(policy, "logprobs")
    head: Any = policy.model.get_output_embeddings()
    assert isinstance(head.weight, DTensor)
    assert len(head.weight.to_local()) < len(head.weight)
    torch.save(logprobs_and_gradients(policy, batches[rank]), directory / f"{rank}.pt")
    del policy, head
    gc.collect()
    dist.barrier()  # gloo now and then ends a process with an error when another is gone already
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_sharded_head_gives_the_log_probs_and_the_mean_gradient_of_a_whole_one(
    tied: bool, make_packed: Callable[..., RolloutBatch], tmp_path: Path
) -> None:
    batches = [
        make_packed(*(([10 + i for i in range(p)], [20 + rank + i for i in range(c)]) for p, c in lengths))
        for rank, lengths in enumerate(LENGTHS)
    ]
    mp.spawn(rank_main, (tied, batches, tmp_path), nprocs=2)
    alone = []
    for batch in batches:
        alone.append(logprobs_and_gradients(make_policy(tied), batch))
    for rank in range(2):
        sharded = torch.load(tmp_path / f"{rank}.pt")
        assert sharded.keys() == alone[0].keys()
        for name, value in sharded.items():
            expected = alone[rank][name] if name == "logprobs" else (alone[0][name] + alone[1][name]) / 2
            torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
