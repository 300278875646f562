"""Lightning's progress bar, speaking of rounds."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class RoundProgressBar(TQDMProgressBar):
    """Show the optimizer steps of the round being trained.

    Args:
        label: what the rounds are called, such as "training round".
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Name the round."""
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(f"{self.label} {trainer.current_epoch + 1}/{trainer.max_epochs}")

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Leave out the logger's version number."""
        return {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}
