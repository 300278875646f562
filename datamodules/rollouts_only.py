"""Record rollouts of the initial weights without training on them: data for `datamodule=offline`."""

from typing import Any, ClassVar

from datamodules.rollout import RolloutDataModule
from datamodules.types import OptimizerStep


class RolloutsOnlyDataModule(RolloutDataModule):
    """Every round is sampled from snapshot 0 and stored; its one optimizer step has no micro-batch."""

    trains: ClassVar[bool] = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps_per_round = 1

    def version_of(self, round_: int) -> int:
        """Return the initial weights' version."""
        return 0

    def needed_snapshots(self, newest: int) -> range:
        """Return the initial weights' version."""
        return range(1)

    def pack(self, round_: int, rollouts: Any, num_groups: int | None = None) -> list[OptimizerStep]:
        """Return a step that changes nothing."""
        return [OptimizerStep(())]
