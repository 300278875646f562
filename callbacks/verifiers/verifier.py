"""What every verifier is: a function from a completion and an answer to a verdict."""

from typing import Protocol

from datamodules.types import Verdict


class Verifier(Protocol):
    """Judges one completion; it must be deterministic and may raise, which counts as an error."""

    def __call__(self, completion: str, answer: str) -> Verdict:
        """Return the verdict on `completion` against the reference `answer`."""
        ...

    def check_answer(self, answer: str) -> None:
        """Look at a reference before anything is sampled.

        Raises:
            ValueError: nothing could ever be compared with it.
        """
        ...


def verdict(is_correct: bool, detail: str = "") -> Verdict:
    """Return the verdict of a completion that could be read."""
    return Verdict("correct", 1.0, detail=detail) if is_correct else Verdict("incorrect", 0.0, detail=detail)


def unparseable(detail: str) -> Verdict:
    """Return the verdict of a completion without a readable answer: scored 0, and counted apart."""
    return Verdict("unparseable", 0.0, detail=detail)
