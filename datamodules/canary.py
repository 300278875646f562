"""The sync canary: an engine that loaded a snapshot must give the trainer's log-probs for it."""

import math

from datamodules.engines.engine import Engine
from datamodules.snapshots import Snapshot
from datamodules.types import EncodedPrompt, Probe

PROBE_TOKENS = 96  # more than two cache blocks of any engine, so that a stale prefix cache shows


class CanaryError(RuntimeError):
    """The engine samples from other weights than the snapshot's; what it would sample is worthless."""


def make_probe(prompts: list[EncodedPrompt], window: int, temperature: float) -> Probe:
    """Return a fixed probe made of prompt tokens, asked at five places.

    Args:
        prompts: encoded prompts, at least one.
        window: positions of the model.
        temperature: of the run's sampling.
    """
    length = min(PROBE_TOKENS, window - 1)
    tokens: list[int] = []
    while len(tokens) < length:
        for encoded in prompts:
            tokens.extend(encoded.token_ids)
            if len(tokens) >= length:
                break
    positions = tuple(sorted({max(1, (length - 1) * k // 5) for k in range(1, 6)}))
    return Probe(tuple(tokens[:length]), positions, temperature)


def check_canary(engine: Engine, snapshot: Snapshot) -> float:
    """Compare the engine's probe log-probs with those published in the snapshot; return the largest difference.

    Raises:
        CanaryError: they differ by more than the engine's tolerance, or one is not finite.
    """
    engine_logprobs = engine.score(snapshot.probe)
    differences = [abs(a - b) for a, b in zip(engine_logprobs, snapshot.probe_logprobs, strict=True)]
    worst = max(d if math.isfinite(d) else math.inf for d in differences)
    if worst > engine.canary_tolerance:
        rows = "; ".join(
            f"position {position}: engine {mine:.6f}, trainer {theirs:.6f}"
            for position, mine, theirs in zip(
                snapshot.probe.positions, engine_logprobs, snapshot.probe_logprobs, strict=True
            )
        )
        raise CanaryError(
            f"engine {engine.name} does not hold snapshot {snapshot.version}: probe log-probs differ by up to "
            f"{worst:.2e}, allowed is engine.canary_tolerance={engine.canary_tolerance} ({rows}). If the engine's "
            "dtype is coarser than the policy's, raise the tolerance; otherwise its weights are stale"
        )
    return worst
