"""Judge a round while the rest of it is still sampled."""

import logging
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from datamodules.clock import Clock
from datamodules.hooks import hooks
from datamodules.types import Rollout

log = logging.getLogger(__name__)


def judged_in_order(
    trainer: Any, groups: Generator[Sequence[Rollout], None, None], clock: Clock
) -> Generator[list[Rollout], None, None]:
    """Yield groups in the order of their ids, each judged as soon as it comes; what got no score is counted and told.

    An engine in a process of its own goes on meanwhile. A hook gets the siblings of one prompt at a time.

    Args:
        trainer: whose callbacks judge, by the hook `on_rollouts`.
        groups: one for each id from 0, in any order; each one's rollouts in the order of the siblings.
        clock: told the seconds of scoring.

    Raises:
        RuntimeError: no callback judges, or one lost or left out a rollout.
    """
    early: dict[int, list[Rollout]] = {}  # what finished before its turn
    unscored: Counter[str] = Counter()
    total = turn = 0
    with closing(groups):
        for group in groups:
            with clock.measure("scoring"):
                judged = _judge(trainer, group)
            total += len(judged)
            unscored.update(r.verdict.detail for r in judged if r.verdict and r.verdict.status == "error")
            early[judged[0].group_id] = judged
            while turn in early:
                yield early.pop(turn)
                turn += 1
    assert not early, f"group {turn} never came"
    if unscored:
        reasons = "; ".join(f"{count} x {detail}" for detail, count in unscored.most_common(3))
        log.warning("%d of %d completions got no score: %s", unscored.total(), total, reasons)


def _judge(trainer: Any, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Have the callbacks judge a group, and check that each rollout got a verdict."""
    judged = list(rollouts)
    for hook in hooks(trainer, "on_rollouts"):
        judged = list(hook(trainer, judged))
    if len(judged) != len(rollouts) or any(r.verdict is None for r in judged):
        raise RuntimeError(
            f"{len(rollouts)} rollouts were sampled and {sum(r.verdict is not None for r in judged)} came back "
            "with a verdict: add a callback that judges, such as callbacks.verifier_scoring"
        )
    return judged
