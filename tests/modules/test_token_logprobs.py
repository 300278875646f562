"""Chunked log-probs against the plain softmax over all logits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from modules import token_logprobs as module
from modules.token_logprobs import token_logprobs

NUM_TOKENS, WIDTH, VOCABULARY = 11, 6, 13


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(VOCABULARY, (NUM_TOKENS,)), nn.Linear(WIDTH, VOCABULARY).double()


def plain(hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], temperature: float) -> Tensor:
    scaled = logits(hidden).float() / temperature
    return scaled.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def value_and_gradients(logprobs: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor]:
    weights = torch.linspace(-1.0, 2.0, NUM_TOKENS)
    return [logprobs.detach(), *torch.autograd.grad((weights * logprobs).sum(), [hidden, head.weight, head.bias])]


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_value_and_gradient_are_those_of_the_full_softmax(
    chunk: int, temperature: float, inputs: tuple[Tensor, Tensor, nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, targets, head = inputs
    monkeypatch.setattr(module, "MAX_LOGIT_BYTES", 4 * VOCABULARY * chunk)
    actual = token_logprobs(hidden, targets, head, vocabulary=VOCABULARY, temperature=temperature)
    expected = plain(hidden, targets, head, temperature)
    for got, want in zip(
        value_and_gradients(actual, hidden, head), value_and_gradients(expected, hidden, head), strict=True
    ):
        assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_no_chunk_has_more_logits_than_allowed(
    inputs: tuple[Tensor, Tensor, nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, targets, head = inputs
    sizes: list[int] = []

    def counted(states: Tensor) -> Tensor:
        sizes.append(len(states))
        return head(states)

    monkeypatch.setattr(module, "MAX_LOGIT_BYTES", 4 * VOCABULARY * 4)
    token_logprobs(hidden, targets, counted, vocabulary=VOCABULARY, temperature=1.0)
    assert sizes == [4, 4, 3]


def test_no_tokens_give_no_logprobs_with_a_graph(inputs: tuple[Tensor, Tensor, nn.Linear]) -> None:
    hidden, targets, head = inputs
    empty = token_logprobs(hidden[:0], targets[:0], head, vocabulary=VOCABULARY, temperature=1.0)
    (gradient,) = torch.autograd.grad(empty.sum(), hidden)
    assert_close(gradient, torch.zeros_like(hidden))


def test_probabilities_of_all_tokens_sum_to_one_at_any_temperature(
    inputs: tuple[Tensor, Tensor, nn.Linear],
) -> None:
    hidden, _, head = inputs
    states = hidden[:1].expand(VOCABULARY, WIDTH)
    logprobs = token_logprobs(states, torch.arange(VOCABULARY), head, vocabulary=VOCABULARY, temperature=0.6)
    assert_close(logprobs.exp().sum().detach(), torch.tensor(1.0))
