"""Exact match: letter for letter, white space around it apart."""

import pytest

from callbacks.verifiers.exact import Exact
from datamodules.types import Verdict


@pytest.mark.parametrize("completion", ["cat", "  cat\n", "\tcat "])
@pytest.mark.parametrize("answer", ["cat", " cat\n"])
def test_white_space_around_the_text_does_not_matter(completion: str, answer: str) -> None:
    assert Exact()(completion, answer) == Verdict("correct", 1.0, detail="cat")


@pytest.mark.parametrize("completion", ["Cat", "cat.", "c at", "the cat", "cats", "0"])
def test_any_other_letter_is_incorrect_and_scores_0(completion: str) -> None:
    assert Exact()(completion, "cat") == Verdict("incorrect", 0.0, detail=completion)


@pytest.mark.parametrize("completion", ["", " ", "\n\t"])
@pytest.mark.parametrize("answer", ["cat", ""])
def test_empty_text_is_unparseable_even_where_the_answer_is_empty(completion: str, answer: str) -> None:
    assert Exact()(completion, answer) == Verdict("unparseable", 0.0, detail="empty")
