"""Addition problems, made on the spot and the same for the same seed."""

import random
from itertools import zip_longest

from datamodules.prompts.source import PromptSplit, user_turn
from datamodules.types import Prompt


class Arithmetic:
    """Sums of two numbers with a fixed number of digits, for learning on a laptop.

    Args:
        digits: of each number, 1 to 9.
        num_train: training problems, distinct.
        num_held_out: held-out problems, distinct from each other and from the training ones.
        seed: chooses the problems.
    """

    def __init__(self, digits: int, num_train: int, num_held_out: int, seed: int) -> None:
        if not 1 <= digits <= 9:
            raise ValueError(f"prompts.digits must be 1 to 9, got {digits}")
        if num_train < 1 or num_held_out < 1:
            raise ValueError(
                f"prompts.num_train and prompts.num_held_out must be at least 1, got {num_train} and {num_held_out}"
            )
        available = self._numbers(digits) ** 2
        if num_train + num_held_out > available:
            raise ValueError(
                f"prompts.num_train + prompts.num_held_out is {num_train + num_held_out}, but there are only "
                f"{available} sums of two {digits}-digit numbers; ask for fewer or raise prompts.digits"
            )
        self.digits = digits
        self.num_train = num_train
        self.num_held_out = num_held_out
        self.seed = seed

    @staticmethod
    def _numbers(digits: int) -> int:
        return 9 * 10 ** (digits - 1) if digits > 1 else 10

    def load(self) -> PromptSplit:
        """Return distinct problems, training first."""
        numbers = self._numbers(self.digits)
        smallest = 10 ** (self.digits - 1) if self.digits > 1 else 0
        chosen = random.Random(self.seed).sample(range(numbers**2), self.num_train + self.num_held_out)
        prompts = [self._prompt(smallest + i // numbers, smallest + i % numbers) for i in chosen]
        return PromptSplit(prompts[: self.num_train], prompts[self.num_train :]).checked("arithmetic")

    @staticmethod
    def _prompt(a: int, b: int) -> Prompt:
        return Prompt(f"{a}+{b}", user_turn(f"{a}+{b}="), str(a + b), demonstration=f"{worked_columns(a, b)} {a + b}")


def worked_columns(a: int, b: int) -> str:
    """Return the sum of each column with its carry, lowest first, as a pupil writes it down: `12 11 11` for 123+989."""
    columns, carry = [], 0
    for digit_a, digit_b in zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0"):
        total = int(digit_a) + int(digit_b) + carry
        carry = total // 10
        columns.append(f"{total:02d}")
    return " ".join(columns)
