"""Make a starting policy by a run of its own, once for each configuration."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

log = logging.getLogger(__name__)


def make_once(cfg: Any, as_yaml: Callable[[Any], str], run: Callable[[Any], float]) -> None:
    """Train what `warm_start` configures, unless its directory holds the result of the same config.

    Args:
        cfg: the node; its `directory` is another while it trains, so that what is there stays until there is a better.
        as_yaml: returns the node as text, resolved.
        run: trains it and returns its held-out accuracy.

    Raises:
        ValueError: the directory holds something else.
        RuntimeError: the accuracy fell short of the node's `callbacks.stop.stopping_threshold`.
    """
    directory = Path(cfg.directory)
    wanted = as_yaml(cfg)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        done = directory / "done.yaml"
        if done.is_file() and done.read_text() == wanted:
            log.info("warm start: taken from %s", directory)
            return
        if directory.exists() and not done.is_file():
            raise ValueError(f"warm_start.directory: {directory} was not made by a warm start; choose another")
        log.info("warm start: training %s, once for this configuration", directory)
        cfg.directory = f"{directory}.unfinished"
        shutil.rmtree(cfg.directory, ignore_errors=True)
        try:
            accuracy = run(cfg)
        except Exception as error:
            error.add_note("This happened in the warm start: its settings are those below warm_start.")
            raise
        if not accuracy >= cfg.callbacks.stop.stopping_threshold:
            raise RuntimeError(f"the warm start ended at accuracy {accuracy}, short of its stopping_threshold")
        Path(cfg.directory, "done.yaml").write_text(wanted)
        shutil.rmtree(directory, ignore_errors=True)
        Path(cfg.directory).rename(directory)
        cfg.directory = str(directory)
        log.info("warm start: held-out accuracy %.2f; kept in %s", accuracy, directory)
