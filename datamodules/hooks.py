"""The hooks that a DataModule calls on callbacks, beyond Lightning's own.

`on_snapshot_missing(trainer, version)` publishes the initial weights; `on_rollouts(trainer, rollouts) -> rollouts`
judges the siblings of one prompt, while an engine in a process of its own samples others (with prefetch in a thread of
its own); `on_round_collected(trainer, rollouts)` observes a judged and curated round.
"""

from collections.abc import Callable
from typing import Any


def hooks(trainer: Any, name: str) -> list[Callable[..., Any]]:
    """Return a hook of every callback that has it."""
    return [getattr(callback, name) for callback in trainer.callbacks if hasattr(callback, name)]


def call_hooks(trainer: Any, name: str, *arguments: Any) -> None:
    """Call a hook on every callback that has it."""
    for hook in hooks(trainer, name):
        hook(trainer, *arguments)
