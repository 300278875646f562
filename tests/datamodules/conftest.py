"""Values that the tests of the data's way share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.types import Prompt

ROOT = Path(__file__).parents[2]


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
