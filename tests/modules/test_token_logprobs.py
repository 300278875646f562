"""Chunked log-probs against the plain softmax over all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from modules import token_logprobs as module
from modules.token_logprobs import LogitScale, token_entropy, token_logprobs

NUM_TOKENS, WIDTH, VOCABULARY = 11, 6, 13
Inputs = tuple[Tensor, Tensor, nn.Linear]
PLAIN = LogitScale()


class LowRank(nn.Module):
    """A head as LoRA wraps it: a frozen linear layer plus a trained product of two small ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.b(self.a(hidden))


def make_inputs(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> Inputs:
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH).to(dtype).requires_grad_()
    return hidden, torch.randint(VOCABULARY, (NUM_TOKENS,)), nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs()


def allow(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "MAX_LOGIT_BYTES", 4 * VOCABULARY * chunk)


def ours(hidden: Tensor, targets: Tensor, head: nn.Module, scale: LogitScale = PLAIN) -> Tensor:
    return token_logprobs(hidden, targets, head, vocabulary=VOCABULARY, scale=scale)


def plain(hidden: Tensor, targets: Tensor, head: nn.Module, scale: LogitScale = PLAIN) -> Tensor:
    logits = head(hidden).float() * scale.multiplier
    logits = logits if scale.cap is None else scale.cap * torch.tanh(logits / scale.cap)
    return (logits / scale.temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def value_and_gradients(logprobs: Tensor, hidden: Tensor, head: nn.Module) -> list[Tensor]:
    weights = torch.linspace(-1.0, 2.0, NUM_TOKENS)
    trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    return [logprobs.detach(), *torch.autograd.grad((weights * logprobs).sum(), trained)]


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize(
    "scale",
    [
        LogitScale(),
        LogitScale(temperature=0.6),
        LogitScale(multiplier=0.25, temperature=1.7),
        LogitScale(cap=0.5, temperature=0.6),
        LogitScale(multiplier=3.0, cap=2.0),
    ],
)
def test_value_and_gradient_are_those_of_the_full_softmax(
    chunk: int, scale: LogitScale, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, targets, head = inputs
    allow(monkeypatch, chunk)
    actual, expected = ours(hidden, targets, head, scale), plain(hidden, targets, head, scale)
    assert_same(value_and_gradients(actual, hidden, head), value_and_gradients(expected, hidden, head))


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("wrap", [nn.Identity(), LowRank], ids=["bias-free", "low-rank"])
def test_other_heads_give_theirs(chunk: int, wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets, base = make_inputs(bias=False)
    head = wrap(base)
    allow(monkeypatch, chunk)
    scale = LogitScale(cap=2.0, temperature=0.6)
    actual, expected = ours(hidden, targets, head, scale), plain(hidden, targets, head, scale)
    assert_same(value_and_gradients(actual, hidden, head), value_and_gradients(expected, hidden, head))


@pytest.mark.parametrize("chunk", [4, 100])
def test_a_frozen_head_or_frozen_states_take_no_gradient(
    chunk: int, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, targets, head = inputs
    allow(monkeypatch, chunk)
    expected = value_and_gradients(plain(hidden, targets, head), hidden, head)
    head.requires_grad_(False)
    assert_same(value_and_gradients(ours(hidden, targets, head), hidden, head), expected[:2])
    head.requires_grad_(True)
    weights = torch.linspace(-1.0, 2.0, NUM_TOKENS)
    alone = torch.autograd.grad((weights * ours(hidden.detach(), targets, head)).sum(), list(head.parameters()))
    assert_same(list(alone), expected[2:])


@pytest.mark.parametrize("chunk", [4, 100])
def test_bfloat16_sums_in_float32(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets, head = make_inputs(torch.bfloat16)
    allow(monkeypatch, chunk)
    actual, expected = ours(hidden, targets, head), plain(hidden, targets, head)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # bfloat16 itself resolves 8e-3
    assert_same(
        [g.float() for g in value_and_gradients(actual, hidden, head)],
        [g.float() for g in value_and_gradients(expected, hidden, head)],
        0.02,
    )


class Largest(TorchDispatchMode):
    """Note the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else [output]:
            self.elements = max(self.elements, value.numel() if isinstance(value, Tensor) else 0)
        return output


@pytest.mark.parametrize("wrap", [nn.Identity(), LowRank], ids=["linear", "low-rank"])
def test_no_tensor_of_forward_or_backward_exceeds_a_chunk_of_logits(
    wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(100 * NUM_TOKENS, 2, requires_grad=True)
    head = nn.Linear(2, VOCABULARY, bias=False) if isinstance(wrap, nn.Identity) else _small_low_rank()
    allow(monkeypatch, 200)
    with Largest() as watch:
        ours(hidden, torch.zeros(len(hidden), dtype=torch.long), head).sum().backward()
    assert watch.elements == 200 * VOCABULARY


def _small_low_rank() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, VOCABULARY, bias=False))


def test_a_second_backward_pass_of_the_same_graph_gives_the_same(inputs: Inputs) -> None:
    hidden, targets, head = inputs
    logprobs = ours(hidden, targets, head).sum()
    first = torch.autograd.grad(logprobs, [hidden, head.weight], retain_graph=True)
    assert_close(torch.autograd.grad(logprobs, [hidden, head.weight]), first, rtol=0.0, atol=0.0)


def test_no_tokens_give_no_logprobs_with_a_graph(inputs: Inputs) -> None:
    hidden, targets, head = inputs
    empty = ours(hidden[:0], targets[:0], head)
    (gradient,) = torch.autograd.grad(empty.sum(), hidden)
    assert_close(gradient, torch.zeros_like(hidden))


def test_probabilities_of_all_tokens_sum_to_one_at_any_temperature(inputs: Inputs) -> None:
    hidden, _, head = inputs
    logprobs = ours(hidden[:1].expand(VOCABULARY, WIDTH), torch.arange(VOCABULARY), head, LogitScale(temperature=0.6))
    assert_close(logprobs.exp().sum().detach(), torch.tensor(1.0))


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_entropy_is_that_of_the_scaled_softmax(chunk: int, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, _, head = inputs
    allow(monkeypatch, chunk)
    scale = LogitScale(cap=2.0, temperature=0.6)
    p = (2.0 * torch.tanh(head(hidden) / 2.0) / 0.6).softmax(-1)
    actual = token_entropy(hidden, head, vocabulary=VOCABULARY, scale=scale)
    assert not actual.requires_grad
    assert_close(actual, torch.special.entr(p).sum(-1).detach())
