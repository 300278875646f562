"""Rollouts from a lagged snapshot: the experience of off-policy reinforcement learning."""

import logging
from typing import ClassVar

from datamodules.experience import ExperienceDataModule
from datamodules.snapshots import lagged_version
from datamodules.store import RolloutStore
from datamodules.types import Rollout

log = logging.getLogger(__name__)


class RolloutDataModule(ExperienceDataModule):
    """One round an epoch: sample from the snapshot `lag` rounds back, judge, store, pack, serve."""

    provides: ClassVar[frozenset[str]] = frozenset({"sampling_logprobs"})

    def setup(self, stage: str) -> None:
        """Encode the prompts and open the store."""
        super().setup(stage)
        self.store = RolloutStore(self.directory / "rollouts")

    def collect(self, round_: int) -> list[Rollout]:
        """Sample a round from its lagged snapshot, have it judged, and store it as Parquet."""
        version = lagged_version(round_, self.lag)
        self.ensure_snapshot(version)
        rollouts = self.sampler.sample(
            self.round_prompts(round_),
            group_size=self.group_size,
            version=version,
            round_=round_,
            label=f"round {round_}",
        )
        judged = self.judge(rollouts)
        with self.clock.measure("storing"):
            path = self.store.write(round_, judged)
        log.info("round %d: snapshot %d gave %d rollouts (%s)", round_, version, len(judged), path.name)
        return judged
