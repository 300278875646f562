"""Values that the tests of the data's way share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules.types import Prompt, Rollout, Verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """Return a maker of judged rollouts; `score=None` makes one that failed in judging."""

    def make(group_id: int = 0, sibling: int = 0, *, score: float | None = 1.0, **changes: Any) -> Rollout:
        values: dict[str, Any] = {
            "prompt_id": f"p{group_id}",
            "group_id": group_id,
            "sibling": sibling,
            "prompt_text": "2+2=",
            "answer": "4",
            "prompt_ids": (7, 8, 9),
            "completion_ids": (4, 2),
            "sampling_logprobs": (-0.5, -0.25),
            "text": "4",
            "finish_reason": "stop",
            "temperature": 1.0,
            "seed": 11,
            "round": 3,
            "snapshot": 1,
            "snapshot_step": 20,
            "verdict": Verdict("error" if score is None else "correct" if score > 0.5 else "incorrect", score),
        }
        return Rollout(**values | changes)

    return make


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., Prompt]:
    """Return a maker of one-question prompts."""

    def make(text: str, id_: str = "p") -> Prompt:
        return Prompt(id_, ({"role": "user", "content": text},), "4")

    return make


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return a runner of a script in its own process, from the repository root."""

    def run(script: str, *arguments: str | Path, prefix: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / "script.py"
        path.write_text(script)
        return subprocess.run(
            [*prefix, sys.executable, str(path), *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run
