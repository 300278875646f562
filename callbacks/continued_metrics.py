"""Loggers of a resumed run go on where the checkpoint was written."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.metrics_csv import MetricsCSV


class ContinuedMetrics(Callback):
    """Put all metrics on the disk before a checkpoint, and take back on resume what was logged after it.

    Runs after the callbacks that log at the end of a round. W&B cannot take rows back: what it was given after the
    checkpoint stands there twice, with the same trainer/global_step.
    """

    def __init__(self) -> None:
        self._trainer: L.Trainer | None = None
        self._files: list[tuple[str, int]] = []  # each CSV logger's file with its rows

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember whose loggers they are."""
        self._trainer = trainer

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the round's metrics on the disk."""
        for logger in trainer.loggers:
            logger.save()
        self._files = [(str(x.path.absolute()), x.num_rows) for x in trainer.loggers if isinstance(x, MetricsCSV)]

    def state_dict(self) -> dict[str, Any]:
        """Return what is on the disk."""
        assert self._trainer is not None
        return {"files": list(self._files), "step": self._trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what was logged after the checkpoint."""
        assert self._trainer is not None
        if not self._trainer.is_global_zero:
            return
        files = list(state_dict["files"])
        for logger in self._trainer.loggers:
            if isinstance(logger, MetricsCSV) and files:
                path, num_rows = files.pop(0)
                logger.start_from(self._moved(Path(path)), num_rows)
            if isinstance(logger, TensorBoardLogger):
                _forget_from(logger, state_dict["step"] + 1)

    def _moved(self, path: Path) -> Path:
        assert self._trainer is not None
        if self._trainer.ckpt_path:
            beside = Path(self._trainer.ckpt_path).resolve().parent.parent / path.name
            if beside.is_file():  # also where the run was copied or moved to
                return beside
        return path


def _forget_from(logger: TensorBoardLogger, step: int) -> None:
    """Have TensorBoard leave out what earlier files say of this step and later ones."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    logger.experiment._get_file_writer().add_event(Event(step=step, session_log=start))
