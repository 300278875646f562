"""Distributions for the loggers that show them: the age of what is trained, and the length of samples."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from datamodules.ranks import gather
from datamodules.types import OptimizerStep, Rollout


class Histograms(Callback):
    """Log the lag in optimizer steps of each trained sample, and lengths, to TensorBoard and W&B."""

    def __init__(self) -> None:
        self._lags: list[int] = []

    def on_round_collected(self, trainer: L.Trainer, rollouts: Sequence[Rollout]) -> None:
        """Show the lengths of a round before and after curation: they differ where it favours short or long ones."""
        log_histogram(trainer, "rollout/length_sampled", [len(r.completion_ids) for r in rollouts if r.has_score])
        log_histogram(trainer, "rollout/length_trained", [len(r.completion_ids) for r in rollouts if r.is_trainable])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: OptimizerStep, batch_idx: int
    ) -> None:
        """Keep the lags of an optimizer step, and show them as often as other metrics."""
        before = trainer.global_step - 1
        self._lags += [before - int(s) for part in batch.micro_batches for s in part.snapshot_step.tolist()]
        if trainer.global_step % trainer.log_every_n_steps == 0 or trainer.is_last_batch:  # type: ignore[attr-defined]
            copies = trainer.world_size // pl_module.num_shares  # type: ignore[operator]  # neighbours with the same samples
            ranks = gather(self._lags)[::copies]
            log_histogram(trainer, "train/lag_steps", [lag for of_rank in ranks for lag in of_rank])
            self._lags.clear()


def log_histogram(trainer: L.Trainer, name: str, values: Sequence[int]) -> None:
    """Log whole numbers as TensorBoard's histogram and as W&B's table of counts."""
    if not values or not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(name, torch.tensor(values), trainer.global_step)
        if isinstance(logger, WandbLogger):
            counts = [list(pair) for pair in sorted(Counter(values).items())]
            logger.log_table(f"{name}_histogram", columns=["value", "count"], data=counts, step=trainer.global_step)
