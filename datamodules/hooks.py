"""The hooks that a DataModule calls on callbacks, beyond Lightning's own.

`on_snapshot_missing(trainer, version)` publishes the initial weights, `on_rollouts(trainer, rollouts) -> rollouts`
judges (with prefetch in a thread of its own), and `on_round_collected(trainer, rollouts)` observes a judged and curated
round.
"""

from collections.abc import Callable, Sequence
from typing import Any

from datamodules.types import Rollout


def hooks(trainer: Any, name: str) -> list[Callable[..., Any]]:
    """Return a hook of every callback that has it."""
    return [getattr(callback, name) for callback in trainer.callbacks if hasattr(callback, name)]


def call_hooks(trainer: Any, name: str, *arguments: Any) -> None:
    """Call a hook on every callback that has it."""
    for hook in hooks(trainer, name):
        hook(trainer, *arguments)


def judge(trainer: Any, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Have the callbacks judge rollouts, and check that each one got a verdict.

    Raises:
        RuntimeError: no callback judges, or one lost or left out a rollout.
    """
    judged = list(rollouts)
    for hook in hooks(trainer, "on_rollouts"):
        judged = list(hook(trainer, judged))
    if len(judged) != len(rollouts) or any(r.verdict is None for r in judged):
        raise RuntimeError(
            f"{len(rollouts)} rollouts were sampled and {sum(r.verdict is not None for r in judged)} came back "
            "with a verdict: add a callback that judges, such as callbacks.verifier_scoring"
        )
    return judged
