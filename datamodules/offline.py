"""Train on recorded rollouts, one file a round, in the order of the files' names."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from datamodules import ranks
from datamodules.canary import make_probe
from datamodules.collate import collate
from datamodules.curation import Curation, curate, drops_equal_groups
from datamodules.experience import ExperienceDataModule
from datamodules.recordings import is_renormalised, read_recording, recording_files
from datamodules.types import EncodedPrompt, Probe, Prompt, Rollout

log = logging.getLogger(__name__)


class OfflineDataModule(ExperienceDataModule):
    """Serve recorded rounds; the engine, if any, only measures on held-out prompts.

    Every file is read once at set-up, so that a bad row ends the run before it starts.

    Args:
        path: a file, or a pattern that several match.
        curation: which samples of a round are trained on.
        logprobs_from: hub id or directory of a model whose log-probs stand in where a file has none; null refuses such
            files for objectives that need them.
        scorer: makes that model's policy from its path.
        settings: what every DataModule takes.
    """

    samples: ClassVar[bool] = False

    def __init__(
        self,
        *,
        path: str,
        curation: Curation,
        logprobs_from: str | None,
        scorer: Callable[[str], Any],
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.files = recording_files(path)
        self.curation = curation
        self.drops_equal_groups = drops_equal_groups(curation)
        self.logprobs_from = logprobs_from
        self._make_scorer = scorer
        self._scorer: Any = None
        self._steps: list[int] = []
        self._is_renormalised = False
        self._probe_prompts: list[EncodedPrompt] = []

    @property
    def probe(self) -> Probe:
        """Tokens of recorded prompts."""
        return make_probe(self._probe_prompts, self.codec.window, self.sampling.temperature)

    def setup(self, stage: str) -> None:
        """Read every file, and encode the held-out prompts.

        Raises:
            ValueError: there are fewer files than rounds, or a row is unusable.
        """
        super().setup(stage)
        if self._steps:
            return
        self.train_prompts = []  # none is sampled
        rounds = 0 if self.trainer is None else self.trainer.max_epochs or 0
        if rounds > len(self.files):
            raise ValueError(
                f"rounds is {rounds}, but datamodule.path has {len(self.files)} recorded rounds; set rounds="
                f"{len(self.files)} or less, and datamodule.passes_per_round for more than one time through each"
            )
        self._is_renormalised = any(is_renormalised(file) for file in self.files[:rounds])
        has_logprobs, sizes = True, []
        for round_ in range(rounds):
            rollouts = self._read(round_)
            has_logprobs &= all(r.sampling_logprobs is not None for r in rollouts)
            sizes.append(min(Counter((r.round, r.group_id) for r in rollouts).values()))
            self._steps.append(math.ceil(len(rollouts) / self.batch_size) * self.passes_per_round)
            if not self._probe_prompts:
                self._probe_prompts = [
                    EncodedPrompt(Prompt(r.prompt_id, (), r.answer), r.prompt_ids) for r in rollouts[:64]
                ]
        self.group_size = min(sizes)
        self.provides = frozenset({"sampling_logprobs"} if has_logprobs or self.logprobs_from else ())  # type: ignore[misc]
        log.info("%d recorded rounds of %s", rounds, ", ".join(str(f) for f in self.files[:3]))
        if not has_logprobs and self.logprobs_from:
            log.warning("missing log-probs are computed under %s: they are not the sampler's own", self.logprobs_from)

    @property
    def is_renormalised(self) -> bool:
        """Whether a file says that it was sampled with top_p < 1 or top_k > 0."""
        return self._is_renormalised

    def num_steps(self, rounds: int) -> int:
        """Return the optimizer steps of the first rounds."""
        return sum(self._steps[:rounds])

    def collect(self, round_: int) -> list[Rollout]:
        """Return a recorded round, curated."""
        return curate(ranks.from_main(lambda: self._collect(round_)), self.curation)

    def _collect(self, round_: int) -> list[Rollout]:
        rollouts = self._read(round_)
        if self.logprobs_from and any(r.sampling_logprobs is None for r in rollouts):
            with self.clock.measure("scoring"):
                rollouts = self._scored(rollouts)
        return rollouts

    def _read(self, round_: int) -> list[Rollout]:
        return read_recording(self.files[round_], round_, self.codec, self.sampling.temperature)

    @torch.no_grad()
    def _scored(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Give each rollout the named model's log-probs."""
        if self._scorer is None:
            self._scorer = self._make_scorer(self.logprobs_from)  # type: ignore[arg-type]
        scored = []
        counts = {"num_sequences": 1, "num_tokens": 1, "num_positives": 0}
        for r in rollouts:
            if r.sampling_logprobs is not None:
                scored.append(r)
                continue
            batch = collate([r], {(r.round, r.group_id): [r]}, counts)
            logprobs = self._scorer.logprobs(batch)[0].tolist()
            scored.append(replace(r, sampling_logprobs=tuple(logprobs)))
        return scored
