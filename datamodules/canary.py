"""The sync canary: an engine that loaded a snapshot must give the trainer's log-probs for it."""

import math
from collections.abc import Sequence

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


class Canary:
    """Compares an engine's answer to each snapshot's probe with the one published in it.

    Args:
        name: of the engine.
        tolerance: its largest difference that is rounding.
    """

    def __init__(self, name: str, tolerance: float) -> None:
        self._name = name
        self._tolerance = tolerance
        self._last: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # published and answered

    @property
    def is_first(self) -> bool:
        """Whether the engine was never asked."""
        return self._last is None

    def check(self, snapshot: Snapshot, answer: Sequence[float]) -> tuple[float, ...]:
        """Return an engine's log-prob at each position of a snapshot's probe if it holds that snapshot.

        Args:
            snapshot: what it should hold.
            answer: its log-probs.

        Raises:
            CanaryError: they differ by more than the engine's tolerance, one is not finite, or they are still those of
                the snapshot before: an update can be smaller than the tolerance, but it cannot change nothing.
        """
        logprobs = tuple(answer)
        if logprobs == self._before(snapshot):
            raise CanaryError(
                f"engine {self._name} answers for snapshot {snapshot.version} exactly as for the one before, though "
                "the trainer's log-probs changed: the load changed no weight. If the engine's dtype is coarser than "
                "the policy's, the update may be lost in rounding: use engine dtype float32, a higher optimizer.lr, or "
                "for low-rank adapters policy.lora.sync=adapter"
            )
        differences = [abs(a - b) for a, b in zip(logprobs, snapshot.probe_logprobs, strict=True)]
        worst = max(d if math.isfinite(d) else math.inf for d in differences)
        if worst > self._tolerance:
            raise CanaryError(
                f"engine {self._name} does not hold snapshot {snapshot.version}: probe log-probs differ by up to "
                f"{worst:.2e}, allowed is its canary_tolerance={self._tolerance}. If policy.dtype or engine.dtype is "
                "bfloat16, give both the same dtype and set engine.canary_tolerance=1.0 (with engine=auto: "
                "engine.vllm.dtype, engine.vllm.canary_tolerance); otherwise the engine's weights are stale. In full: "
                + "; ".join(
                    f"position {position}: engine {mine:.6f}, trainer {theirs:.6f}"
                    for position, mine, theirs in zip(
                        snapshot.probe.positions, logprobs, snapshot.probe_logprobs, strict=True
                    )
                )
            )
        self._last = (snapshot.probe_logprobs, logprobs)
        return logprobs

    def _before(self, snapshot: Snapshot) -> tuple[float, ...] | None:
        """Return the last answer, where it was to another snapshot."""
        is_other = self._last is not None and self._last[0] != snapshot.probe_logprobs
        return self._last[1] if self._last is not None and is_other else None
