"""What every source of prompts gives: a training part and a held-out part that never meet."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from datamodules.types import Prompt


class PromptSplit(NamedTuple):
    """Prompts to train on and prompts to measure with; their ids are unique and disjoint."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def checked(self, name: str) -> "PromptSplit":
        """Return itself when usable.

        Raises:
            ValueError: a part is empty or an id stands twice.
        """
        for part, prompts in zip(self._fields, self, strict=True):
            if not prompts:
                raise ValueError(f"prompts={name} gives no {part} prompts; at least 1 is needed")
        seen: set[str] = set()
        for prompt in (*self.train, *self.held_out):
            if prompt.id in seen:
                raise ValueError(f"prompts={name}: the id {prompt.id!r} stands twice; ids must be unique")
            seen.add(prompt.id)
        return self


class PromptSource(Protocol):
    """A group of prompts, the same on every call and every machine."""

    def load(self) -> PromptSplit:
        """Return the prompts in a deterministic order.

        Raises:
            ValueError: the data is unusable, with where and why.
        """
        ...


def user_turn(text: str) -> tuple[dict[str, str], ...]:
    """Return the chat messages of a single question."""
    return ({"role": "user", "content": text},)
