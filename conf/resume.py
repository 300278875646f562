"""From where a run goes on, and whether it is still the same experiment."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.suggestions import leaves

log = logging.getLogger(__name__)

CONFIG = "config.yaml"

# What may differ without making another experiment of a run: how it is computed, watched and stored.
HARMLESS = (
    "ckpt_path", "resume", "allow_config_change", "dry_run", "directory", "num_threads", "logger", "callbacks",
    "engine", "datamodule.prefetch", "datamodule.max_engine_restarts", "datamodule.max_tokens_per_micro_batch",
    "datamodule.engine", "datamodule.directory", "trainer.log_every_n_steps", "trainer.default_root_dir",
    "policy_module.log_entropy", "policy_module.compile_layers",
    "trainer.devices", "trainer.num_nodes", "trainer.strategy",
)  # fmt: skip
HARMFUL = ("callbacks.verifier_scoring", "trainer.strategy.param_dtype")
DEFAULTS = {"trainer.strategy.param_dtype": "float32"}  # of keys that not every run has
# Copies of other nodes: one that changed with its source is not told twice.
COPIES = {
    "policy_module.policy": "policy", "policy_module.objectives": "objective", "policy_module.optimizer": "optimizer",
    "policy_module.scheduler": "scheduler", "datamodule.prompts": "prompts", "datamodule.engine": "engine",
    "datamodule.curation": "curation", "datamodule.directory": "directory", "datamodule.seed": "seed",
    "datamodule.lag": "lag", "trainer.max_epochs": "rounds", "callbacks.verifier_scoring.verifier": "verifier",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Start:
    """From where a run goes on."""

    checkpoint: str | None
    config: Path | None  # of the run that is continued; None where none is
    is_again: bool = False  # the run was here before, and had come to no checkpoint of its own

    def check(self, config: Mapping[str, Any]) -> None:
        """Report what changed since the run that is continued, and refuse what makes another experiment of it."""
        if self.config is None:
            return
        if not self.config.is_file():
            log.warning("%s is not there, so whether this is the same experiment is not known", self.config)
            return
        before = yaml.safe_load(self.config.read_text())
        if not isinstance(before, Mapping):
            raise ValueError(f"{self.config} is not a configuration; take it from a backup, or delete it")
        check_same_experiment(before, config)

    def take(self, directory: Any, config: str) -> None:
        """Take the run's directory, check that a run which goes on is the same experiment, and write its configuration.

        Args:
            directory: the `RunDirectory`.
            config: whole and resolved, as YAML.
        """
        directory.claim(is_resumed=self.is_again or self.continues(directory.path), from_start=self.checkpoint is None)
        self.check(yaml.safe_load(config))
        directory.write(CONFIG, config)

    def check_readable(self, *, is_sharded: bool) -> None:
        """Refuse a checkpoint in shards where the trainer has none.

        Raises:
            ValueError: naming it.
        """
        if self.checkpoint and Path(self.checkpoint).is_dir() and not is_sharded:
            raise ValueError(f"{self.checkpoint} is a sharded checkpoint, which only trainer=fsdp reads")

    def continues(self, directory: Path) -> bool:
        """Whether the run in this directory goes on, rather than another one or none."""
        return self.config is not None and self.config.resolve().parent == directory.resolve()


def starting_point(ckpt_path: str | None, resume: bool, directory: Path, *, again: bool = False) -> Start:
    """Return the checkpoint to start from, if any, and the configuration that it was written under.

    Args:
        ckpt_path: a checkpoint asked for.
        resume: go on with what `directory` holds: its newest checkpoint, or where it had none yet, its first round.
        directory: of the run.
        again: torchrun or Slurm starts the run anew, which then goes on with what `directory` holds.

    Raises:
        ValueError: both were asked for, there is nothing to go on with, or the checkpoint is not the newest of its
            directory.
    """
    if again and (ckpt_path is None or any((directory / "checkpoints").glob("round-*.ckpt"))):
        ckpt_path, resume = None, True
    if resume and ckpt_path is not None:
        raise ValueError("resume=true takes the newest checkpoint of directory; leave out ckpt_path")
    if resume and not again and not any((directory / name).exists() for name in (CONFIG, "checkpoints", "rollouts")):
        raise ValueError(
            f"resume=true: {directory} holds no run; correct hydra.run.dir, or leave out resume to start one"
        )
    if ckpt_path is None:
        return Start(_newest_checkpoint(directory), directory / CONFIG) if resume else Start(None, None)
    path = Path(ckpt_path).resolve()
    if not path.exists():
        raise ValueError(f"ckpt_path: {ckpt_path} is not there")
    newer = [c for c in path.parent.glob("*.ckpt") if not c.is_symlink() and c.name[-11:] > path.name[-11:]]
    if newer and path.parent.parent == directory.resolve():
        raise ValueError(
            f"ckpt_path: {newer[0]} is newer; to go back to {path.name}, choose another directory (hydra.run.dir)"
        )
    return Start(ckpt_path, Path(ckpt_path).resolve().parent.parent / CONFIG, is_again=again)


def is_finished(directory: Path, rounds: int) -> bool:
    """Whether a run of so many rounds has left its result, after which only its processes' end can have failed."""
    summary = directory / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["rounds"] >= rounds


def _newest_checkpoint(directory: Path) -> str | None:
    found = sorted((directory / "checkpoints").glob("round-*.ckpt"))
    log.info("resuming from %s", found[-1] if found else f"the start: {directory} has no checkpoint yet")
    return str(found[-1]) if found else None


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each key whose value differs, with both values; a copy that changed with its source is left out."""
    old, new = dict(leaves(before)), dict(leaves(after))
    missing = object()
    changes = {
        key: (old.get(key), new.get(key))
        for key in [*old, *(k for k in new if k not in old)]
        if old.get(key, DEFAULTS.get(key, missing)) != new.get(key, DEFAULTS.get(key, missing))
    }
    sources = {
        key: source + key.removeprefix(copy)
        for key in changes
        for copy, source in COPIES.items()
        if _is_within(key, (copy,))
    }
    return {key: pair for key, pair in changes.items() if changes.get(sources.get(key, "")) != pair}


def check_same_experiment(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Report what changed since the run that is continued, key by key, and refuse what makes another experiment of it.

    Raises:
        ValueError: naming those keys, unless `allow_config_change` is true.
    """
    changes = changed_keys(before, after)
    for key, (old, new) in changes.items():
        if key in ("resume", "ckpt_path", "allow_config_change"):  # say how to go on, not what the run is
            continue
        log.warning("changed on resume: %s was %s and is %s", key, old, new)
    harmless = HARMLESS + (("rounds",) if "constant" in str(after.get("scheduler")) else ())
    harmful = [key for key in changes if _is_within(key, HARMFUL) or not _is_within(key, harmless)]
    if harmful and not after["allow_config_change"]:
        raise ValueError(
            f"the run that is continued had other values of {', '.join(harmful)}, so this would be another experiment; "
            "take them back, or say allow_config_change=true (a schedule that depends on rounds counts too)"
        )


def _is_within(key: str, nodes: tuple[str, ...]) -> bool:
    return any(key == node or key.startswith(f"{node}.") for node in nodes)
