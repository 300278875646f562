"""Log each round's metrics and a table of sample completions to every logger of the run."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from callbacks.rollout_metrics import rollout_metrics
from datamodules.atomic import atomic_file
from datamodules.types import Rollout

COLUMNS = ("round", "snapshot", "prompt", "completion", "answer", "verdict", "reward", "num_tokens", "finish_reason")


class RolloutLogging(Callback):
    """Write `rollout/...` metrics, and some completions as `samples/round-000012.csv`, TensorBoard text, W&B table.

    Args:
        directory: of the run; samples go below it.
        num_samples: completions shown of each round, spread over its groups.
    """

    def __init__(self, directory: str, num_samples: int) -> None:
        if num_samples < 0:
            raise ValueError(f"callbacks.rollout_logging.num_samples must be at least 0, got {num_samples}")
        self.directory = Path(directory) / "samples"
        self.num_samples = num_samples
        self.shown: list[list[Any]] = []  # W&B shows the last table of a key only, so it holds all rounds

    def on_round_collected(self, trainer: L.Trainer, rollouts: Sequence[Rollout]) -> None:
        """Log the round that is about to be trained."""
        metrics = {k: v for k, v in rollout_metrics(rollouts).items() if math.isfinite(v)}
        metrics["rollout/round"] = float(rollouts[0].round)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        if self.num_samples:
            count = min(self.num_samples, len(rollouts))
            self._log_samples(trainer, [rollouts[i * len(rollouts) // count] for i in range(count)])

    def _log_samples(self, trainer: L.Trainer, samples: Sequence[Rollout]) -> None:
        rows = [_row(rollout) for rollout in samples]
        self.shown.extend(rows)
        if not trainer.is_global_zero:
            return
        with (
            atomic_file(self.directory / f"round-{samples[0].round:06d}.csv") as path,
            path.open("w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file).writerows([COLUMNS, *rows])
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("rollout/samples", _markdown(rows), trainer.global_step)
            if isinstance(logger, WandbLogger):
                logger.log_table("rollout/samples", columns=list(COLUMNS), data=self.shown, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples shown so far."""
        return {"shown": self.shown}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the samples of the rounds before the checkpoint."""
        self.shown = list(state_dict["shown"])


def _row(rollout: Rollout) -> list[Any]:
    status = rollout.verdict.status if rollout.verdict else ""
    return [
        rollout.round,
        rollout.snapshot,
        rollout.prompt_text,
        rollout.text,
        rollout.answer,
        status,
        rollout.reward,
        len(rollout.completion_ids),
        rollout.finish_reason,
    ]


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"|{'|'.join(line)}|" for line in cells)
