"""What every engine does: hold one snapshot's weights and sample completions from them."""

from collections.abc import Generator, Sequence
from typing import Protocol

from datamodules.snapshots import Snapshot
from datamodules.types import Completion, Probe, Sampling


class EngineDied(RuntimeError):
    """The engine's process has ended. After `close`, `load` starts a new one."""


class Engine(Protocol):
    """Samples completions. An engine starts at its first `load` and lives until `close`."""

    name: str
    is_in_process: bool  # samples in the trainer's process, which waits meanwhile
    window: int | None  # longest prompt plus completion where the engine limits it below the model's
    loads_adapters: bool  # takes snapshots of low-rank adapters alone
    cpu_cores: int | None  # that it computes on; None for a device of its own, or the trainer's process
    canary_tolerance: float  # largest |engine - trainer| of a probe log-prob that is rounding, not a stale weight

    def load(self, snapshot: Snapshot) -> None:
        """Sample from these weights from now on; caches of earlier weights are dropped."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield one completion for each (prompt, seed) with its index, as they finish.

        A completion depends on its prompt, its seed and the weights; what else is in the list matters only by
        rounding. One that failed comes back with finish reason `error`.

        Raises:
            EngineDied: its process ended; what was yielded before stays valid.
        """
        ...

    def score(self, probe: Probe) -> list[float]:
        """Return the log-prob of the token at each probe position, by the path that sampling takes."""
        ...

    def close(self) -> None:
        """End the engine and free what it holds; closing twice is harmless."""
        ...
