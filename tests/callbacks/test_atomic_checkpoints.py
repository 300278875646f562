"""A checkpoint is whole or not there, and what interrupts its writing is told as it is."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.atomic_checkpoints import AtomicCheckpoints


class Interrupted(io.BytesIO):
    """A file whose third write meets a signal."""

    writes = 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 3:
            raise SystemExit(143)
        return super().write(data)


def test_a_signal_while_a_checkpoint_is_written_ends_the_program_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", lambda *_: Interrupted())
    with pytest.raises(SystemExit, match="143"):
        AtomicCheckpoints().save_checkpoint({"weights": torch.ones(1000)}, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())
