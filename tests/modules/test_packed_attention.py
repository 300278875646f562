"""Packed attention: each query sees its prompt and itself, whichever kernel computes it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from datamodules.types import PackedGroup
from modules import packed_attention as module
from modules.packed_attention import packed_attention, plan_attention
from modules.tiny_policy import tiny_policy

GROUPS = (PackedGroup(3, (2, 4, 2, 0)), PackedGroup(2, (5,)), PackedGroup(4, ()), PackedGroup(1, (1, 1)))
TOKENS = 11 + 7 + 4 + 3
CPU = torch.device("cpu")


def visible(window: int | None) -> Tensor:
    """Return which packed token sees which, written down sequence by sequence, [N, N]."""
    sees = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    start = 0
    for group in GROUPS:
        prompt = list(range(start, start + group.prompt_length))
        start += group.prompt_length
        for length in group.completion_lengths or (0,):
            row = prompt + list(range(start, start + length))
            start += length
            for i, query in enumerate(row):
                for key in row[max(0, i + 1 - (window or TOKENS)) : i + 1]:
                    sees[query, key] = True
    return sees


def heads(query_heads: int, key_heads: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = (query_heads, key_heads, key_heads)
    return [torch.randn(1, n, TOKENS, 8, generator=random, requires_grad=True) for n in sizes]


def dense(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """Return softmax attention over the whole [N, N] matrix, [1, N, H, D]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible(window), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def slow_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Do what flash attention's variable-length kernel is documented to do: causal, aligned at the last key."""
    outputs = []
    for s in range(len(cu_q) - 1):
        q, k, v = query[cu_q[s] : cu_q[s + 1]], key[cu_k[s] : cu_k[s + 1]], value[cu_k[s] : cu_k[s + 1]]
        assert len(q) <= max_q
        assert len(k) <= max_k
        repeats = q.shape[1] // k.shape[1]
        assert (repeats > 1) == enable_gqa
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        sees = (distance >= -window_size[1]) & ((distance <= window_size[0]) | (window_size[0] < 0))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * scale
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeats, 1)))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("kernel", ["blocks", "varlen"])
def test_values_and_gradients_are_those_of_one_large_masked_attention(
    kernel: str, query_heads: int, key_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "varlen_attn", slow_varlen)
    monkeypatch.setattr(module, "has_varlen_kernel", lambda *_: kernel == "varlen")
    inputs = heads(query_heads, key_heads)
    actual, _ = packed_attention(
        None, *inputs, None, packing=plan_attention(GROUPS, CPU), scaling=0.3, sliding_window=window
    )
    expected = dense(*inputs, 0.3, window)
    assert_close(actual, expected)
    weights = torch.linspace(-1.0, 1.0, expected.numel()).view_as(expected)
    got, want = (torch.autograd.grad((weights * out).sum(), inputs) for out in (actual, expected))
    assert_close(got, want)


def test_without_a_plan_nothing_is_computed_since_padding_would_not_be_masked() -> None:
    policy = tiny_policy(64, 2, 2, 96, 64, tie_word_embeddings=True)
    policy.model.set_attn_implementation("packed")
    ids = torch.tensor([[0, 0, 0, 10, 11, 12, 13]])
    with pytest.raises(ValueError, match=r"needs a plan: ask the policy for log-probs"):
        policy.model(input_ids=ids, attention_mask=ids.ne(0).long())


def test_sequences_of_one_shape_are_computed_together() -> None:
    plan = plan_attention((PackedGroup(3, (2, 2, 2)), PackedGroup(3, (2, 2)), PackedGroup(1, (2,))), CPU)
    assert sorted(plan.shapes) == [(3, 3, 3), (5, 2, 5)]  # the third of the 3 x 3 is a prompt with its only completion


@pytest.mark.parametrize("asked", [{"softcap": 5.0}, {"s_aux": torch.ones(1)}, {"position_bias": torch.ones(1)}])
def test_what_it_does_not_compute_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"does not compute {next(iter(asked))}"):
        packed_attention(None, *heads(2, 2), None, packing=plan_attention(GROUPS, CPU), **asked)
    with pytest.raises(ValueError, match="a mask of its own"):
        packed_attention(None, *heads(2, 2), torch.ones(1), packing=plan_attention(GROUPS, CPU))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2)])
def test_the_kernel_of_a_gpu_agrees_with_the_blocks(query_heads: int, key_heads: int, window: int | None) -> None:
    inputs = [x.detach().cuda().bfloat16().requires_grad_() for x in heads(query_heads, key_heads)]
    assert module.has_varlen_kernel(inputs[0], inputs[2])
    exact = [x.detach().float().requires_grad_() for x in inputs]
    plan = plan_attention(GROUPS, inputs[0].device)
    outputs = [
        packed_attention(None, *xs, None, packing=plan, scaling=0.3, sliding_window=window)[0] for xs in (inputs, exact)
    ]
    for output in outputs:
        output.float().square().sum().backward()
    assert_close(outputs[0].float(), outputs[1], atol=0.02, rtol=0.02)
    for half, full in zip(inputs, exact, strict=True):
        assert_close(half.grad.float(), full.grad, atol=0.1, rtol=0.05)
