"""Log-probs of chosen tokens from hidden states, in chunks: the logits of a whole batch never exist."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

MAX_LOGIT_BYTES = 64 * 2**20  # float32 logits that may exist at once


def token_logprobs(
    hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], *, vocabulary: int, temperature: float
) -> Tensor:
    """Return log softmax(logits(hidden) / temperature) at the targets, [N].

    Each chunk's logits are recomputed in the backward pass, unless one chunk holds all of them.

    Args:
        hidden: [N, D] states that predict the targets.
        targets: [N] token ids.
        logits: maps [n, D] to [n, V].
        vocabulary: V, which sets the size of a chunk.
        temperature: above 0.
    """

    def chunk_logprobs(states: Tensor, ids: Tensor) -> Tensor:
        return -cross_entropy(logits(states).float() / temperature, ids, reduction="none")

    size = max(1, MAX_LOGIT_BYTES // (4 * vocabulary))
    if len(hidden) <= size:
        return chunk_logprobs(hidden, targets)
    parts = [
        checkpoint(chunk_logprobs, states, ids, use_reentrant=False)
        for states, ids in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(parts)
