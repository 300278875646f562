"""End a run in good order when its time is nearly up, so that it goes on where it was."""

import logging
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from datamodules.ranks import AGAIN, AGREED_END, gather

log = logging.getLogger(__name__)


class Preemption(Checkpoint):
    """End all ranks with status 75 after the round in which one of them was sent a signal.

    It is a `Checkpoint` only so that Lightning calls it after those that write the round's checkpoint, if it stands
    after them in the config. A run that is killed before the round ends goes on from the checkpoint before.

    Args:
        signal_name: Slurm's `--signal=USR1@300` sends it five minutes before the time limit, and where the cluster has
            `PreemptParameters=send_user_signal` at a preemption.
    """

    def __init__(self, signal_name: str) -> None:
        self._signal = _signal_number(signal_name)
        self._is_warned = False
        self._before: Any = signal.SIG_DFL

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen."""
        self._before = signal.signal(self._signal, self._warn)

    def _warn(self, number: int, frame: FrameType | None) -> None:
        self._is_warned = True
        log.warning("%s: the run ends after this round, to be started again", self._signal.name)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """End the run if a rank was warned and rounds are left."""
        if any(gather(self._is_warned)) and trainer.current_epoch + 1 < (trainer.max_epochs or 0):
            if trainer.is_global_zero and AGAIN in os.environ:
                Path(os.environ[AGAIN]).touch()
            raise SystemExit(AGREED_END)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the signal to others."""
        signal.signal(self._signal, self._before)


def _signal_number(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError as error:
        raise ValueError(f"callbacks.preemption.signal_name must be the name of a signal, got {name!r}") from error
