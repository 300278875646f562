"""Fixed rollouts with the lengths of grade-school problems, stored as any run stores them, for both trainers."""

import math
import random
import sys
from pathlib import Path

from datamodules.clock import Clock
from datamodules.store import RolloutStore
from datamodules.types import Rollout, Verdict

GROUP_SIZE = 4


def make_recording(directory: Path, *, num_prompts: int, vocabulary: int, scale: float = 1.0) -> Path:
    """Store a round of random tokens and return its file; prompts have about 95 tokens, completions about 110.

    Args:
        directory: where the file goes.
        num_prompts: groups of four completions.
        vocabulary: ids are drawn below it.
        scale: factor of all lengths.
    """
    draw = random.Random(0)
    rollouts = []
    for group in range(num_prompts):
        prompt = _ids(draw, scale * min(200.0, max(40.0, draw.gauss(95.0, 35.0))), vocabulary)
        for sibling in range(GROUP_SIZE):
            length = min(256.0, max(16.0, math.exp(draw.gauss(math.log(95.0), 0.6))))
            completion = _ids(draw, scale * length, vocabulary)
            rollouts.append(_rollout(group, sibling, prompt, completion, draw))
    store = RolloutStore(directory)
    with store.writing(0, {}, Clock()) as write:
        write(rollouts)
    return store.path(0)


def _ids(draw: random.Random, length: float, vocabulary: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, vocabulary) for _ in range(max(1, round(length))))


def _rollout(
    group: int, sibling: int, prompt: tuple[int, ...], completion: tuple[int, ...], draw: random.Random
) -> Rollout:
    score = float(draw.random() < 0.5)
    return Rollout(
        prompt_id=f"recorded/{group}",
        group_id=group,
        sibling=sibling,
        prompt_text=str(group),
        answer="",
        prompt_ids=prompt,
        completion_ids=completion,
        sampling_logprobs=(-1.0,) * len(completion),
        text="",
        finish_reason="length",
        temperature=1.0,
        seed=0,
        round=0,
        snapshot=0,
        snapshot_step=0,
        verdict=Verdict("correct" if score else "incorrect", score),
    )


if __name__ == "__main__":
    make_recording(Path(sys.argv[1]), num_prompts=int(sys.argv[2]), vocabulary=int(sys.argv[3]))
