"""What one round of rollouts looked like, as numbers."""

from collections import defaultdict
from collections.abc import Sequence

from datamodules.curation import equivalent_baseline
from datamodules.types import Rollout


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of a judged round; shares are of all samples, means of those that have the value.

    Args:
        rollouts: every sample of the round, failed ones included; at least one.
    """
    count = len(rollouts)
    scored = [r for r in rollouts if r.has_score]
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
    if any(r.is_left_out for r in scored):
        metrics |= _of_curation(scored)
    return {f"rollout/{key}": value for key, value in metrics.items()}


def _of_curation(scored: Sequence[Rollout]) -> dict[str, float]:
    """Return what curation kept and what it left out, so that a bias by length or reward is seen."""
    parts = {
        "kept": [r for r in scored if not r.is_left_out],
        "left_out": [r for r in scored if r.is_left_out],
    }
    metrics = {"curation/left_out_fraction": len(parts["left_out"]) / len(scored)}
    for name, part in parts.items():
        metrics[f"curation/length_mean_{name}"] = _mean([len(r.completion_ids) for r in part])
        metrics[f"curation/reward_mean_{name}"] = _mean([r.reward or 0.0 for r in part])
    before = _mean([float(r.is_positive) for r in scored])
    after = _mean([float(r.is_positive) for r in parts["kept"]])
    metrics |= {"curation/positive_share_sampled": before, "curation/positive_share_trained": after}
    if 0.0 < before < 1.0 and 0.0 < after < 1.0:
        metrics["curation/equivalent_baseline"] = equivalent_baseline(before, after)
    return metrics


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
