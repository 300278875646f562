"""Masked tensor algebra that objectives share: ratios, group statistics, aggregation.

Every function selects before it computes, so that whatever stands in masked positions (NaN, infinities) changes
neither value nor gradient.
"""

from typing import Literal

import torch
from torch import Tensor

Normalizer = Literal["sequences", "tokens", "positives"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"]
NORMALIZERS: dict[str, Normalizer] = {
    "token_mean": "tokens",
    "sequence_mean": "sequences",
    "sequence_sum": "sequences",
    "sequence_sum_norm": "sequences",
}

MAX_LOG_RATIO = 60.0  # exp of it is finite in float32 with room for products
STD_FLOOR = 1e-4  # of the reward range; a smaller spread is float residue


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return x with zeros off the mask, for value and gradient alike."""
    return torch.where(mask, x, 0.0)


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over each row's masked tokens, [B]."""
    return masked(x, mask).sum(-1)


def lengths(mask: Tensor) -> Tensor:
    """Return tokens a row, at least 1 so that an empty completion divides without harm, [B] float."""
    return mask.sum(-1).clamp(min=1).to(torch.get_default_dtype())


def log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log policy - log behaviour of each token, zero off the mask, [B, C]."""
    return masked(logprobs, mask) - masked(behaviour_logprobs, mask).detach()


def bounded_exp(x: Tensor, low: float = 0.0, high: float = float("inf")) -> Tensor:
    """Return exp(x) clipped to [low, high] without ever overflowing."""
    return x.clamp(max=MAX_LOG_RATIO).exp().clamp(min=low, max=high)


def group_mean(values: Tensor) -> Tensor:
    """Return each row's mean over the siblings that have a value, [B, G] -> [B]."""
    return values.nanmean(-1)


def group_std(values: Tensor) -> Tensor:
    """Return each row's unbiased standard deviation over the siblings that have a value; 0 for a single one, [B]."""
    present = ~values.isnan()
    deviations = torch.where(present, values - group_mean(values)[:, None], 0.0)
    count = present.sum(-1)
    return (deviations.square().sum(-1) / (count - 1).clamp(min=1)).sqrt()


def leave_one_out_advantage(rewards: Tensor, group_rewards: Tensor) -> Tensor:
    """Return r minus the mean of the other siblings' rewards, n/(n-1) (r - mean); 0 for a single one, [B]."""
    count = (~group_rewards.isnan()).sum(-1)
    return (rewards - group_mean(group_rewards)) * count / (count - 1).clamp(min=1)


def normalized_advantage(rewards: Tensor, group_rewards: Tensor, reward_span: float, epsilon: float = 1e-6) -> Tensor:
    """Return (r - mean) / (std + epsilon), and 0 where the spread is float residue, [B].

    Args:
        rewards: [B].
        group_rewards: [B, G].
        reward_span: difference between the highest and the lowest reward.
        epsilon: added to the unbiased standard deviation.
    """
    std = group_std(group_rewards)
    advantage = (rewards - group_mean(group_rewards)) / (std + epsilon)
    return torch.where(std < STD_FLOOR * reward_span, 0.0, advantage)


def log_mean_exp(values: Tensor, temperature: float) -> Tensor:
    """Return temperature * log(mean(exp(value / temperature))) over the siblings that have a value, [B, G] -> [B]."""
    present = ~values.isnan()
    highest = torch.where(present, values, -torch.inf).amax(-1)
    shifted = torch.where(present, (values - highest[:, None]) / temperature, 0.0).expm1()  # accurate for large ones
    return highest + temperature * torch.log1p(shifted.sum(-1) / present.sum(-1).clamp(min=1))


def aggregation_weight(mask: Tensor, aggregation: Aggregation, horizon: float = 1.0) -> Tensor:
    """Return the factor of each row's token terms before the division by the normalizer, [B, 1].

    `token_mean`: sum over all tokens / their count. `sequence_mean`: mean over sequences of the token mean.
    `sequence_sum`: mean over sequences of the token sum. `sequence_sum_norm`: the same divided by `horizon`.
    """
    if aggregation == "sequence_mean":
        return 1.0 / lengths(mask)[:, None]
    scale = 1.0 / horizon if aggregation == "sequence_sum_norm" else 1.0
    return torch.full_like(mask[:, :1], scale, dtype=torch.get_default_dtype())


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices.

    Raises:
        ValueError: naming the config key and the choices.
    """
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
