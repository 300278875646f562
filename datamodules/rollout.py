"""Rollouts from a lagged snapshot: the experience of off-policy reinforcement learning."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar

from datamodules import ranks
from datamodules.background import Background
from datamodules.counts import check_at_least, check_batch_size
from datamodules.curation import Curation, curate, drops_equal_groups
from datamodules.engines.cores import warn_of_shared_cores
from datamodules.experience import ExperienceDataModule
from datamodules.judging import judged_in_order
from datamodules.prompt_order import PromptOrder
from datamodules.replay import Replay
from datamodules.seeds import derive_seed
from datamodules.snapshots import Snapshot, lagged_version
from datamodules.store import RolloutStore
from datamodules.types import OptimizerStep, Rollout

log = logging.getLogger(__name__)

SECONDS_TO_END = 30.0
Result = TypeVar("Result")


class RolloutDataModule(ExperienceDataModule):
    """One round an epoch: sample from the snapshot `lag` rounds back, judge, store, curate, pack, serve.

    A round that is in the store already, from before a crash, is not sampled again.

    Args:
        prompts_per_round: distinct prompts a round.
        group_size: completions of each prompt.
        curation: which samples of a round are trained on.
        replay: the rounds that each pass draws its groups from.
        prefetch: sample and judge the next round while one trains; needs a lag and an engine in its own process.
        settings: what every DataModule takes.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"sampling_logprobs"})

    def __init__(
        self,
        *,
        prompts_per_round: int,
        group_size: int,
        curation: Curation,
        replay: Replay,
        prefetch: bool,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_at_least(1, prompts_per_round=prompts_per_round, group_size=group_size)
        check_batch_size(self.batch_size, prompts_per_round * group_size)
        if prefetch and self.lag < 1:
            raise ValueError("datamodule.prefetch needs datamodule.lag of at least 1: at 0 there is nothing to overlap")
        if prefetch and self.engine.is_in_process:
            raise ValueError(
                f"datamodule.prefetch needs an engine in a process of its own, got engine {self.engine.name!r}; choose "
                "engine=vllm or engine=transformers_process"
            )
        self.prompts_per_round = prompts_per_round
        self.group_size = group_size
        self.curation = curation
        self.replay = replay
        self.mixes_snapshots = replay.rounds > 1
        self.drops_equal_groups = drops_equal_groups(curation)
        self.steps_per_round = prompts_per_round * group_size // self.batch_size * self.passes_per_round
        self.store = RolloutStore(self.directory / "rollouts")
        self._background = Background() if prefetch else None
        self._ahead: int | None = None  # the round that is made ahead; on every rank
        self._made: Future[list[Rollout]] | None = None  # on rank 0, which makes it

    def setup(self, stage: str) -> None:
        """Encode the prompts and put them in order."""
        super().setup(stage)
        if self._background is not None:
            warn_of_shared_cores(self.engine.cpu_cores)
        self.order = PromptOrder(self.train_prompts, self.prompts_per_round, self.seed)

    def version_of(self, round_: int) -> int:
        """Return the snapshot that samples a round."""
        return lagged_version(round_, self.lag)

    def collect(self, round_: int) -> list[Rollout]:
        """Return a round's judged and curated rollouts; with prefetch, have the next one made meanwhile."""
        if self._ahead != round_:
            self.ensure_snapshot(self.version_of(round_))
        judged = ranks.from_main(partial(self._collect, round_))
        self._ahead = self._made = None
        assert self.trainer is not None
        if self._background is not None and round_ + 1 < (self.trainer.max_epochs or 0):
            self.ensure_snapshot(self.version_of(round_ + 1))
            self._ahead = round_ + 1
            if ranks.rank() == 0:
                self._made = self._background.submit(partial(self._obtain, round_ + 1))
        return curate(judged, self.curation)

    def _collect(self, round_: int) -> list[Rollout]:
        """Take the round that was made ahead, or make it."""
        with self.clock.measure("waiting") if self._background is not None else nullcontext():
            return self._result() if self._made is not None else self._run(partial(self._obtain, round_))

    def _obtain(self, round_: int) -> list[Rollout]:
        """Read a round from the store, or sample it, have it judged, and store it."""
        snapshot = self.snapshots.get(self.version_of(round_))
        origin = self._origin_of(round_, snapshot)
        stored = self.store.read(round_, origin)
        if stored is not None:
            log.info("round %d: taken from %s", round_, self.store.path(round_).name)
            return stored
        judged: list[Rollout] = []
        groups = self.sampler.sample(
            self.order.of_round(round_),
            group_size=self.group_size,
            version=snapshot.version,
            round_=round_,
            label=f"round {round_}",
        )
        with (
            self.store.writing(round_, origin, self.clock) as write,
            closing(judged_in_order(self.trainer, groups, self.clock)) as in_order,
        ):
            for group in in_order:
                write(group)
                judged += group
        file = self.store.path(round_).name
        log.info("round %d: snapshot %d gave %d rollouts (%s)", round_, snapshot.version, len(judged), file)
        return judged

    def _origin_of(self, round_: int, snapshot: Snapshot) -> dict[str, Any]:
        """Return what determines a round's rollouts: sampled under the same, they would be the same."""
        prompts = self.order.of_round(round_)
        return {
            "seed": self.seed,
            "prompts": derive_seed(*(f"{e.prompt.id} {e.token_ids} {e.prompt.answer}" for e in prompts)),
            "group_size": self.group_size,
            "sampling": repr(self.sampling),
            "engine": self.engine.name,
            "is_renormalised": self.is_renormalised,
            "judges": [type(c.verifier).__qualname__ for c in self._callbacks() if hasattr(c, "verifier")],
            "snapshot": [snapshot.version, snapshot.step, *snapshot.probe_logprobs],
        }

    def _callbacks(self) -> list[Any]:
        assert self.trainer is not None
        return self.trainer.callbacks  # type: ignore[attr-defined,no-any-return]

    def pack(self, round_: int, rollouts: Any, num_groups: int | None = None) -> list[OptimizerStep]:
        """Return a round's optimizer steps, drawn from the newest rounds together."""
        older = ranks.from_main(lambda: [self.store.read_round(n) for n in self.replay.before(round_)])
        replayed = [rollout for recorded in older for rollout in curate(recorded, self.curation)]
        return super().pack(round_, [*replayed, *rollouts], self.prompts_per_round)

    def _evaluate(self, version: int, samples_per_prompt: int) -> list[Rollout]:
        """Measure when the engine is free: a round that is being made ahead comes first."""
        if self._made is not None:
            with self.clock.measure("waiting"):
                self._result()
        return self._run(partial(super()._evaluate, version, samples_per_prompt))

    def _run(self, function: Callable[[], Result]) -> Result:
        """Call a function that uses the engine, in the thread that the engine belongs to."""
        return function() if self._background is None else self._background.submit(function).result()

    def check(self) -> None:
        """Raise at once what went wrong while the next round is made."""
        if self._made is not None and self._made.done():
            self._result()

    def _result(self) -> list[Rollout]:
        assert self._made is not None
        if (error := self._made.exception()) is not None:
            raise RuntimeError(f"making round {self._ahead} ahead failed: {error}") from error
        return self._made.result()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the snapshots, and the rounds that replay draws from."""
        super().load_state_dict(state_dict)
        older = self.replay.before(state_dict["newest"])
        ranks.from_main(lambda: self.store.adopt(self.origin(state_dict) / "rollouts", older))

    def close(self) -> None:
        """End what is being made ahead, the engine, and the claim on the directory."""
        if hasattr(self, "sampler"):
            self.sampler.max_restarts = -1  # an engine that is ended is not to be started again
        if self._background is not None:
            self.engine.close()
            self._background.close(SECONDS_TO_END)  # it may have been starting an engine, which is ended next
        super().close()
