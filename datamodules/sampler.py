"""Sample whole groups from a snapshot: load, prove the load, draw, and record where each sample came from."""

import logging
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import count

from tqdm import tqdm

from datamodules.canary import Canary
from datamodules.clock import Clock
from datamodules.codec import Codec
from datamodules.engines.engine import Engine, EngineDied
from datamodules.seeds import derive_seed
from datamodules.snapshots import Snapshot, SnapshotStore
from datamodules.types import Completion, EncodedPrompt, Rollout, Sampling

log = logging.getLogger(__name__)


class Sampler:
    """An engine with the snapshots that it may load.

    Args:
        engine: draws the completions.
        snapshots: where weights are published.
        codec: decodes completions.
        sampling: how completions are drawn.
        seed: the run's seed.
        clock: told the seconds spent on syncing and sampling.
        max_restarts: times that an engine which dies is started again, for one set of prompts.
    """

    def __init__(
        self,
        engine: Engine,
        snapshots: SnapshotStore,
        codec: Codec,
        sampling: Sampling,
        seed: int,
        clock: Clock,
        max_restarts: int,
    ) -> None:
        self.engine = engine
        self.snapshots = snapshots
        self.codec = codec
        self.sampling = sampling
        self.seed = seed
        self.clock = clock
        self.max_restarts = max_restarts
        self._loaded: int | None = None
        self._canary = Canary(engine.name, engine.canary_tolerance)

    def load(self, version: int) -> Snapshot:
        """Put a snapshot into the engine, unless it is there, and prove it by the canary."""
        snapshot = self.snapshots.get(version)
        if self._loaded != version:
            with self.clock.measure("engine start" if self._canary.is_first else "sync"):
                self._loaded = None
                self.engine.load(snapshot)
                self._canary.check(snapshot, self.engine.score(snapshot.probe))
                self._loaded = version
        return snapshot

    def sample(
        self, prompts: Sequence[EncodedPrompt], *, group_size: int, version: int, round_: int, label: str
    ) -> Generator[list[Rollout], None, None]:
        """Yield each prompt's group of `group_size` unjudged rollouts as soon as the last of its siblings is finished.

        Args:
            prompts: what to answer.
            group_size: completions of each prompt.
            version: snapshot that samples.
            round_: recorded with each rollout.
            label: names the progress bar and, with the run's seed, prompt and sibling, the seed of each sample.

        Raises:
            RuntimeError: the engine died more often than it may.
        """
        slots = [(g, s) for g in range(len(prompts)) for s in range(group_size)]
        seen: Counter[str] = Counter()
        times = [seen.update([p.prompt.id]) or seen[p.prompt.id] for p in prompts]  # a round may meet a prompt twice
        seeds = [derive_seed(self.seed, label, prompts[g].prompt.id, times[g], s) for g, s in slots]
        snapshot = self.snapshots.get(version)
        groups: list[dict[int, Completion]] = [{} for _ in prompts]
        with closing(self._complete([prompts[g].token_ids for g, _ in slots], seeds, version, label)) as completions:
            for place, completion in completions:
                g, s = slots[place]
                groups[g][s] = completion
                if len(groups[g]) == group_size:
                    yield [self._rollout(prompts[g], g, s, groups[g][s], snapshot, round_) for s in range(group_size)]

    def _complete(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], version: int, label: str
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yield a completion for each (prompt, seed); an engine that dies is started again for those that are missing.

        Raises:
            RuntimeError: it died more often than it may.
        """
        missing = set(range(len(prompts)))
        bar = tqdm(total=len(prompts), desc=f"sampling {label}", unit="completion", leave=False, dynamic_ncols=True)
        with bar:
            for restarts in count():
                try:
                    self.load(version)
                    asked = sorted(missing)
                    drawn = self.engine.generate(
                        [prompts[i] for i in asked], self.sampling, [seeds[i] for i in asked], self.codec.stop_token_ids
                    )
                    with closing(drawn), closing(self.clock.measure_each("sampling", drawn)) as timed:
                        for place, completion in timed:
                            missing.remove(asked[place])
                            bar.update()
                            yield asked[place], completion
                    if missing:
                        raise RuntimeError(f"engine {self.engine.name} ended with {len(missing)} completions missing")
                    return
                except EngineDied as error:
                    kept = len(prompts) - len(missing)
                    self._restart(error, restarts, f"{kept} of {len(prompts)} completions of {label} are kept")

    def _restart(self, error: EngineDied, restarts: int, kept: str) -> None:
        if restarts >= self.max_restarts:
            raise RuntimeError(
                f"engine {self.engine.name} died {restarts + 1} times in one go, datamodule.max_engine_restarts is "
                f"{self.max_restarts}; the last time: {error}"
            ) from error
        log.warning("%s; start %d of at most %d, %s", error, restarts + 1, self.max_restarts, kept)
        self._loaded = None
        self.engine.close()

    def _rollout(
        self,
        encoded: EncodedPrompt,
        group_id: int,
        sibling: int,
        completion: Completion,
        snapshot: Snapshot,
        round_: int,
    ) -> Rollout:
        return Rollout(
            prompt_id=encoded.prompt.id,
            group_id=group_id,
            sibling=sibling,
            prompt_text=encoded.prompt.messages[-1]["content"],
            answer=encoded.prompt.answer,
            prompt_ids=encoded.token_ids,
            completion_ids=completion.token_ids,
            sampling_logprobs=completion.logprobs,
            text=self.codec.decode(completion.token_ids),
            finish_reason=completion.finish_reason,
            temperature=self.sampling.temperature,
            seed=completion.seed,
            round=round_,
            snapshot=snapshot.version,
            snapshot_step=snapshot.step,
            failure=completion.failure,
        )
