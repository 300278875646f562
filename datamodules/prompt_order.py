"""Which prompts a round meets: a walk through a fresh permutation for each time through the data."""

import random
from collections.abc import Sequence

from datamodules.seeds import derive_seed
from datamodules.types import EncodedPrompt


class PromptOrder:
    """A function of (seed, round) alone, so that a resumed run meets the same prompts.

    Args:
        prompts: the training prompts.
        per_round: prompts of one round; may cross into the next permutation.
        seed: the run's seed.

    Raises:
        ValueError: a round would meet a prompt twice for want of others.
    """

    def __init__(self, prompts: Sequence[EncodedPrompt], per_round: int, seed: int) -> None:
        if per_round > len(prompts):
            raise ValueError(
                f"datamodule.prompts_per_round is {per_round}, but there are only {len(prompts)} training prompts; "
                "lower it or give more prompts"
            )
        self.prompts = prompts
        self.per_round = per_round
        self.seed = seed
        self._order: tuple[int, list[int]] | None = None  # the permutation of the current time through the prompts

    def of_round(self, round_: int) -> list[EncodedPrompt]:
        """Return a round's prompts."""
        count = len(self.prompts)
        places = range(round_ * self.per_round, (round_ + 1) * self.per_round)
        return [self.prompts[self._permutation(place // count)[place % count]] for place in places]

    def _permutation(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.prompts)))
            random.Random(derive_seed(self.seed, "prompts", epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
