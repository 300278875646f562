"""What one round of rollouts looked like, as numbers."""

from collections import defaultdict
from collections.abc import Sequence

from datamodules.types import Rollout


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of a judged round; shares are of all samples, means of those that have the value.

    Args:
        rollouts: every sample of the round, failed ones included; at least one.
    """
    count = len(rollouts)
    scored = [r for r in rollouts if r.is_trainable]
    statuses = [r.verdict.status for r in rollouts if r.verdict is not None]
    metrics = {
        "num_sampled": float(count),
        "num_excluded": float(count - len(scored)),
        "reward_mean": _mean([r.reward for r in scored if r.reward is not None]),
        "truncated_fraction": sum(r.finish_reason == "length" for r in rollouts) / count,
        "snapshot": _mean([r.snapshot for r in rollouts]),
        "lag": _mean([r.round - r.snapshot for r in rollouts]),
        "entropy": _mean([-p for r in scored for p in r.sampling_logprobs or ()]),  # of the snapshot, nats a token
        "length_mean": _mean([len(r.completion_ids) for r in scored]),
        "length_mean_correct": _mean([len(r.completion_ids) for r in scored if (r.reward or 0.0) > 0.5]),
        "length_mean_incorrect": _mean([len(r.completion_ids) for r in scored if (r.reward or 0.0) <= 0.5]),
    }
    for status in ("correct", "incorrect", "unparseable", "error"):
        metrics[f"{status}_fraction"] = statuses.count(status) / count
    metrics |= _group_fractions(scored)
    return {f"rollout/{key}": value for key, value in metrics.items()}


def _group_fractions(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the shares of groups whose siblings all succeeded, all failed, or differ in reward."""
    groups: dict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout.reward or 0.0)
    count = max(1, len(groups))
    return {
        "groups_all_correct": sum(min(g) > 0.5 for g in groups.values()) / count,
        "groups_all_wrong": sum(max(g) <= 0.5 for g in groups.values()) / count,
        "groups_informative": sum(min(g) < max(g) for g in groups.values()) / count,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
