"""A run whose time is nearly up ends after a round, unless that was the last one."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.preemption import Preemption
from datamodules.ranks import AGAIN


def trainer(epoch: int) -> Any:
    return SimpleNamespace(current_epoch=epoch, max_epochs=3, is_global_zero=True)


def test_a_warned_run_asks_to_be_started_again_only_while_rounds_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AGAIN, str(tmp_path / "again"))
    nothing: Any = None
    before = signal.getsignal(signal.SIGUSR1)
    preemption = Preemption("SIGUSR1")
    preemption.setup(nothing, nothing, "fit")
    preemption.on_train_epoch_end(trainer(0), None)  # not warned
    os.kill(os.getpid(), signal.SIGUSR1)
    preemption.on_train_epoch_end(trainer(2), None)  # the last round
    assert not (tmp_path / "again").exists()
    with pytest.raises(SystemExit, match="75"):
        preemption.on_train_epoch_end(trainer(1), None)
    assert (tmp_path / "again").exists()
    preemption.teardown(nothing, nothing, "fit")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_is_no_signal_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"preemption\.signal_name must be the name of a signal, got 'USR9'"):
        Preemption("USR9")
