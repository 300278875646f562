"""Refuse a source of experience that an objective cannot learn from, before anything is sampled."""

import logging
from typing import Any

from modules.objectives.objective import Objective

log = logging.getLogger(__name__)


def check_head(name: str, head: Objective, data: Any) -> None:
    """Refuse a source of experience that a head cannot learn from; warn of one that makes another algorithm of it.

    Raises:
        ValueError: with the config key to change.
    """
    if missing := head.requires - data.provides:
        raise ValueError(
            f"objective {name!r} needs {', '.join(sorted(missing))}, which {type(data).__name__} does not "
            "provide; choose another objective or datamodule"
        )
    if head.needs_siblings and data.group_size < 2:
        raise ValueError(
            f"datamodule.group_size must be at least 2 for objective {name!r} (it compares siblings), "
            f"got {data.group_size}"
        )
    if head.needs_one_snapshot and data.mixes_snapshots:
        raise ValueError(
            f"datamodule.replay.rounds must be 1 for objective {name!r}: all sequences of one of its optimizer steps "
            "must come from one snapshot"
        )
    if "sampling_logprobs" in head.requires and data.is_renormalised:
        raise ValueError(
            f"objective {name!r} uses the engine's log-probs, but datamodule.sampling.top_p < 1 or top_k > 0 "
            "renormalises them inside the engine only, which biases every ratio; set top_p: 1.0 and top_k: 0"
        )
    if data.drops_equal_groups and not head.ignores_equal_groups:
        log.warning(
            "curation=informative_only changes objective %r: there, groups of equal rewards have a gradient too", name
        )
