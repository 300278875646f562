"""Sums made on the spot: right, distinct, and the same for the same seed."""

import re

import pytest

from datamodules.prompts.arithmetic import Arithmetic, worked_columns
from datamodules.types import Prompt


def test_every_answer_is_the_sum_of_its_question() -> None:
    split = Arithmetic(digits=3, num_train=300, num_held_out=50, seed=0).load()
    for prompt in (*split.train, *split.held_out):
        a, b = map(int, re.fullmatch(r"(\d+)\+(\d+)=", prompt.messages[0]["content"]).groups())
        assert (int(prompt.answer), prompt.id) == (a + b, f"{a}+{b}")
        assert prompt.demonstration == f"{worked_columns(a, b)} {prompt.answer}"


def test_a_worked_example_adds_the_columns_with_their_carry_lowest_first() -> None:
    assert worked_columns(123, 989) == "12 11 11"
    assert worked_columns(100, 250) == "00 05 03"
    assert worked_columns(9, 9) == "18"


def test_the_parts_have_the_asked_sizes_and_share_no_problem() -> None:
    split = Arithmetic(digits=2, num_train=5000, num_held_out=1000, seed=3).load()
    assert (len(split.train), len(split.held_out)) == (5000, 1000)
    assert len({p.id for p in (*split.train, *split.held_out)}) == 6000


@pytest.mark.parametrize(("digits", "smallest", "largest"), [(1, 0, 9), (2, 10, 99)])
def test_all_problems_of_a_size_can_be_asked_for(digits: int, smallest: int, largest: int) -> None:
    numbers = range(smallest, largest + 1)
    everything = len(numbers) ** 2
    split = Arithmetic(digits=digits, num_train=everything - 1, num_held_out=1, seed=0).load()
    assert {p.id for p in (*split.train, *split.held_out)} == {f"{a}+{b}" for a in numbers for b in numbers}


def test_nine_digit_numbers_have_nine_digits() -> None:
    split = Arithmetic(digits=9, num_train=50, num_held_out=1, seed=0).load()
    assert {len(part) for p in split.train for part in p.id.split("+")} == {9}


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    def train(seed: int) -> list[Prompt]:
        return list(Arithmetic(digits=3, num_train=100, num_held_out=10, seed=seed).load().train)

    assert train(5) == train(5)
    assert train(5) != train(6)


@pytest.mark.parametrize(
    ("digits", "num_train", "num_held_out", "message"),
    [
        (0, 1, 1, "prompts.digits must be 1 to 9, got 0"),
        (10, 1, 1, "prompts.digits must be 1 to 9, got 10"),
        (2, 0, 1, "prompts.num_train and prompts.num_held_out must be at least 1, got 0 and 1"),
        (2, 1, -3, "prompts.num_train and prompts.num_held_out must be at least 1, got 1 and -3"),
        (1, 100, 1, "prompts.num_held_out is 101, but there are only 100 sums of two 1-digit numbers"),
        (2, 8000, 101, "prompts.num_held_out is 8101, but there are only 8100 sums of two 2-digit numbers"),
    ],
)
def test_impossible_sizes_are_refused_at_construction(
    digits: int, num_train: int, num_held_out: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Arithmetic(digits=digits, num_train=num_train, num_held_out=num_held_out, seed=0)
