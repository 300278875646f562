"""A checkpoint is whole or not there, and what interrupts its writing is told as it is."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

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


@pytest.mark.parametrize("end", [SystemExit(143), KeyboardInterrupt()], ids=repr)
def test_the_checkpoint_before_stays_until_there_is_a_whole_new_one(
    end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any, file: Any) -> None:
        file.write(b"half")
        raise end

    (tmp_path / "a.ckpt").write_bytes(b"old")
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(type(end)):
        AtomicCheckpoints().save_checkpoint({}, tmp_path / "a.ckpt")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_runs_write_their_checkpoints_so(compose: Callable[..., DictConfig]) -> None:
    assert isinstance(instantiate(compose().trainer).strategy.checkpoint_io, AtomicCheckpoints)
