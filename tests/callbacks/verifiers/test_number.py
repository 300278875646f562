"""Numeric answers as people and models write them."""

from fractions import Fraction

import pytest

from callbacks.verifiers.number import Number, answer_text, last_boxed, parse_last_number
from datamodules.types import Verdict


def read(completion: str) -> str:
    """Return the number that the verifier found in a completion, or the status where it found none."""
    verdict = Number()(completion, "123454321")
    return verdict.detail if verdict.status == "incorrect" else verdict.status


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("#### 42", "42"),
        ("6 times 7\n#### 42", "42"),
        ("#### 42 apples, which is 6 more than 36", "42"),
        ("#### 42\nThat took me 3 steps.", "42"),
        ("#### 1\n#### 42", "42"),
        ("####42", "42"),
        ("#### $1,234.00", "1234"),
        ("#### The answer is 42.", "42"),
        ("#### \\boxed{42} of 50", "42"),
        ("\\boxed{7}\n#### 42", "42"),
        ("#### \u22125 degrees", "-5"),
        ("#### -\\frac{1}{2}", "-1/2"),
        ("#### 3,4", "3"),
        ("#### 25 cm^2", "25"),
        ("#### 1{,}234", "1234"),
        ("#### 10\\!000", "10000"),
    ],
)
def test_after_the_mark_the_first_number_counts_whatever_stands_behind(completion: str, number: str) -> None:
    assert read(completion) == number


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("It is \\boxed{42}, not 41", "42"),
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "1/2"),
        ("\\boxed{\\text{about {42}}} of 50", "42"),
        ("\\boxed{x = 42} and 1", "42"),
        ("\\boxed{1{,}234}", "1234"),
        ("\\boxed{25 \\text{ cm}^2}", "25"),
        ("\\boxed{25\\text{ m}^{2}}", "25"),
        ("\\boxed{3} or \\boxed{4", "3"),  # the last complete one
        ("5 or \\boxed{}", "unparseable"),
        ("5 or \\boxed{\\text{none}}", "unparseable"),
    ],
)
def test_without_the_mark_the_last_box_counts(completion: str, number: str) -> None:
    assert read(completion) == number


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("42", "42"),
        ("1 and 2 make 42.", "42"),
        ("5.", "5"),
        ("0.50", "1/2"),
        (".5", "1/2"),
        ("$13$", "13"),
        ("\\$13", "13"),
        ("\u20ac13", "13"),
        ("1,234", "1234"),
        ("1,234,567.5", "2469135/2"),
        ("3,4", "4"),
        ("1, 2, 34", "34"),
        ("(1,2345)", "2345"),
        ("1e3", "1000"),
        ("2.5E-1", "1/4"),
        ("42 km/h", "42"),
        ("42 eggs", "42"),
        ("**42**", "42"),
        ("007", "7"),
    ],
)
def test_without_mark_and_box_the_last_number_counts(completion: str, number: str) -> None:
    assert read(completion) == number


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("7-5", "5"),
        ("7 - 5", "5"),
        ("(7)-5", "5"),
        ("7 \u2212 5", "5"),
        ("pages 3\u20135", "5"),
        ("-5", "-5"),
        ("is -5", "-5"),
        ("The answer is -5.", "-5"),
        ("\\text{is } -5", "-5"),
        ("x=-5", "-5"),
        ("x = -5", "-5"),
        ("$-5$", "-5"),
        ("(-5)", "-5"),
        ("3, -5", "-5"),
        ("-$5", "-5"),
        ("-\\$5", "-5"),
        ("$-5", "-5"),
        ("-.5", "-1/2"),
        ("+5", "5"),
        ("\\boxed{-5}", "-5"),
    ],
)
def test_a_minus_between_operands_subtracts_and_before_a_number_negates(completion: str, number: str) -> None:
    assert read(completion) == number


@pytest.mark.parametrize("sign", ["-", "\u2212", "\u2013", "\u2012", "\u2010", "\u2011", "\ufe63", "\uff0d"])
def test_a_minus_sign_of_any_kind_negates(sign: str) -> None:
    assert Number()(f"#### {sign}5", "-5") == Verdict("correct", 1.0, detail="-5")


