"""Measure sampled accuracy on the held-out prompts, before training and every few rounds."""

import logging
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)


class HeldOutEvaluation(Callback):
    """Sample each held-out prompt from the newest weights and log the share of correct completions.

    The seeds are the same every time, so two evaluations differ by the weights alone. Completions without a score are
    left out of the share, and counted. Runs after `WeightSync`, whose snapshot it samples from.

    Args:
        every_n_rounds: rounds between evaluations; the last round is always evaluated.
        samples_per_prompt: completions of each held-out prompt.
    """

    def __init__(self, every_n_rounds: int, samples_per_prompt: int) -> None:
        if every_n_rounds < 1 or samples_per_prompt < 1:
            raise ValueError(
                "callbacks.held_out_evaluation.every_n_rounds and samples_per_prompt must be at least 1, "
                f"got {every_n_rounds} and {samples_per_prompt}"
            )
        self.every_n_rounds = every_n_rounds
        self.samples_per_prompt = samples_per_prompt
        self.accuracies: dict[int, float] = {}  # by rounds of training seen

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the initial weights, unless a checkpoint brought that figure."""
        if trainer.current_epoch == 0 and 0 not in self.accuracies:
            self._evaluate(trainer, 0)
            for logger in trainer.loggers:
                logger.log_metrics({"eval/accuracy": self.accuracies[0]}, step=0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the weights that were just published."""
        version = trainer.current_epoch + 1
        if not trainer.datamodule.trains:  # type: ignore[attr-defined]
            return
        if version % self.every_n_rounds == 0 or version == trainer.max_epochs:
            accuracy = self._evaluate(trainer, version)
            pl_module.log("eval/accuracy", accuracy, prog_bar=True, logger=False)  # for checkpoints and the bar
            for logger in trainer.loggers:  # now, not after the checkpoint: what a checkpoint follows is on record
                logger.log_metrics({"eval/accuracy": accuracy}, step=trainer.global_step)

    def _evaluate(self, trainer: L.Trainer, version: int) -> float:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.ensure_snapshot(version)
        rollouts = data.evaluate(version, samples_per_prompt=self.samples_per_prompt)
        scores = [r.reward for r in rollouts if r.reward is not None]
        if len(scores) < len(rollouts):
            log.warning("%d of %d held-out completions got no score", len(rollouts) - len(scores), len(rollouts))
        if not scores:
            raise RuntimeError(f"none of the {len(rollouts)} held-out completions got a score (see the log)")
        self.accuracies[version] = sum(scores) / len(scores)
        log.info("held-out accuracy after %d rounds: %.3f", version, self.accuracies[version])
        return self.accuracies[version]

    def state_dict(self) -> dict[str, Any]:
        """Return the accuracies so far."""
        return {"accuracies": dict(self.accuracies)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the accuracies of the rounds before the checkpoint."""
        self.accuracies = dict(state_dict["accuracies"])
