"""The CPU cores that an engine computes on, and a word when it and the trainer would take turns on them."""

import logging
import os
import re

import torch

log = logging.getLogger(__name__)

UNBOUND = ("auto", "nobind")  # vLLM's words for threads that it places itself, or not at all
LISTS = re.compile(r"\d+(-\d+)?([,|]\d+(-\d+)?)*")


def machine_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def listed_cores(cpu_threads: str) -> set[int]:
    """Return the cores of a list such as "0-1,4", one list for each shard with "|" between; all for vLLM's own words.

    Raises:
        ValueError: it is no such list.
    """
    if cpu_threads in UNBOUND:
        return set(machine_cores())
    is_list = LISTS.fullmatch(str(cpu_threads)) is not None
    parts = [[int(end) for end in part.split("-")] for part in re.split(r"[,|]", str(cpu_threads)) if is_list]
    if not is_list or any(part[0] > part[-1] for part in parts):
        raise ValueError(
            f'engine.cpu_threads must list cores, such as "0-1" or "0,2,4-7", or be auto or nobind, got {cpu_threads!r}'
        )
    return {core for part in parts for core in range(part[0], part[-1] + 1)}


def warn_of_shared_cores(engine_cores: int | None) -> None:
    """Tell a run whose engine samples while the trainer trains when both together want more cores than there are.

    Args:
        engine_cores: that the engine computes on, at most; None for a device of its own, or where it is not known.
    """
    cores, threads = machine_cores(), torch.get_num_threads()
    if engine_cores is None or torch.cuda.is_available() or threads + engine_cores <= len(cores) or len(cores) < 2:
        return
    half = len(cores) // 2
    theirs = ",".join(map(str, cores[half:]))
    log.warning(
        "with datamodule.prefetch, %d threads of the trainer and up to %d of the engine take turns on %d cores; give "
        'each a share: num_threads=%d, and engine.cpu_threads="%s" (vllm; with engine=auto engine.vllm.cpu_threads) or '
        "engine.num_threads=%d (transformers_process)",
        threads, engine_cores, len(cores), half, theirs, len(cores) - half,
    )  # fmt: skip
