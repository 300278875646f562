"""Worked examples as experience: supervised learning by the same loop as reinforcement learning."""

import logging
from typing import Any

from datamodules.counts import check_at_least, check_batch_size
from datamodules.experience import ExperienceDataModule
from datamodules.prompt_order import PromptOrder
from datamodules.types import EncodedPrompt, Rollout, Verdict

log = logging.getLogger(__name__)


class DemonstrationDataModule(ExperienceDataModule):
    """Serve the demonstrations of the training prompts; the engine only measures on held-out prompts.

    Args:
        prompts_per_round: demonstrations of a round.
        settings: what every DataModule takes.
    """

    group_size = 1

    def __init__(self, *, prompts_per_round: int, **settings: Any) -> None:
        super().__init__(**settings)
        check_at_least(1, prompts_per_round=prompts_per_round)
        check_batch_size(self.batch_size, prompts_per_round)
        self.prompts_per_round = prompts_per_round
        self.steps_per_round = prompts_per_round // self.batch_size * self.passes_per_round

    def collect(self, round_: int) -> list[Rollout]:
        """Return the demonstrations of a round's prompts."""
        return [self._rollout(round_, i, encoded) for i, encoded in enumerate(self.order.of_round(round_))]

    def setup(self, stage: str) -> None:
        """Encode the prompts and check that each has a demonstration that fits.

        Raises:
            ValueError: a prompt has no demonstration, or too few fit.
        """
        super().setup(stage)
        without = [e.prompt.id for e in self.train_prompts if e.prompt.demonstration is None]
        if without:
            raise ValueError(
                f"{len(without)} training prompts have no demonstration, the first is {without[0]!r}; "
                "choose prompts with worked solutions for datamodule=demonstrations"
            )
        room = self.codec.window
        fitting = [e for e in self.train_prompts if len(e.token_ids) + len(self._completion(e)) <= room]
        if len(fitting) < len(self.train_prompts):
            log.warning(
                "left out %d of %d demonstrations that do not fit the window of %d tokens with their prompt",
                len(self.train_prompts) - len(fitting), len(self.train_prompts), room,
            )  # fmt: skip
        self.train_prompts = fitting
        self.order = PromptOrder(fitting, self.prompts_per_round, self.seed)

    def _completion(self, encoded: EncodedPrompt) -> tuple[int, ...]:
        return self.codec.encode_completion(encoded.prompt.demonstration or "")

    def _rollout(self, round_: int, group_id: int, encoded: EncodedPrompt) -> Rollout:
        return Rollout(
            prompt_id=encoded.prompt.id,
            group_id=group_id,
            sibling=0,
            prompt_text=encoded.prompt.messages[-1]["content"],
            answer=encoded.prompt.answer,
            prompt_ids=encoded.token_ids,
            completion_ids=self._completion(encoded),
            sampling_logprobs=None,
            text=encoded.prompt.demonstration or "",
            finish_reason="stop",
            temperature=self.sampling.temperature,
            seed=0,
            round=round_,
            snapshot=round_,
            snapshot_step=0,
            verdict=Verdict("correct", 1.0, detail="demonstration"),
        )
