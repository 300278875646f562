"""A directory is claimed for a run that goes on, or for one that begins again."""

from pathlib import Path

import pytest

from datamodules.run_directory import RunDirectory


def left_by_a_run(path: Path) -> Path:
    for name in ("snapshots/000000/model.safetensors", "tensorboard/events", "rollouts/round-000000.parquet"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    return path


def test_a_run_without_a_checkpoint_begins_with_new_weights_and_metrics_and_keeps_its_rollouts(tmp_path: Path) -> None:
    RunDirectory(left_by_a_run(tmp_path)).claim(is_resumed=True, from_start=True)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "rollouts"}


def test_a_run_with_a_checkpoint_keeps_everything(tmp_path: Path) -> None:
    RunDirectory(left_by_a_run(tmp_path)).claim(is_resumed=True)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "rollouts", "snapshots", "tensorboard"}


def test_a_directory_that_holds_a_run_or_has_one_at_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already holds a run"):
        RunDirectory(left_by_a_run(tmp_path / "old")).claim(is_resumed=False)
    first = RunDirectory(tmp_path / "new")
    first.claim(is_resumed=False)
    with pytest.raises(ValueError, match="another run is at work"):
        RunDirectory(tmp_path / "new").claim(is_resumed=True)
    first.release()
    second = RunDirectory(tmp_path / "new")
    second.claim(is_resumed=True)
    with pytest.raises(ValueError, match="another run is at work"):
        first.claim(is_resumed=True)
