"""Values that the callbacks' tests share."""

from collections.abc import Callable
from typing import Any

import pytest

from datamodules.types import Rollout, Verdict


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """Return a maker of rollouts judged by a score; `score=None` got none, `verdict=None` was not judged."""

    def make(group_id: int = 0, sibling: int = 0, *, score: float | None = 1.0, **changes: Any) -> Rollout:
        values: dict[str, Any] = {
            "prompt_id": f"p{group_id}",
            "group_id": group_id,
            "sibling": sibling,
            "prompt_text": "2+2=",
            "answer": "4",
            "prompt_ids": (7, 8, 9),
            "completion_ids": (4, 2),
            "sampling_logprobs": (-0.5, -0.25),
            "text": "4",
            "finish_reason": "stop",
            "temperature": 1.0,
            "seed": 11,
            "round": 3,
            "snapshot": 1,
            "snapshot_step": 20,
            "verdict": Verdict("error" if score is None else "correct" if score > 0.5 else "incorrect", score),
        }
        return Rollout(**values | changes)

    return make
