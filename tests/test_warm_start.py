"""The warm start: made once, made again for another config, and never at the price of someone's run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig
from runs import torchrun

from train import train, warm_start

Compose = Callable[..., DictConfig]
SIZES = (
    "num_threads=1",
    "prompts.digits=1",
    "prompts.num_train=40",
    "prompts.num_held_out=4",
    "warm_start.policy.hidden_size=64",
    "warm_start.policy.num_layers=1",
    "warm_start.policy.num_heads=2",
    "warm_start.datamodule.prompts_per_round=32",
    "warm_start.datamodule.batch_size=32",
    "warm_start.trainer.max_epochs=1",
    "warm_start.callbacks.stop.stopping_threshold=0.0",
)
RUN = (
    "rounds=1",
    "datamodule.prompts_per_round=4",
    "datamodule.group_size=2",
    "datamodule.batch_size=8",
    "datamodule.sampling.max_tokens=4",
    "policy=hf",
    "policy.path=${warm_start.directory}/model",
    "engine=transformers",
)


@pytest.fixture
def small(compose: Compose, tmp_path: Path) -> Callable[..., DictConfig]:
    """Return a composer of warm starts that take seconds and are content with any accuracy."""

    def compose_(*overrides: str) -> DictConfig:
        directory = f"warm_start.directory={tmp_path / 'warm' / 'start'}"
        return compose("warm_start=arithmetic", directory, *SIZES, *overrides)

    return compose_


def test_a_run_starts_from_the_warm_starts_model(small: Callable[..., DictConfig], tmp_path: Path) -> None:
    train(small(*RUN))
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "warm" / "start" / "done.yaml").is_file()


def test_it_is_kept_for_the_same_config_and_made_again_for_another(
    small: Callable[..., DictConfig], tmp_path: Path
) -> None:
    weights = tmp_path / "warm" / "start" / "model" / "model.safetensors"
    warm_start(small().warm_start)
    first, when = weights.read_bytes(), weights.stat().st_mtime_ns
    warm_start(small().warm_start)
    assert weights.stat().st_mtime_ns == when
    warm_start(small("warm_start.seed=1").warm_start)
    assert weights.read_bytes() != first


def test_one_that_failed_leaves_the_last_good_one_where_it_is(small: Callable[..., DictConfig], tmp_path: Path) -> None:
    warm_start(small().warm_start)
    weights = tmp_path / "warm" / "start" / "model" / "model.safetensors"
    first = weights.read_bytes()
    with pytest.raises(RuntimeError, match="short of its stopping_threshold"):
        warm_start(small("warm_start.seed=1", "warm_start.callbacks.stop.stopping_threshold=1.0").warm_start)
    assert weights.read_bytes() == first
    warm_start(small("warm_start.seed=1").warm_start)  # what the failed one left is no obstacle
    assert weights.read_bytes() != first


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(
    small: Callable[..., DictConfig], tmp_path: Path
) -> None:
    run = tmp_path / "warm" / "start"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ValueError, match=r"warm_start\.directory: .* was not made by a warm start"):
        warm_start(small().warm_start)
    assert (run / "config.yaml").is_file()


def test_one_that_falls_short_of_its_threshold_ends_the_program(small: Callable[..., DictConfig]) -> None:
    with pytest.raises(RuntimeError, match="short of its stopping_threshold"):
        warm_start(small("warm_start.callbacks.stop.stopping_threshold=1.0").warm_start)


def test_a_bad_setting_of_the_run_is_refused_before_the_warm_start(
    small: Callable[..., DictConfig], tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"datamodule\.lag"):
        train(small("lag=-1"))
    assert not (tmp_path / "warm").exists()


def test_several_processes_have_it_made_by_one(small: Callable[..., DictConfig], tmp_path: Path) -> None:
    start = small().warm_start
    torchrun(
        2, "trainer=ddp", "warm_start=arithmetic", f"warm_start.directory={start.directory}", *SIZES, *RUN,
        f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (Path(start.directory) / "done.yaml").is_file()
