"""Run one experiment in a process of its own, apart from the ranks of a larger one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from datamodules.ranks import is_of_ranks

PROGRAM = """
import logging, sys
from omegaconf import OmegaConf
from train import train
logging.basicConfig(level=logging.INFO, format="[%(name)s][%(levelname)s] %(message)s")
train(OmegaConf.load(sys.argv[1]))
"""
ROOT = Path(__file__).parents[1]


def run_alone(config: str) -> float:
    """Run an experiment and return its last held-out accuracy.

    Args:
        config: whole and resolved, as YAML.

    Raises:
        CalledProcessError: it failed.
    """
    directory = Path(yaml.safe_load(config)["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "alone.yaml").write_text(config)
    environment = {name: value for name, value in os.environ.items() if not is_of_ranks(name)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-c", PROGRAM, str(directory / "alone.yaml")], env=environment, check=True)
    return float(json.loads((directory / "summary.json").read_text())["accuracy_after"])
