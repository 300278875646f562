"""The DataModule's part that is the same wherever experience comes from: rounds, packing, serving, measuring."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from torch.utils.data import DataLoader

from datamodules import ranks
from datamodules.canary import make_probe
from datamodules.clock import Clock
from datamodules.codec import Codec
from datamodules.counts import check_at_least
from datamodules.engines.engine import Engine
from datamodules.hooks import call_hooks
from datamodules.judging import judged_in_order
from datamodules.micro_batches import Cut, packed_micro_batches, padded_micro_batches
from datamodules.packing import pack_round
from datamodules.prompts.source import PromptSource
from datamodules.run_directory import RunDirectory
from datamodules.sampler import Sampler
from datamodules.served import Served
from datamodules.snapshots import SnapshotStore, lagged_version
from datamodules.types import EncodedPrompt, OptimizerStep, Probe, Rollout, Sampling

log = logging.getLogger(__name__)


class ExperienceDataModule(L.LightningDataModule, ABC):
    """Serve one round of experience an epoch.

    Callbacks take part through the hooks of `datamodules.hooks`.

    Args:
        prompts: source of training and held-out prompts.
        engine: samples completions.
        sampling: how completions are drawn.
        directory: of the run; snapshots and rollouts go below it.
        batch_size: sequences of one optimizer step.
        passes_per_round: times that a round is trained on, reshuffled each time.
        max_tokens_per_micro_batch: most tokens of one forward pass, packed or padded as the policy wants them.
        max_engine_restarts: times that an engine which dies is started again, for one set of prompts.
        lag: rounds between the weights that sample and the round.
        seed: the run's seed.
    """

    sampler: Sampler
    codec: Codec
    _cut: Cut
    provides: ClassVar[frozenset[str]] = frozenset()  # optional batch tensors that this source fills
    trains: ClassVar[bool] = True
    samples: ClassVar[bool] = True  # its own rollouts, so that a gap between engine and trainer is a fault
    drops_equal_groups: bool = False
    mixes_snapshots: bool = False  # within one optimizer step
    group_size: int  # completions of a prompt
    steps_per_round: int

    def __init__(
        self,
        *,
        prompts: PromptSource,
        engine: Engine,
        sampling: Sampling,
        directory: str,
        batch_size: int,
        passes_per_round: int,
        max_tokens_per_micro_batch: int,
        max_engine_restarts: int,
        lag: int,
        seed: int,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, passes_per_round=passes_per_round)
        check_at_least(1, max_tokens_per_micro_batch=max_tokens_per_micro_batch)
        check_at_least(0, max_engine_restarts=max_engine_restarts)
        if lag < 0:
            raise ValueError(f"datamodule.lag counts rounds back and must be at least 0, got {lag}")
        self.source = prompts
        self.engine = engine
        self.sampling = sampling
        self.batch_size = batch_size
        self.passes_per_round = passes_per_round
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.max_engine_restarts = max_engine_restarts
        self.lag = lag
        self.seed = seed
        self.directory = Path(directory)
        self.clock = Clock()
        self.snapshots = SnapshotStore(self.directory / "snapshots")
        self.train_prompts: list[EncodedPrompt] = []
        self.held_out_prompts: list[EncodedPrompt] = []
        self.run_directory = RunDirectory(self.directory)
        self._round: tuple[int, list[OptimizerStep]] | None = None

    @abstractmethod
    def collect(self, round_: int) -> list[Rollout]:
        """Return a round's judged and curated rollouts."""

    @property
    def is_renormalised(self) -> bool:
        """Whether log-probs come from fewer tokens than the trainer's softmax covers."""
        return self.sampling.is_renormalised

    def num_steps(self, rounds: int) -> int:
        """Return the optimizer steps of the first rounds."""
        return rounds * self.steps_per_round

    def use(self, policy: Any) -> None:
        """Take over the policy's tokenizer and window, and how it wants its micro-batches."""
        window = min(policy.window, self.engine.window or policy.window)
        self.codec = Codec(policy.tokenizer, policy.stop_token_ids, window)
        self._cut = packed_micro_batches if policy.is_packed else padded_micro_batches
        self.sampler = Sampler(
            self.engine, self.snapshots, self.codec, self.sampling, self.seed, self.clock, self.max_engine_restarts
        )

    @property
    def probe(self) -> Probe:
        """Tokens on which trainer and engine must agree after each sync."""
        return make_probe(self.train_prompts, self.codec.window, self.sampling.temperature)

    def setup(self, stage: str) -> None:
        """Load and encode the prompts once.

        Raises:
            ValueError: the prompts do not suffice.
        """
        if self.train_prompts:
            return
        split = self.source.load()
        encode = self.codec.encode_fitting
        max_tokens = self.sampling.max_tokens
        self.train_prompts = encode(split.train, max_tokens=max_tokens, name="train")
        self.held_out_prompts = encode(split.held_out, max_tokens=max_tokens, name="held-out")
        log.info("%d training and %d held-out prompts", len(self.train_prompts), len(self.held_out_prompts))

    def train_dataloader(self) -> DataLoader[OptimizerStep]:
        """Collect and pack the round that is about to be trained, once, and serve one optimizer step an item."""
        assert self.trainer is not None
        round_ = self.finished_rounds
        if round_ >= (self.trainer.max_epochs or 0):
            if not ranks.from_main(
                (self.directory / "summary.json").is_file
            ):  # cut between the last checkpoint and the summary
                return DataLoader(Served([], self.check), batch_size=None)
            raise ValueError(
                f"rounds is {self.trainer.max_epochs}, and {round_} are already trained; set rounds higher to go on"
            )
        if self._round is None or self._round[0] != round_:
            rollouts = self.collect(round_)
            call_hooks(self.trainer, "on_round_collected", rollouts)
            self._round = (round_, self.pack(round_, rollouts))
        served = Served(self._round[1], self.check)
        return DataLoader(served, batch_size=None, shuffle=False, num_workers=0)

    def pack(self, round_: int, rollouts: Sequence[Rollout], num_groups: int | None = None) -> list[OptimizerStep]:
        """Return a round's optimizer steps."""
        # Neighbouring ranks that split layers between them have the same samples.
        copies = getattr(self.trainer and self.trainer.strategy, "tensor_parallel_size", 1)
        return pack_round(
            rollouts,
            batch_size=self.batch_size,
            passes=self.passes_per_round,
            max_tokens=self.max_tokens_per_micro_batch,
            cut=self._cut,
            seed=self.seed,
            round_=round_,
            num_groups=num_groups,
            rank=ranks.rank() // copies,
            num_ranks=ranks.world_size() // copies,
        )

    def check(self) -> None:
        """Raise what went wrong beside the training; called before each optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the snapshots are that a resumed run samples from."""
        return {
            "directory": str(self.directory.absolute()),
            "newest": self.finished_rounds,
            "seconds": dict(self.clock.seconds),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the snapshots that the next rounds need from the run that wrote the checkpoint."""
        self.clock.seconds = dict(state_dict["seconds"])
        newest = state_dict["newest"]
        ranks.from_main(
            lambda: self.snapshots.adopt(self.origin(state_dict) / "snapshots", self.needed_snapshots(newest))
        )

    def needed_snapshots(self, newest: int) -> range:
        """Return the versions that the rounds after `newest` rounds of training sample from."""
        return range(lagged_version(newest, self.lag), newest + 1)

    def origin(self, state_dict: dict[str, Any]) -> Path:
        """Return the directory of the run that wrote a checkpoint, wherever it is now."""
        if self.trainer is not None and self.trainer.ckpt_path:
            beside = Path(self.trainer.ckpt_path).resolve().parent.parent
            if (beside / "snapshots").is_dir():  # also where the run was copied or moved to
                return beside
        return Path(state_dict["directory"])

    def ensure_snapshot(self, version: int) -> None:
        """Have the weights published that a round or an evaluation is about to sample from.

        Raises:
            RuntimeError: no callback publishes.
        """
        can_publish = version in (self.finished_rounds, self.finished_rounds + 1)
        if can_publish and ranks.from_main(lambda: version not in self.snapshots):
            call_hooks(self.trainer, "on_snapshot_missing", version)
        if ranks.from_main(lambda: version not in self.snapshots):
            raise RuntimeError(f"snapshot {version} is missing and no callback published it: add callbacks.weight_sync")

    @property
    def finished_rounds(self) -> int:
        """Rounds that are trained; the trainer's current_epoch is stale while a run is resumed."""
        assert self.trainer is not None
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        return int(progress.processed)

    def evaluate(self, version: int, *, samples_per_prompt: int) -> list[Rollout]:
        """Return judged rollouts of a snapshot on the held-out prompts, with the same seeds every time."""
        return ranks.from_main(partial(self._evaluate, version, samples_per_prompt))

    def _evaluate(self, version: int, samples_per_prompt: int) -> list[Rollout]:
        with self.clock.measure("evaluation"):
            groups = self.sampler.sample(
                self.held_out_prompts, group_size=samples_per_prompt, version=version, round_=version, label="held-out"
            )
            return list(chain.from_iterable(judged_in_order(self.trainer, groups, self.clock)))

    def close(self) -> None:
        """End the engine and free the directory; the run calls this on success, error and interrupt alike."""
        self.engine.close()
        self.run_directory.release()
