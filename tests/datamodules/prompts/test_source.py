"""Splits of prompts: both parts filled, every id once."""

import pytest

from datamodules.prompts.source import PromptSplit, user_turn
from datamodules.types import Prompt


def prompts(*ids: str) -> list[Prompt]:
    return [Prompt(id_, user_turn("2+2="), "4") for id_ in ids]


def test_a_usable_split_comes_back_as_it_was() -> None:
    split = PromptSplit(prompts("a", "b"), prompts("c"))
    assert split.checked("mine") is split


@pytest.mark.parametrize(
    ("train", "held_out", "part"), [((), ("a",), "train"), (("a",), (), "held_out"), ((), (), "train")]
)
def test_an_empty_part_is_named(train: tuple[str, ...], held_out: tuple[str, ...], part: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompts=mine gives no {part} prompts; at least 1 is needed$"):
        PromptSplit(prompts(*train), prompts(*held_out)).checked("mine")


@pytest.mark.parametrize(("train", "held_out"), [(("a", "b", "a"), ("c",)), (("a", "b"), ("a",)), (("b",), ("a", "a"))])
def test_an_id_that_stands_twice_is_refused_within_and_across_the_parts(
    train: tuple[str, ...], held_out: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"^prompts=mine: the id 'a' stands twice; ids must be unique$"):
        PromptSplit(prompts(*train), prompts(*held_out)).checked("mine")


def test_a_question_becomes_one_user_message() -> None:
    assert user_turn("2+2=") == ({"role": "user", "content": "2+2="},)
