"""The CPU cores that an engine computes on, and a word when it and the trainer would take turns on them."""

import logging
import os
import re

import torch

log = logging.getLogger(__name__)

LISTS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*(\|\d+(-\d+)?(,\d+(-\d+)?)*)*")


def machine_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_cores(cpu_threads: str) -> int:
    """Return how many cores a list names, such as "0-1,4", one list for each shard with "|" between.

    Raises:
        ValueError: it is no such list.
    """
    if not LISTS.fullmatch(cpu_threads):
        raise ValueError(f'engine.cpu_threads must list cores, such as "0-1" or "0,2,4-7", got {cpu_threads!r}')
    parts = [[int(end) for end in part.split("-")] for part in re.split(r"[,|]", cpu_threads)]
    return sum(ends[-1] - ends[0] + 1 for ends in parts)


def warn_of_shared_cores(engine_cores: int | None) -> None:
    """Tell a run whose engine samples while the trainer trains when both together want more cores than there are.

    Args:
        engine_cores: that the engine computes on; None for a device of its own.
    """
    cores, threads = machine_cores(), torch.get_num_threads()
    if engine_cores is None or torch.cuda.is_available() or threads + engine_cores <= cores or cores < 2:
        return
    half = cores // 2
    log.warning(
        "with datamodule.prefetch, %d threads of the trainer and %d of the engine take turns on %d cores; give each "
        'its own: num_threads=%d, and engine.cpu_threads="%d-%d" (vllm) or engine.num_threads=%d '
        "(transformers_process)",
        threads, engine_cores, cores, half, half, cores - 1, cores - half,
    )  # fmt: skip
