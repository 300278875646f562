"""A run that goes on is the same experiment: what makes another of it is refused by its keys."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from conf.resume import changed_keys, check_same_experiment
from train import train

SmallRun = Callable[..., DictConfig]


def test_what_makes_another_experiment_is_refused_by_its_keys_unless_allowed(
    small_run: SmallRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(small_run("rounds=1"))
    harmless = ["rounds=2", "resume=true", "trainer.log_every_n_steps=7", "logger=csv"]
    with pytest.raises(ValueError, match=r"other values of seed, lag, objective\.topr\.baseline, so this would be"):
        train(small_run(*harmless, "seed=1", "lag=2", "objective.topr.baseline=0.1"))
    train(small_run(*harmless, "lag=2", "allow_config_change=true"))
    assert "changed on resume: lag was 1 and is 2" in caplog.messages
    assert "changed on resume: trainer.log_every_n_steps was 1 and is 7" in caplog.messages
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["lag"] == 2


@pytest.mark.parametrize("key", ["datamodule.lag=2", "datamodule.seed=3"])
def test_a_copy_that_was_set_by_itself_is_a_change(key: str, small_run: SmallRun) -> None:
    train(small_run("rounds=1"))
    with pytest.raises(ValueError, match=f"other values of {key.partition('=')[0]}, so"):
        train(small_run("rounds=2", "resume=true", key))


def test_another_precision_of_the_shards_is_another_experiment() -> None:
    before, after = ({"trainer": {"strategy": {"param_dtype": d}}} for d in ("float32", "bfloat16"))
    assert changed_keys({"trainer": {"strategy": "ddp"}}, before).keys() == {"trainer.strategy"}
    with pytest.raises(ValueError, match=r"other values of trainer\.strategy\.param_dtype"):
        check_same_experiment(before, {**after, "allow_config_change": False})


def test_another_verifier_is_another_experiment(small_run: SmallRun) -> None:
    train(small_run("rounds=1"))
    with pytest.raises(ValueError, match=r"other values of verifier\._target_, so"):
        train(small_run("rounds=2", "resume=true", "verifier=exact"))
    other = "callbacks.verifier_scoring.verifier={_target_: callbacks.verifiers.exact.Exact}"
    with pytest.raises(ValueError, match=r"other values of callbacks\.verifier_scoring\.verifier"):
        train(small_run("rounds=2", "resume=true", other))


def test_more_rounds_are_another_experiment_only_under_a_schedule_that_counts_them() -> None:
    for schedule, is_refused in (("get_constant_schedule", False), ("get_linear_schedule_with_warmup", True)):
        before = {"rounds": 3, "scheduler": {"_target_": schedule}, "allow_config_change": False}
        if is_refused:
            with pytest.raises(ValueError, match="rounds"):
                check_same_experiment(before, {**before, "rounds": 5})
        else:
            check_same_experiment(before, {**before, "rounds": 5})


def test_changes_are_found_in_nested_keys_and_new_ones() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "d": None, "gone": 3}
    after = {"a": {"b": 2, "c": [1, 2]}, "d": None, "new": {}}
    assert changed_keys(before, after) == {"a.b": (1, 2), "gone": (3, None), "new": (None, {})}
