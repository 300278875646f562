"""Compiled decoder layers: the same log-probs, gradients and names of weights, for any sizes of a micro-batch."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import DictConfig
from torch import nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

from datamodules.types import RolloutBatch
from modules.decoder_layers import decoder_layers
from modules.policy import Policy
from modules.tiny_policy import tiny_policy
from train import train

SIZES = ([(4, 6), (3, 2)], [(9, 1), (5, 12), (7, 7)], [(2, 30)], [(6, 5), (6, 9)])


def make_policy() -> Policy:
    torch.manual_seed(0)
    return tiny_policy(64, 10, 2, 96, 64, tie_word_embeddings=True)


def tokens(prompt: int, completion: int, sibling: int) -> tuple[list[int], list[int]]:
    ids = [[(7 * n + 3 * sibling * k + 5 * i) % 90 + 5 for i in range(n)] for k, n in enumerate((prompt, completion))]
    return ids[0], ids[1]


def logprobs_and_gradients(policy: Policy, batch: RolloutBatch) -> list[torch.Tensor]:
    policy.zero_grad()
    logprobs = policy.logprobs(batch)
    logprobs.square().mean().backward()
    return [logprobs.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_log_probs_and_gradients_are_those_of_plain_layers_and_sizes_do_not_compile_again(
    is_checkpointed: bool, make_packed: Callable[..., RolloutBatch]
) -> None:
    plain, compiled = make_policy(), make_policy()
    for policy in (plain, compiled):
        if is_checkpointed:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    counters.clear()
    compiled.compile_layers()
    graphs = []
    for sizes in SIZES:
        batch = make_packed(*(tokens(*size, sibling) for size in sizes for sibling in range(2)))
        for actual, expected in zip(*(logprobs_and_gradients(p, batch) for p in (compiled, plain)), strict=True):
            assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 4
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_a_run_learns_the_same(small_run: Callable[..., DictConfig], tmp_path: Path) -> None:
    losses = []
    torch._dynamo.reset()
    counters.clear()
    for compile_layers in (False, True):
        directory = tmp_path / str(compile_layers)
        train(small_run(f"policy_module.compile_layers={compile_layers}", directory=directory))
        assert bool(counters["stats"]["unique_graphs"]) == compile_layers
        losses.append(pd.read_csv(directory / "metrics.csv")["train/loss"].dropna().to_numpy())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_model_that_names_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear names no decoder layers"):
        decoder_layers(nn.Linear(2, 2))
