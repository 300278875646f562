"""End a run with its result: a table, `summary.json` and a picture of the learning curve."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from callbacks.held_out_evaluation import HeldOutEvaluation
from callbacks.learning_curve import draw_learning_curve
from datamodules.atomic import atomic_file
from datamodules.ranks import from_main

log = logging.getLogger(__name__)


class RunSummary(Callback):
    """Write what a run came to, and print it.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.rewards: dict[int, float] = {}

    def on_round_collected(self, trainer: L.Trainer, rollouts: Any) -> None:
        """Keep the round's mean reward."""
        scores = [r.reward for r in rollouts if r.reward is not None]
        if scores:
            self.rewards[rollouts[0].round] = sum(scores) / len(scores)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Say how to go on."""
        newest = max((self.directory / "checkpoints").glob("round-*.ckpt"), default=None)
        last = (
            f"its newest checkpoint is {newest.stem}"
            if newest
            else "it has no checkpoint yet, only rounds that it sampled"
        )
        log.info("the run stopped; %s; to go on: resume=true hydra.run.dir=%s", last, self.directory)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write and print the summary."""
        from_main(lambda: self._write(trainer, pl_module))

    def _write(self, trainer: L.Trainer, pl_module: Any) -> None:
        summary = self._summary(trainer, pl_module)
        with atomic_file(self.directory / "summary.json") as path:
            path.write_text(json.dumps(summary, indent=2) + "\n")
        with atomic_file(self.directory / "learning_curve.png") as path:
            title = f"{summary['objective']}, lag {summary['lag']}"
            draw_learning_curve(path, rewards=self.rewards, accuracies=self._accuracies(trainer), title=title)
        self._print(summary)

    def _summary(self, trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        accuracies = self._accuracies(trainer)
        rewards = [self.rewards[r] for r in sorted(self.rewards)]
        return {
            "objective": "+".join(name for name, _ in pl_module.heads()),
            "engine": data.engine.name,
            "lag": data.lag,
            "seed": data.seed,
            "rounds": trainer.current_epoch,
            "optimizer_steps": trainer.global_step,
            "accuracy_before": accuracies[min(accuracies)] if accuracies else None,
            "accuracy_after": accuracies[max(accuracies)] if accuracies else None,
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "seconds": {phase: round(seconds, 2) for phase, seconds in data.clock.seconds.items()},
        }

    @staticmethod
    def _accuracies(trainer: L.Trainer) -> dict[int, float]:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, HeldOutEvaluation):
                return callback.accuracies
        return {}

    def _print(self, summary: dict[str, Any]) -> None:
        table = Table(title="Run summary", show_header=False)
        for key, value in summary.items():
            if key == "seconds":
                value = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in value.items())
            table.add_row(key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
        table.add_row("everything", str(self.directory.absolute()))
        Console().print(table)

    def state_dict(self) -> dict[str, Any]:
        """Return the rewards so far."""
        return {"rewards": dict(self.rewards)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rewards of the rounds before the checkpoint."""
        self.rewards = dict(state_dict["rewards"])
