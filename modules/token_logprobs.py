"""Log-probs of chosen tokens from hidden states, in chunks: the logits of a whole batch never exist."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

MAX_LOGIT_BYTES = 64 * 2**20  # float32 logits that exist at once


@dataclass(frozen=True, slots=True)
class LogitScale:
    """What becomes of a head's output before the softmax: cap(multiplier x output) / temperature."""

    multiplier: float = 1.0  # Cohere's and Granite's
    cap: float | None = None  # Gemma's: cap x tanh(. / cap)
    temperature: float = 1.0  # above 0

    def apply(self, logits: Tensor) -> Tensor:
        """Scale a head's output, [N, V]."""
        logits = logits * self.multiplier
        return (logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)) / self.temperature

    def squash_(self, logits: Tensor) -> Tensor:
        """Do the first half in place: the multiplier, and where there is a cap the tanh, whose slope is 1 - tanh^2."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        return logits if self.cap is None else logits.div_(self.cap).tanh_()

    def stretch_(self, squashed: Tensor) -> Tensor:
        """Do the second half in place: the cap's factor and the temperature."""
        if self.cap is not None:
            squashed.mul_(self.cap)
        return squashed if self.temperature == 1.0 else squashed.div_(self.temperature)


def token_logprobs(hidden: Tensor, targets: Tensor, head: nn.Module, *, vocabulary: int, scale: LogitScale) -> Tensor:
    """Return log softmax(scaled head(hidden)) at the targets in float32, [N].

    A chunk's logits are computed anew in the backward pass, unless one chunk holds all of them: then its probabilities
    are kept. A plain linear head needs one or two buffers of a chunk, another head (one wrapped by LoRA, say) what
    autograd keeps of it.

    Args:
        hidden: [N, D] states that predict the targets.
        targets: [N] token ids.
        head: maps [n, D] to [n, V].
        vocabulary: V, which sets the size of a chunk.
        scale: of the logits.
    """
    size = _chunk_size(vocabulary)
    if type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)):
        return _LinearHead.apply(hidden, head.weight, head.bias, targets, scale, size)  # type: ignore[no-any-return]

    def chunk_logprobs(states: Tensor, ids: Tensor) -> Tensor:
        logits = scale.apply(head(states).float())
        return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)

    if len(hidden) <= size:
        return chunk_logprobs(hidden, targets)
    parts = [
        checkpoint(chunk_logprobs, states, ids, use_reentrant=False)
        for states, ids in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(parts)


@torch.no_grad()
def token_entropy(hidden: Tensor, head: nn.Module, *, vocabulary: int, scale: LogitScale) -> Tensor:
    """Return the entropy of softmax(scaled head(hidden)) in nats, in chunks and without gradient, [N].

    Args:
        hidden: [N, D].
        head: maps [n, D] to [n, V].
        vocabulary: V, which sets the size of a chunk.
        scale: of the logits.
    """
    entropy = hidden.new_empty(len(hidden), dtype=torch.float32)
    for part in _chunks(len(hidden), _chunk_size(vocabulary)):
        logprobs = scale.apply(head(hidden[part]).float()).log_softmax(1)
        entropy[part] = -(logprobs.exp() * logprobs).sum(1)
    return entropy


class _LinearHead(torch.autograd.Function):
    """`token_logprobs` of a linear head, its gradient by hand: d logprob / d logits = onehot - softmax."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: LogitScale, size: int
    ) -> Tensor:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizers = torch.empty_like(logprobs)
        is_one_chunk = len(hidden) <= size
        probabilities = None
        for part in _chunks(len(hidden), size):
            logits = scale.stretch_(scale.squash_(linear(hidden[part], weight, bias).float()))
            chosen = logits.gather(1, targets[part, None])[:, 0]
            highest = logits.amax(1, keepdim=True)
            sums = logits.sub_(highest).exp_().sum(1)
            normalizers[part] = sums.log() + highest[:, 0]
            logprobs[part] = chosen - normalizers[part]
            if is_one_chunk and scale.cap is None and any(ctx.needs_input_grad):
                probabilities = logits.div_(sums[:, None])
        ctx.scale, ctx.size = scale, size
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, probabilities)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, probabilities = ctx.saved_tensors
        scale = ctx.scale
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        for_hidden = torch.empty_like(hidden) if needs_hidden else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        gradient = gradient * (scale.multiplier / scale.temperature)
        for part in _chunks(len(hidden), ctx.size):
            if probabilities is None:
                squashed = scale.squash_(linear(hidden[part], weight, bias).float())
                slope = None if scale.cap is None else 1.0 - squashed.square()
                p = scale.stretch_(squashed).sub_(normalizers[part, None]).exp_()
            else:
                slope, p = None, probabilities.clone()  # kept for another backward pass of the same graph
            pull = p.mul_(-gradient[part, None]).scatter_add_(1, targets[part, None], gradient[part, None])
            pull = (pull if slope is None else pull.mul_(slope)).to(weight.dtype)
            if for_hidden is not None:
                torch.mm(pull, weight, out=for_hidden[part])
            if for_weight is not None:
                _add_product(for_weight, pull.t(), hidden[part])
            if for_bias is not None:
                for_bias += pull.sum(0, dtype=torch.float32)
        return for_hidden, _cast(for_weight, weight), _cast(for_bias, bias), None, None, None


def _chunk_size(vocabulary: int) -> int:
    """Return the tokens whose float32 logits fit the budget, at least 1."""
    return max(1, MAX_LOGIT_BYTES // (4 * vocabulary))


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a float32 total: in place where they are float32, else by way of their own precision."""
    if b.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
