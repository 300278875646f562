"""What the README says of the quickstart and of the collapse, on the real task; each run takes minutes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from train import train

ENGINES = ["transformers", "vllm"]


@pytest.fixture
def accuracies(compose: Callable[..., DictConfig], tmp_path: Path) -> Callable[..., tuple[float, float]]:
    """Return a function that runs an experiment and returns the held-out accuracy before and after."""

    def run(experiment: str, *overrides: str) -> tuple[float, float]:
        train(compose(f"experiment={experiment}", *overrides))
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        return summary["accuracy_before"], summary["accuracy_after"]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("objective", ["topr", "asymre", "oapl"])
def test_the_three_objectives_leave_at_most_six_tenths_of_the_error(
    objective: str, engine: str, accuracies: Callable[..., tuple[float, float]]
) -> None:
    pytest.importorskip(engine)
    before, after = accuracies("quickstart", f"objective={objective}", f"engine={engine}")
    assert 0.4 < before < 0.6
    assert 1.0 - after <= 0.6 * (1.0 - before)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("objective", ["grpo", "positives_only"])
def test_the_baselines_learn(objective: str, engine: str, accuracies: Callable[..., tuple[float, float]]) -> None:
    pytest.importorskip(engine)
    before, after = accuracies("quickstart", f"objective={objective}", f"engine={engine}")
    assert after > before + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["objective=reinforce"], ["objective=asymre", "objective.asymre.delta_v=0.1"]])
def test_long_lag_collapses_what_nothing_protects(
    overrides: list[str], accuracies: Callable[..., tuple[float, float]]
) -> None:
    _, after = accuracies("collapse", "engine=transformers", *overrides)
    assert after < 0.1


@pytest.mark.slow
def test_topr_holds_under_the_same_lag(accuracies: Callable[..., tuple[float, float]]) -> None:
    before, after = accuracies("collapse", "engine=transformers", "objective=topr")
    assert after > before + 0.1
