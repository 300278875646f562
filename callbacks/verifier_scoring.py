"""Score rollouts with a verifier; what could not be scored says why."""

import time
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from callbacks.verifiers.verifier import Verifier
from datamodules.types import Rollout, Verdict


class VerifierScoring(Callback):
    """Give each rollout its verdict through the DataModule's `on_rollouts` hook.

    A verifier that raises gives the verdict `error`: no score, out of the baseline, counted by the DataModule.

    Args:
        verifier: judges one completion against one answer.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Have the verifier look at every reference before anything is sampled.

        Raises:
            ValueError: it cannot compare with some of them.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        prompts = [encoded.prompt for encoded in (*data.train_prompts, *data.held_out_prompts)]
        reasons = {answer: self._refusal(answer) for answer in {prompt.answer for prompt in prompts}}
        faults = [f"{prompt.id}: {reasons[prompt.answer]}" for prompt in prompts if reasons[prompt.answer] is not None]
        if faults:
            raise ValueError(
                f"verifier: {type(self.verifier).__name__} cannot judge {len(faults)} of the prompts: "
                f"{'; '.join(faults[:3])}. Choose another verifier, or mend the answers"
            )

    def _refusal(self, answer: str) -> str | None:
        """Return why the verifier cannot compare with an answer, None when it can."""
        try:
            self.verifier.check_answer(answer)
        except ValueError as error:
            return str(error)
        return None

    def on_rollouts(self, trainer: L.Trainer, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with verdicts, in the same order."""
        return [rollout.judged(self._verdict(rollout)) for rollout in rollouts]

    def _verdict(self, rollout: Rollout) -> Verdict:
        if rollout.finish_reason == "error":
            return Verdict("error", None, detail=f"sampling failed: {rollout.failure}")
        start = time.perf_counter()
        try:
            verdict = _checked(self.verifier(rollout.text, rollout.answer))
        except Exception as error:  # a verifier is foreign code: whatever it raises is this sample's error
            verdict = Verdict("error", None, detail=f"{type(error).__name__}: {error}")
        return Verdict(verdict.status, verdict.score, time.perf_counter() - start, verdict.detail)


def _checked(verdict: Verdict) -> Verdict:
    """Return a verdict whose score is one, or an error's without score.

    Raises:
        ValueError: the verifier returned something else.
    """
    if not isinstance(verdict, Verdict):
        raise ValueError(f"the verifier returned {verdict!r}, expected a Verdict")
    if verdict.status == "error":
        return Verdict("error", None, detail=verdict.detail)
    if verdict.score is None or not 0.0 <= verdict.score <= 1.0:
        raise ValueError(f"the verifier scored {verdict.score}, expected a number in [0, 1]")
    return verdict