@pytest.mark.parametrize("answer", ["1/2", "0.5", "50%", "\\frac{1}{2}"])
@pytest.mark.parametrize(
    "completion",
    [
        "1/2",
        "1 / 2",
        "0.5",
        ".50",
        "50%",
        "50 %",
        "50\\%",
        "2/4",
        "5e-1",
        "\\frac{1}{2}",
        "\\dfrac{1}{2}",
        "\\frac{ 1 }{ 2 }",
    ],
)
def test_every_way_to_write_a_half_is_the_same_half(completion: str, answer: str) -> None:
    for text in (completion, f"#### {completion}", f"\\boxed{{{completion}}}"):
        assert Number()(text, answer) == Verdict("correct", 1.0, detail="1/2")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\frac12", Fraction(1, 2)),
        ("\\frac{-1}{2}", Fraction(-1, 2)),
        ("-\\frac{1}{2}", Fraction(-1, 2)),
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("\\frac{1,000}{3}", Fraction(1000, 3)),
    ],
)
def test_latex_fractions_are_exact(text: str, value: Fraction) -> None:
    assert parse_last_number(text) == value


@pytest.mark.parametrize(
    ("completion", "answer", "status"),
    [
        ("20%", "20", "correct"),
        ("#### 20%", "20", "correct"),
        ("\\boxed{20\\%}", "20", "correct"),
        ("20", "20%", "correct"),
        ("0.2", "20%", "correct"),
        ("20%", "21", "incorrect"),
        ("20%", "2000", "incorrect"),
        ("0.2", "20", "incorrect"),
    ],
)
def test_a_percent_sign_may_be_left_out_on_one_side(completion: str, answer: str, status: str) -> None:
    assert Number()(completion, answer).status == status


def test_equality_is_exact_not_within_a_float() -> None:
    assert Number()("0.3333333333333333", "1/3").status == "incorrect"
    assert Number()("10000000000000001", "10000000000000000").status == "incorrect"


@pytest.mark.parametrize(
    "completion", ["", " ", "I do not know", "####", "#### ", "\\boxed{}", "$", "-", "1/0", "#### 7/0"]
)
def test_a_completion_without_a_number_is_unparseable_and_scores_0(completion: str) -> None:
    assert Number()(completion, "4") == Verdict("unparseable", 0.0, detail="no number")


@pytest.mark.parametrize("answer", ["", "none", "\\boxed{}", "1/0", "9" * 200])
def test_a_reference_answer_without_a_number_is_an_error_that_names_it(answer: str) -> None:
    with pytest.raises(ValueError, match=r"holds no number") as caught:
        Number()("4", answer)
    assert repr(answer) in str(caught.value)


def test_the_parts_of_a_completion_that_state_the_answer_are_found() -> None:
    assert answer_text("a\n#### 42 b\nc") == "42 b"
    assert answer_text("\\boxed{a{b}c} d") == "a{b}c"
    assert answer_text("neither 1 nor 2") == "neither 1 nor 2"
    assert (last_boxed("\\boxed{"), last_boxed("")) == (None, None)


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("#### Step 2: conclude\nThe answer is \\boxed{7}", "7"),
        ("#### 2. Conclusion\nThe answer is 42", "42"),
        ("#### 3) **Sum** of all\n#### 42", "42"),
        ("#### 42\n#### 2. Remarks\nNone.", "42"),
        ("#### 42" + " and so on" * 1000, "42"),
        ("#### 42.", "42"),
    ],
)
def test_a_numbered_headline_is_no_answer_and_a_long_tail_hides_none(completion: str, number: str) -> None:
    assert read(completion) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 1/2", Fraction(7, 2)),
        ("about 3 1/2 cups", Fraction(7, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        ("in 12 4/2", Fraction(2)),  # no mixed number: the fraction is not below 1
        ("1.5 1/2", Fraction(1, 2)),
    ],
)
def test_a_mixed_number_is_one_number(text: str, value: Fraction) -> None:
    assert parse_last_number(text) == value


def test_a_reference_is_read_as_a_completion_is() -> None:
    reference = "3 x 6 = 18\n#### 18 dollars over 3 days"
    assert Number()(reference, reference).status == "correct"
