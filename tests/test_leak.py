"""A long run takes no more memory in its last rounds than in its early ones."""

from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from train import train

MIB = 2**20


class Memory(L.Callback):
    """Note the resident memory after each round."""

    rounds: ClassVar[list[float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.rounds.append(psutil.Process().memory_info().rss / MIB)


@pytest.mark.slow
def test_fifty_rounds_of_the_quickstart_end_with_the_memory_of_the_tenth(compose: Callable[..., DictConfig]) -> None:
    cfg = compose(
        "experiment=quickstart", "engine=transformers", "rounds=50", "callbacks.held_out_evaluation.every_n_rounds=10"
    )
    OmegaConf.set_struct(cfg, False)
    cfg.callbacks.memory = {"_target_": f"{__name__}.Memory"}
    train(cfg)
    early, late = max(Memory.rounds[5:15]), max(Memory.rounds[40:])
    assert late < early + 20.0, [round(m) for m in Memory.rounds]
