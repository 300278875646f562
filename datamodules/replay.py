"""Train on the newest rounds together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replay:
    """Each pass of round r draws `prompts_per_round` whole groups, uniformly and without putting any back.

    They come from rounds r - rounds + 1 to r, so a group is trained on about `passes_per_round` times in all, while its
    snapshot grows older. The number of optimizer steps stays that of a run without replay.

    Args:
        rounds: newest rounds to draw from, at least 1; 1 trains each round once it is sampled, and never again.
    """

    rounds: int

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"datamodule.replay.rounds must be at least 1, got {self.rounds}")

    def before(self, round_: int) -> range:
        """Return the rounds before a round that it draws from."""
        return range(max(0, round_ + 1 - self.rounds), round_)
