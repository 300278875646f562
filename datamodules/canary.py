"""The sync canary: an engine that loaded a snapshot must give the trainer's log-probs for it."""

import math
from collections.abc import Sequence

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


def check_canary(engine: Engine, snapshot: Snapshot, previous: tuple[float, ...] | None = None) -> tuple[float, ...]:
    """Ask an engine for a snapshot's probe, and check its answer.

    Args:
        engine: loaded the snapshot.
        snapshot: what it should hold.
        previous: the engine's answer for the snapshot before, where that one's published answer was another.
    """
    return check_answer(engine.name, engine.canary_tolerance, snapshot, engine.score(snapshot.probe), previous)


def check_answer(
    name: str,
    tolerance: float,
    snapshot: Snapshot,
    answer: Sequence[float],
    previous: tuple[float, ...] | None = None,
) -> tuple[float, ...]:
    """Compare an engine's probe log-probs with those published in the snapshot, and return them.

    Args:
        name: of the engine.
        tolerance: its largest difference that is rounding.
        snapshot: what it should hold.
        answer: its log-prob at each probe position.
        previous: its answer for the snapshot before, where that one's published answer was another.

    Raises:
        CanaryError: they differ by more than the engine's tolerance, one is not finite, or the answers are still those
            of the snapshot before: an update can be smaller than the tolerance, but it cannot change nothing.
    """
    engine_logprobs = tuple(answer)
    if engine_logprobs == previous:
        raise CanaryError(
            f"engine {name} answers for snapshot {snapshot.version} exactly as for the one before, though the "
            "trainer's log-probs changed: the load changed no weight. If the engine's dtype is coarser than the "
            "policy's, the update may be lost in rounding: use engine dtype float32 or a higher optimizer.lr"
        )
    differences = [abs(a - b) for a, b in zip(engine_logprobs, snapshot.probe_logprobs, strict=True)]
    worst = max(d if math.isfinite(d) else math.inf for d in differences)
    if worst > tolerance:
        rows = "; ".join(
            f"position {position}: engine {mine:.6f}, trainer {theirs:.6f}"
            for position, mine, theirs in zip(
                snapshot.probe.positions, engine_logprobs, snapshot.probe_logprobs, strict=True
            )
        )
        raise CanaryError(
            f"engine {name} does not hold snapshot {snapshot.version}: probe log-probs differ by up to "
            f"{worst:.2e}, allowed is its canary_tolerance={tolerance}. If policy.dtype or "
            "engine.dtype is bfloat16, give both the same dtype and set engine.canary_tolerance=1.0 (with "
            "engine=auto: engine.vllm.dtype, engine.vllm.canary_tolerance); otherwise the engine's weights are stale. "
            f"In full: {rows}"
        )
    return engine_logprobs
