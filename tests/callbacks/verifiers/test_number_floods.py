"""Numbers too large to mean anything, and floods that must not hold up a run."""

import time

import pytest

from callbacks.verifiers.number import Number


def read(completion: str) -> str:
    """Return the number that the verifier found in a completion, or the status where it found none."""
    verdict = Number()(completion, "123454321")
    return verdict.detail if verdict.status == "incorrect" else verdict.status


@pytest.mark.parametrize("text", ["1e999999999", "#### 1e999999999", "1e-999999999", "1e100", "\\boxed{1e100}"])
def test_a_number_too_large_to_read_is_not_taken_for_a_part_of_it(text: str) -> None:
    assert read(text) == "unparseable"


@pytest.mark.parametrize(
    "completion",
    [
        "9" * 1_000_000,
        "#### " + "9" * 1_000_000,
        "\\boxed{" + "9" * 1_000_000 + "}",
        "1e" + "9" * 1_000_000,
        "9**9**9",
        "1e999999999",
        "-" * 1_000_000,
        "1," * 200_000,
        ".1" * 200_000,
        "\\frac{" * 150_000,
        "\\frac{1}{" + "1" * 1_000_000,
        "#" * 1_000_000,
        "{" * 1_000_000,
        "\\boxed{" + "{" * 1_000_000,
        "\\boxed{" * 3_000,
    ],
    ids=lambda text: text[:10],
)
def test_a_flood_is_judged_fast_and_is_not_correct(completion: str) -> None:
    start = time.process_time()
    assert Number()(completion, "387420489").status != "correct"
    assert time.process_time() - start < 2.0
