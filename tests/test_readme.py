"""Every command of the README runs as written, on a tiny task."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import torchrun

from conf.suggestions import check_choices
from modules.policy import Policy
from train import main

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
RANKS = [c for c in COMMANDS if c.startswith("torchrun ")]
TRAIN = [c for c in COMMANDS if "train.py" in c and c not in RANKS]
EXPORT = [c for c in COMMANDS if c.startswith("python -m callbacks.export ")]
MAKE = [c for c in COMMANDS if c.startswith("make ")]


def test_every_command_is_one_that_this_file_runs() -> None:
    others = ["source .venv/bin/activate"]
    assert [c for c in COMMANDS if c not in TRAIN + RANKS + MAKE + EXPORT + others] == []


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
def test_each_train_command_runs(command: str, tmp_path: Path, model: Path, run: Callable[..., None]) -> None:
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in words[: words.index("python")])
    arguments = [_filled(a, tmp_path, model) for a in words[words.index("train.py") + 1 :]]
    earlier = _earlier(arguments)
    if earlier:
        run([*earlier, *_small(model, earlier), "rounds=1"], {})
    rounds = 2 if "resume=true" in arguments else 1
    run([*arguments, *_small(model, arguments), f"rounds={rounds}"], environment)
    jobs = math.prod(a.count(",") + 1 for a in arguments if "[" not in a) if "-m" in arguments else 1
    summaries = [path for path in tmp_path.glob("*/**/summary.json") if "recording" not in path.parts or not earlier]
    assert len(summaries) == (0 if "dry_run=true" in arguments else jobs)


@pytest.mark.parametrize("command", RANKS)
def test_each_command_for_several_processes_runs(command: str, tmp_path: Path, model: Path) -> None:
    arguments = [
        _filled(a, tmp_path, model) for a in shlex.split(command)[shlex.split(command).index("train.py") + 1 :]
    ]
    torchrun(2, *arguments, *_small(model, arguments), "rounds=1", f"hydra.run.dir={tmp_path / 'run'}")
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize("command", EXPORT)
def test_the_export_command_runs(command: str, tmp_path: Path, model: Path, run: Callable[..., None]) -> None:
    adapters = ["policy/lora=adapters"] if "--adapter" in command else []
    run(["experiment=quickstart", "hydra.run.dir=outputs/DATE/TIME", *adapters, *_small(model, []), "rounds=1"], {})
    words = [sys.executable, *shlex.split(command)[1:]]
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / ("adapter/adapter_model.safetensors" if adapters else "exported/model.safetensors")).is_file()


def _earlier(arguments: list[str]) -> list[str]:
    """Return the README's command whose result this one uses."""
    if "resume=true" in arguments:
        return [a for a in arguments if a != "resume=true"]
    if any("outputs/recording/rollouts" in a for a in arguments):
        return next(shlex.split(c)[2:] for c in TRAIN if "rollouts_only" in c)
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs the program with some arguments, as if from the test's directory."""

    def run_(arguments: list[str], environment: dict[str, str]) -> None:
        given = [a for i, a in enumerate(arguments) if not a.startswith("rounds=") or i == len(arguments) - 1]
        for name, value in {**environment, "RUN_ID": "run"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *given])
        check_choices(given, ROOT / "conf")
        main()

    return run_


def _small(model: Path, arguments: list[str]) -> list[str]:
    """Return what cuts a command down to seconds."""
    sizes = ["datamodule.prompts_per_round=4", "datamodule.group_size=2"]
    is_arithmetic = not any(a.startswith("prompts") for a in arguments)
    return [
        *_engine(arguments),
        *([] if "experiment=quickstart_offline" in arguments else sizes),
        *(["prompts.num_train=64", "prompts.num_held_out=8"] if is_arithmetic else []),
        "warm_start=none",
        "scheduler=constant",
        f"policy.path={model}",
        "datamodule.batch_size=8",
        "datamodule.sampling.max_tokens=4",
    ]


def _engine(arguments: list[str]) -> list[str]:
    if "engine=vllm_server" in arguments:
        pytest.importorskip("vllm")
        return ["engine.kv_cache_mb=64"]
    return [] if "engine=transformers_process" in arguments else ["engine=transformers"]


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
