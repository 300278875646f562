"""Every command of the README runs as written, on a tiny task."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from train import train

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
TRAIN = [c for c in COMMANDS if "train.py" in c]
MAKE = [c for c in COMMANDS if c.startswith("make ")]
MODEL = ["hidden_size=64", "num_layers=1", "num_heads=2"]
SMALL = [
    "engine=transformers",
    "datamodule.prompts_per_round=4",
    "datamodule.group_size=2",
    "datamodule.batch_size=8",
    "datamodule.sampling.max_tokens=4",
]
SUMS = ["warm_start=none", "policy=tiny", "~policy.path", *(f"policy.{m}" for m in MODEL), "prompts.num_held_out=4"]


def test_every_command_is_one_that_this_file_runs() -> None:
    others = ["source .venv/bin/activate"]
    assert [c for c in COMMANDS if c not in TRAIN + MAKE + others] == []


@pytest.mark.parametrize("command", MAKE)
def test_each_make_target_exists(command: str) -> None:
    dry = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr


@pytest.mark.parametrize("command", TRAIN)
def test_each_train_command_runs(command: str, tmp_path: Path, small_run: Callable[..., DictConfig]) -> None:
    words = command.split()
    environment = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = words[words.index("train.py") + 1 :]
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *_small(arguments, tmp_path, small_run)],
        cwd=tmp_path,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "RUN_ID": "run"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    jobs = 1 if "-m" not in arguments else 9 if "seed=0,1,2" in arguments else 2
    assert len(list(tmp_path.glob("*/run/**/summary.json"))) == jobs


def _small(arguments: list[str], tmp_path: Path, small_run: Callable[..., DictConfig]) -> list[str]:
    """Return a command's arguments with its placeholders filled in and its sizes cut down."""
    if "experiment=real_model" in arguments or "policy=hf" in arguments:
        return [*(_with_real_files(a, tmp_path, small_run) for a in arguments), *SMALL, "rounds=1"]
    checkpoint = next((a for a in arguments if a.startswith("ckpt_path=")), None)
    rounds = [] if checkpoint else ["rounds=1"]
    if checkpoint:
        train(small_run(*SMALL, *(f"policy.{m}" for m in MODEL), "prompts.digits=3", directory=tmp_path / "first"))
        real = f"ckpt_path={tmp_path / 'first' / 'checkpoints' / 'last.ckpt'}"
        arguments = [real if a == checkpoint else "rounds=4" if a.startswith("rounds=") else a for a in arguments]
        rounds = ["prompts.num_train=40"]
    return [*arguments, *SMALL, *SUMS, *rounds]


def _with_real_files(argument: str, tmp_path: Path, small_run: Callable[..., DictConfig]) -> str:
    """Put a tiny model and tiny data where the README names the reader's own."""
    key, _, value = argument.partition("=")
    if key == "policy.path":
        train(small_run(*SMALL, "rounds=1", directory=tmp_path / "made"))
        return f"{key}={tmp_path / 'made' / 'model'}"
    if value == "my.jsonl":
        lines = [f'{{"prompt": "say {i}", "label": "{i}"}}' for i in range(20)]
        (tmp_path / value).write_text("\n".join(lines))
    return argument
