"""Exact match after trimming white space."""

from callbacks.verifiers.verifier import unparseable, verdict
from datamodules.types import Verdict


class Exact:
    """Correct when the completion is the answer, letter for letter; empty text is unparseable."""

    def __call__(self, completion: str, answer: str) -> Verdict:
        """Compare the two without the white space around them."""
        text = completion.strip()
        if not text:
            return unparseable("empty")
        return verdict(text == answer.strip(), detail=text)

    def check_answer(self, answer: str) -> None:
        """Refuse an empty reference.

        Raises:
            ValueError: it is empty.
        """
        if not answer.strip():
            raise ValueError("the reference answer is empty")
