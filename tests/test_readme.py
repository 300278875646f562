"""Every command of the README runs as written, on a tiny task."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modules.policy import Policy

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
TRAIN = [c for c in COMMANDS if "train.py" in c]
MAKE = [c for c in COMMANDS if c.startswith("make ")]


def test_every_command_is_one_that_this_file_runs() -> None:
    others = ["source .venv/bin/activate"]
    assert [c for c in COMMANDS if c not in TRAIN + MAKE + others] == []


@pytest.mark.parametrize("command", MAKE)
def test_each_make_target_exists(command: str) -> None:
    dry = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr


@pytest.fixture
def model(make_policy: Callable[..., Policy], tmp_path: Path) -> Path:
    """Return the directory of a tiny model, for commands that start from one."""
    make_policy().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("command", TRAIN)
def test_each_train_command_runs(command: str, tmp_path: Path, model: Path) -> None:
    words = command.split()
    environment = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = words[words.index("train.py") + 1 :]
    if any("ckpt_path=" in a for a in arguments):
        _run(["experiment=quickstart", *_small(model), "rounds=1", "hydra.run.dir=outputs/DATE/TIME"], tmp_path, {})
        arguments = ["rounds=2" if a.startswith("rounds=") else a for a in arguments]
    else:
        arguments.append("rounds=1")
    _run([*(_filled(a, tmp_path, model) for a in arguments), *_small(model)], tmp_path, environment)
    jobs = 1 if "-m" not in arguments else 9 if "seed=0,1,2" in arguments else 2
    assert len(list(tmp_path.glob("*/run/**/summary.json"))) == jobs


def _run(arguments: list[str], directory: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=directory,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "RUN_ID": "run"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def _small(model: Path) -> list[str]:
    """Return what cuts a command down to seconds."""
    return [
        "engine=transformers",
        "warm_start=none",
        f"policy.path={model}",
        "datamodule.prompts_per_round=4",
        "datamodule.group_size=2",
        "datamodule.batch_size=8",
        "datamodule.sampling.max_tokens=4",
    ]


def _filled(argument: str, directory: Path, model: Path) -> str:
    """Return an argument with tiny files where the README names the reader's own."""
    key, _, value = argument.partition("=")
    if key == "policy.path":
        return f"{key}={model}"
    if value == "my.jsonl":
        lines = [f'{{"prompt": "say {i}", "label": "{i}"}}' for i in range(20)]
        (directory / value).write_text("\n".join(lines))
    if value == "path/to/gsm8k":
        folder = directory / value
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            lines = [f'{{"question": "What is {i}?", "answer": "It is. #### {i}"}}' for i in range(8)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return argument
