"""Causal attention over packed tokens: siblings share one copy of their prompt, and no token pads.

Packed tokens are groups one after the other: a prompt, then the completions of those siblings that are in the
micro-batch. Sequences of equal shape are computed together; none sees another. Transformers calls `packed_attention`
for models whose attention implementation is "packed", and always gets a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from datamodules.types import PackedGroup

NAME = "packed"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which packed tokens attend to which, in blocks of sequences of equal shape.

    The queries of all blocks are a permutation of the packed tokens; the keys repeat shared prompts.
    """

    shapes: tuple[tuple[int, int, int], ...]  # of each block: sequences, queries and keys of each
    queries: Tensor  # [N] packed place of each query, block after block
    keys: Tensor  # [M] packed place of each key
    places: Tensor  # [N] where each packed token's query is
    query_starts: Tensor  # [sequences + 1] int32, where each sequence's queries start, and their end
    key_starts: Tensor  # [sequences + 1] int32


def plan_attention(groups: Sequence[PackedGroup], device: torch.device) -> AttentionPlan:
    """Return the plan for packed groups.

    A completion that has its prompt to itself is one sequence with it. Where siblings share a prompt, the prompt is a
    sequence, and so is each completion, whose keys are the prompt's and its own.
    """
    blocks: dict[tuple[int, int], list[tuple[range, range]]] = {}  # (queries, keys) -> (prompt, own tokens)
    start = 0
    for group in groups:
        prompt = range(start, start + group.prompt_length)
        start = prompt.stop
        alone = len(group.completion_lengths) < 2
        if not alone:
            blocks.setdefault((len(prompt), len(prompt)), []).append((range(0), prompt))
        for length in group.completion_lengths or (0,):
            own = range(prompt.start if alone else start, start + length)
            before = range(0) if alone else prompt
            blocks.setdefault((len(own), len(before) + len(own)), []).append((before, own))
            start += length
    used = {shape: rows for shape, rows in blocks.items() if shape[0]}
    queries = torch.tensor([i for rows in used.values() for _, own in rows for i in own], device=device)
    keys = torch.tensor([i for rows in used.values() for row in rows for part in row for i in part], device=device)
    shapes = tuple((len(rows), *shape) for shape, rows in used.items())
    starts = (
        torch.tensor([0, *accumulate(shape[i] for shape in shapes for _ in range(shape[0]))], device=device)
        for i in (1, 2)
    )
    return AttentionPlan(shapes, queries, keys, queries.argsort(), *(s.to(torch.int32) for s in starts))


@torch.compiler.disable  # its blocks differ from micro-batch to micro-batch; layers compile around it
def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output as transformers wants it, [1, N, H, D].

    Args:
        module: the attention layer.
        query: [1, H, N, D].
        key: [1, K, N, D], fewer heads where several queries share one.
        value: [1, K, N, D].
        attention_mask: None; causal by construction.
        packing: the plan.
        scaling: of the scores.
        sliding_window: keys that a query sees, itself included; None sees all before it.
        others: what the model passes besides.

    Raises:
        ValueError: it asks for what this attention does not compute.
    """
    if packing is None:
        raise ValueError(
            "packed attention needs a plan: ask the policy for log-probs, or call set_attn_implementation('sdpa') "
            "before using the model in another way"
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias", "head_mask") if others.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ValueError(f"packed attention does not compute {', '.join(unknown) or 'a mask of its own'}")
    q = query[0].transpose(0, 1).index_select(0, packing.queries)  # [N, H, D]
    k, v = (x[0].transpose(0, 1).index_select(0, packing.keys) for x in (key, value))  # [M, K, D]
    attend = _attend_varlen if has_varlen_kernel(query, value) else _attend_blocks
    output = attend(q, k, v, packing, scaling=scaling, window=sliding_window)
    return output.index_select(0, packing.places)[None], None


def has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether the device has a kernel for sequences of any lengths: CUDA's flash attention, in half precision."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, packing: AttentionPlan, *, scaling: float | None, window: int | None
) -> Tensor:
    return varlen_attn(  # type: ignore[return-value]
        q,
        k,
        v,
        packing.query_starts,
        packing.key_starts,
        max(queries for _, queries, _ in packing.shapes),
        max(keys for _, _, keys in packing.shapes),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # causal, the last query being the last key
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, packing: AttentionPlan, *, scaling: float | None, window: int | None
) -> Tensor:
    """Compute block after block of sequences of equal shape, [N, H, D]."""
    blocks = zip(
        packing.shapes,
        _cut(q, [n * queries for n, queries, _ in packing.shapes]),
        _cut(k, [n * keys for n, _, keys in packing.shapes]),
        _cut(v, [n * keys for n, _, keys in packing.shapes]),
        strict=True,
    )
    outputs = []
    for (n, *_), *block in blocks:
        output = _attend(*(_by_head(x, n) for x in block), scaling=scaling, window=window)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _cut(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return x.split(sizes)  # type: ignore[no-any-return,no-untyped-call]


def _by_head(x: Tensor, count: int) -> Tensor:
    """Cut [count x L, H, D] into sequences, [count, H, L, D]."""
    return x.unflatten(0, (count, -1)).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None) -> Tensor:
    """Return causal attention of sequences of one shape, their queries being the last of their keys, [n, H, L, D]."""
    queries, keys = query.shape[2], key.shape[2]
    mask = None
    if queries != keys or (window is not None and window < keys):
        mask = query.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask = mask if window is None else mask.triu(keys - queries - window + 1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(NAME, packed_attention)
