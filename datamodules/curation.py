"""Which samples of a judged round are trained on: pure functions on whole groups.

A sample that is left out keeps its place in the optimizer step, so curation never changes the schedule, and stays in
its siblings' baselines. p~ is the share of positives that is left; for TOPR with rewards of +1 and -1 leaving samples
out to reach p~ is the same as a baseline c = (p - p~) / (p + p~ - 2 p p~) (arXiv:2503.14286, effective proportion).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from datamodules.seeds import derive_seed
from datamodules.types import Rollout

Groups = Sequence[Sequence[Rollout]]
Curation = Callable[[Groups], list[list[bool]]]  # True keeps the sample


def keep_all(groups: Groups) -> list[list[bool]]:
    """Keep every sample."""
    return [[True] * len(group) for group in groups]


def informative_only(groups: Groups) -> list[list[bool]]:
    """Leave out groups whose rewards are all equal (DAPO's filter, arXiv:2503.14476, without sampling more)."""
    return [[len({r.reward for r in group if r.has_score}) > 1] * len(group) for group in groups]


def drops_equal_groups(curation: Curation) -> bool:
    """Whether a curation, as a config makes it, leaves out groups of equal rewards."""
    return getattr(curation, "func", curation) is informative_only


def anna_karenina(groups: Groups) -> list[list[bool]]:
    """Keep each prompt's first correct completion and all incorrect ones (arXiv:2503.14286)."""
    kept = []
    for group in groups:
        first = next((i for i, r in enumerate(group) if r.is_positive), None)
        kept.append([not r.is_positive or i == first for i, r in enumerate(group)])
    return kept


def balance(groups: Groups, positive_share: float) -> list[list[bool]]:
    """Leave out as many positives, or negatives, as brings the share of positives to a target.

    Which ones is drawn from each sample's name. A round of one kind only is kept whole.

    Args:
        groups: every group of the round.
        positive_share: p~, in (0, 1).
    """
    scored = [r for group in groups for r in group if r.has_score]
    positives = [r for r in scored if r.is_positive]
    negatives = [r for r in scored if not r.is_positive]
    if not positives or not negatives:
        return keep_all(groups)
    odds = positive_share / (1.0 - positive_share)
    most_positives = max(1, round(odds * len(negatives)))
    most_negatives = max(1, round(len(positives) / odds))
    kept = {id(r) for r in sorted(positives, key=_draw)[:most_positives]}
    kept |= {id(r) for r in sorted(negatives, key=_draw)[:most_negatives]}
    return [[id(r) in kept for r in group] for group in groups]


class Balance:
    """`balance` with its target.

    Args:
        positive_share: in (0, 1).
    """

    def __init__(self, positive_share: float) -> None:
        if not 0.0 < positive_share < 1.0:
            raise ValueError(f"curation.positive_share must be in (0, 1), got {positive_share}")
        self.positive_share = positive_share

    def __call__(self, groups: Groups) -> list[list[bool]]:
        """Say which samples to keep."""
        return balance(groups, self.positive_share)


def _draw(rollout: Rollout) -> int:
    return derive_seed("balance", rollout.round, rollout.prompt_id, rollout.group_id, rollout.sibling)


def curate(rollouts: Sequence[Rollout], curation: Curation) -> list[Rollout]:
    """Return the rollouts in their order, those that are left out marked as such."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    kept = curation(list(groups.values()))
    decisions = {
        (group_id, r.sibling): keep
        for (group_id, group), keeps in zip(groups.items(), kept, strict=True)
        for r, keep in zip(group, keeps, strict=True)
    }
    return [replace(r, is_left_out=not decisions[r.group_id, r.sibling]) for r in rollouts]


def equivalent_baseline(before: float, after: float) -> float:
    """Return TOPR's baseline c that moves the effective share of positives from `before` to `after`, both in (0, 1)."""
    return (before - after) / (before + after - 2.0 * before * after)
