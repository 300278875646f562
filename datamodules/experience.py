"""The DataModule's part that is the same wherever experience comes from: prompts, rounds, serving, measuring."""

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader

from datamodules.atomic import remove_unfinished
from datamodules.canary import make_probe
from datamodules.clock import Clock
from datamodules.codec import Codec
from datamodules.engines.engine import Engine
from datamodules.packing import check_batch_size, pack_round
from datamodules.prompts.source import PromptSource
from datamodules.sampler import Sampler
from datamodules.seeds import derive_seed
from datamodules.snapshots import SnapshotStore, lagged_version
from datamodules.types import EncodedPrompt, OptimizerStep, Probe, Rollout, Sampling

log = logging.getLogger(__name__)


class ExperienceDataModule(L.LightningDataModule, ABC):
    """Serve one round of experience an epoch.

    Three hooks beyond Lightning's own are called on each callback that has them:
    `on_snapshot_missing(trainer, version)` publishes the initial weights,
    `on_rollouts(trainer, rollouts) -> rollouts` judges, and
    `on_round_collected(trainer, rollouts)` observes a judged round.

    Args:
        prompts: source of training and held-out prompts.
        engine: samples completions.
        sampling: how completions are drawn.
        directory: of the run; snapshots and rollouts go below it.
        prompts_per_round: distinct prompts a round.
        group_size: completions of each prompt.
        batch_size: sequences of one optimizer step; divides the round.
        passes_per_round: times that a round is trained on, reshuffled each time.
        max_tokens_per_micro_batch: largest padded size of one forward pass, in tokens.
        lag: rounds between the weights that sample and the round.
        seed: the run's seed.
    """

    sampler: Sampler
    codec: Codec
    provides: ClassVar[frozenset[str]] = frozenset()  # optional batch tensors that this source fills
    steps_per_round: int

    def __init__(
        self,
        *,
        prompts: PromptSource,
        engine: Engine,
        sampling: Sampling,
        directory: str,
        prompts_per_round: int,
        group_size: int,
        batch_size: int,
        passes_per_round: int,
        max_tokens_per_micro_batch: int,
        lag: int,
        seed: int,
    ) -> None:
        super().__init__()
        counts = {
            "prompts_per_round": prompts_per_round,
            "group_size": group_size,
            "passes_per_round": passes_per_round,
            "max_tokens_per_micro_batch": max_tokens_per_micro_batch,
        }
        for key, value in counts.items():
            if value < 1:
                raise ValueError(f"datamodule.{key} must be at least 1, got {value}")
        if lag < 0:
            raise ValueError(f"datamodule.lag counts rounds back and must be at least 0, got {lag}")
        check_batch_size(batch_size, prompts_per_round * group_size)
        self.source = prompts
        self.engine = engine
        self.sampling = sampling
        self.prompts_per_round = prompts_per_round
        self.group_size = group_size
        self.batch_size = batch_size
        self.passes_per_round = passes_per_round
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.lag = lag
        self.seed = seed
        self.steps_per_round = prompts_per_round * group_size // batch_size * passes_per_round
        self.directory = Path(directory)
        self.clock = Clock()
        self.snapshots = SnapshotStore(self.directory / "snapshots")
        self.train_prompts: list[EncodedPrompt] = []
        self.held_out_prompts: list[EncodedPrompt] = []
        self._lock = FileLock(self.directory / ".lock")
        self._order: tuple[int, list[int]] | None = None  # the permutation of the current time through the prompts
        self._round: tuple[int, list[OptimizerStep]] | None = None

    @abstractmethod
    def collect(self, round_: int) -> list[Rollout]:
        """Return a round's judged rollouts."""

    def use(self, policy: Any) -> None:
        """Take over the policy's tokenizer and window."""
        window = min(policy.window, self.engine.window or policy.window)
        self.codec = Codec(policy.tokenizer, policy.stop_token_ids, window)
        self.sampler = Sampler(self.engine, self.snapshots, self.codec, self.sampling, self.seed, self.clock)

    def claim_directory(self, *, is_resumed: bool) -> None:
        """Take the run's directory for this run alone, and clear what a killed writer left in it.

        Args:
            is_resumed: the run continues from a checkpoint.

        Raises:
            ValueError: another run is at work there, or has left its snapshots, which would pass for this run's.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"directory: another run is at work in {self.directory}; choose another") from error
        if not is_resumed and self.snapshots.versions():
            raise ValueError(
                f"directory: {self.directory} already holds a run; choose another (hydra.run.dir), delete it, "
                f"or continue it with ckpt_path={self.directory}/checkpoints/last.ckpt"
            )
        for directory in (self.directory, self.snapshots.directory, self.directory / "rollouts"):
            remove_unfinished(directory)

    @property
    def probe(self) -> Probe:
        """Tokens on which trainer and engine must agree after each sync."""
        return make_probe(self.train_prompts, self.codec.window, self.sampling.temperature)

    def setup(self, stage: str) -> None:
        """Load and encode the prompts once.

        Raises:
            ValueError: the run has several devices, or the prompts do not suffice.
        """
        if self.trainer is not None and self.trainer.world_size > 1:
            raise ValueError(
                f"trainer.devices x trainer.num_nodes is {self.trainer.world_size}, but a run trains on one device; "
                "set trainer.devices=1 and trainer.num_nodes=1"
            )
        if self.train_prompts:
            return
        split = self.source.load()
        encode = self.codec.encode_fitting
        max_tokens = self.sampling.max_tokens
        self.train_prompts = encode(split.train, max_tokens=max_tokens, name="train")
        self.held_out_prompts = encode(split.held_out, max_tokens=max_tokens, name="held-out")
        if self.prompts_per_round > len(self.train_prompts):
            raise ValueError(
                f"datamodule.prompts_per_round is {self.prompts_per_round}, but there are only "
                f"{len(self.train_prompts)} training prompts; lower it or give more prompts"
            )
        log.info("%d training and %d held-out prompts", len(self.train_prompts), len(self.held_out_prompts))

    def train_dataloader(self) -> DataLoader[OptimizerStep]:
        """Collect and pack the round that is about to be trained, once, and serve one optimizer step an item."""
        assert self.trainer is not None
        finished: Any = self.trainer.fit_loop.epoch_progress.current
        round_: int = finished.processed  # current_epoch is stale on resume
        if round_ >= (self.trainer.max_epochs or 0):
            raise ValueError(
                f"rounds is {self.trainer.max_epochs}, and {round_} are already trained; set rounds higher to go on"
            )
        if self._round is None or self._round[0] != round_:
            rollouts = self.collect(round_)
            self.call_hooks("on_round_collected", rollouts)
            steps = pack_round(
                rollouts,
                batch_size=self.batch_size,
                passes=self.passes_per_round,
                max_tokens=self.max_tokens_per_micro_batch,
                seed=self.seed,
                round_=round_,
            )
            self._round = (round_, steps)
        return DataLoader(self._round[1], batch_size=None, shuffle=False, num_workers=0)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return where the snapshots are that a resumed run samples from."""
        assert self.trainer is not None
        finished: Any = self.trainer.fit_loop.epoch_progress.current
        return {
            "snapshots": str(self.snapshots.directory),
            "newest": finished.processed,
            "seconds": dict(self.clock.seconds),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the snapshots that the next rounds need from the run that wrote the checkpoint."""
        self.clock.seconds = dict(state_dict["seconds"])
        newest = state_dict["newest"]
        source = Path(state_dict["snapshots"])
        if not source.is_dir() and self.trainer is not None and self.trainer.ckpt_path:  # the run was moved
            source = Path(self.trainer.ckpt_path).resolve().parent.parent / "snapshots"
        self.snapshots.adopt(source, range(lagged_version(newest, self.lag), newest + 1))

    def ensure_snapshot(self, version: int) -> None:
        """Have the weights published that a round or an evaluation is about to sample from.

        Raises:
            RuntimeError: no callback publishes.
        """
        if version not in self.snapshots:
            self.call_hooks("on_snapshot_missing", version)
        if version not in self.snapshots:
            raise RuntimeError(f"snapshot {version} is missing and no callback published it: add callbacks.weight_sync")

    def round_prompts(self, round_: int) -> list[EncodedPrompt]:
        """Return a round's prompts: a walk through a fresh permutation for each time through the data."""
        count = len(self.train_prompts)
        chosen: list[EncodedPrompt] = []
        for place in range(round_ * self.prompts_per_round, (round_ + 1) * self.prompts_per_round):
            chosen.append(self.train_prompts[self._permutation(place // count)[place % count]])
        return chosen

    def _permutation(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.train_prompts)))
            random.Random(derive_seed(self.seed, "prompts", epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def evaluate(self, version: int, *, samples_per_prompt: int) -> list[Rollout]:
        """Return judged rollouts of a snapshot on the held-out prompts, with the same seeds every time."""
        rollouts = self.sampler.sample(
            self.held_out_prompts, group_size=samples_per_prompt, version=version, round_=version, label="held-out"
        )
        return self.judge(rollouts)

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Have the callbacks judge rollouts, and check that each one got a verdict.

        Raises:
            RuntimeError: no callback judges, or one lost or left out a rollout.
        """
        with self.clock.measure("scoring"):
            judged = list(rollouts)
            for hook in self._hooks("on_rollouts"):
                judged = list(hook(self.trainer, judged))
        if len(judged) != len(rollouts) or any(r.verdict is None for r in judged):
            raise RuntimeError(
                f"{len(rollouts)} rollouts were sampled and {sum(r.verdict is not None for r in judged)} came back "
                "with a verdict: add a callback that judges, such as callbacks.verifier_scoring"
            )
        return judged

    def call_hooks(self, name: str, *arguments: Any) -> None:
        """Call a hook on every callback that has it."""
        for hook in self._hooks(name):
            hook(self.trainer, *arguments)

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        assert self.trainer is not None
        return [getattr(callback, name) for callback in self.trainer.callbacks if hasattr(callback, name)]  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the engine and free the directory; the run calls this on success, error and interrupt alike."""
        self.engine.close()
        self._lock.release()
