"""Where the seconds of each round went, and how much of the sampling cost none."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class RoundSeconds(Callback):
    """Time the training, and log the seconds of each phase at the end of a round.

    With prefetch, sampling and scoring run beside the training: `waiting` is what training still waited for them, and
    `overlapped_share` what part of them cost nothing.
    """

    def __init__(self) -> None:
        self._start = 0.0
        self._logged: dict[str, float] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the training phase's watch."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Add the optimizer step to the training phase."""
        now = time.perf_counter()
        trainer.datamodule.clock.add("training", now - self._start)  # type: ignore[attr-defined]
        self._start = now

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the round's seconds."""
        seconds = dict(trainer.datamodule.clock.seconds)  # type: ignore[attr-defined]
        spent = {phase: total - self._logged.get(phase, 0.0) for phase, total in seconds.items()}
        self._logged = seconds
        values = {f"seconds/{phase}": value for phase, value in spent.items()}
        made = spent.get("sampling", 0.0) + spent.get("scoring", 0.0)
        if "waiting" in spent and made > 0.0:
            values["seconds/overlapped_share"] = max(0.0, 1.0 - spent["waiting"] / made)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds that were logged."""
        return {"logged": dict(self._logged)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the seconds that were logged."""
        self._logged = dict(state_dict["logged"])
