"""Heads as their config files build them; every file in conf/objective is a case of the battery."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import conf
from modules.objectives.objective import Objective

DIRECTORY = Path(conf.__file__).parent / "objective"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "topr-token": ("topr", {"ratio": "token"}),
    "topr-geometric": ("topr", {"ratio": "geometric"}),
    "topr-baseline": ("topr", {"baseline": 0.2}),
    "asymre-mean": ("asymre", {"aggregation": "sequence_mean"}),
    "oapl-normalized": ("oapl", {"scale": "normalized"}),
    "reinforce-group_mean": ("reinforce", {"baseline": "group_mean"}),
    "reinforce-leave_one_out": ("reinforce", {"baseline": "leave_one_out"}),
    "grpo-no_std": ("grpo", {"normalize_std": False}),
    "grpo-token_mean": ("grpo", {"aggregation": "token_mean"}),
    "grpo-sequence_sum": ("grpo", {"aggregation": "sequence_sum"}),
    "grpo-sequence_sum_norm": ("grpo", {"aggregation": "sequence_sum_norm"}),
}
CASES = [*sorted(path.stem for path in DIRECTORY.glob("*.yaml")), *VARIANTS]


@cache
def _settings(stem: str) -> DictConfig:
    """Return the head's settings of conf/objective/<stem>.yaml, in a run whose longest completion has 16 tokens."""
    root = OmegaConf.create(
        {"datamodule": {"sampling": {"max_tokens": 16}}, "objective": OmegaConf.load(DIRECTORY / f"{stem}.yaml")}
    )
    OmegaConf.resolve(root)
    return root.objective[stem]


def _make_head(stem: str, **overrides: Any) -> Objective:
    return instantiate(_settings(stem), **overrides)


@pytest.fixture
def make_head() -> Callable[..., Objective]:
    """Build a head from its YAML, with overrides."""
    return _make_head


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    """Name an objective, or `<objective>-<variant>`."""
    return request.param


@pytest.fixture
def head(case: str) -> Objective:
    """Build the case's head."""
    stem, overrides = VARIANTS.get(case, (case, {}))
    return _make_head(stem, **overrides)
