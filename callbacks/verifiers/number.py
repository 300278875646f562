r"""Numeric answers: after `####`, in the last `\boxed{}`, or the last number of the text."""

import re
from fractions import Fraction

from callbacks.verifiers.verifier import unparseable, verdict
from datamodules.types import Verdict

MAX_DIGITS = 100  # longer ones are noise, and costly to read
MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2012": "-"})
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
NUMBER = re.compile(
    rf"(?<![\d.])(?P<sign>[-+]?)\s?(?:[$\u20ac\u00a3]\s?)?(?P<sign2>[-+]?)"
    rf"(?P<whole>(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,2}}(?!\d))?)(?:\s?/\s?(?P<denominator>{DIGITS}))?(?P<percent>\s?\\?%)?"
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{\s*(-?[\d.,]+)\s*\}\{\s*([\d.,]+)\s*\}")


def parse_last_number(text: str) -> Fraction | None:
    """Return the last number of a text exactly, or None.

    Reads `1,234`, `1e3`, a minus sign of any kind, `1/2`, `0.5`, `50%` (= 1/2), currency signs, and LaTeX fractions.
    """
    plain = LATEX_FRACTION.sub(r"\1/\2", text.translate(MINUS_SIGNS).replace("\\!", "").replace("{,}", ","))
    matches = list(NUMBER.finditer(plain))
    return _value(matches[-1], plain) if matches else None


def _value(match: "re.Match[str]", text: str) -> Fraction | None:
    if len(match[0]) > MAX_DIGITS:
        return None
    value = Fraction(match["whole"].replace(",", ""))
    if match["denominator"]:
        denominator = Fraction(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    if match["percent"]:
        value /= 100
    is_negative = "-" in match["sign"] + match["sign2"] and not _is_operator(text, match)
    return -value if is_negative else value


def _is_operator(text: str, match: "re.Match[str]") -> bool:
    """Whether the sign stands between two operands, as in `7-5` or `7 - 5`."""
    before = text[: match.start()].rstrip()
    return bool(before) and (before[-1].isalnum() or before[-1] in ")]%") and not _is_spaced_sign(text, match)


def _is_spaced_sign(text: str, match: "re.Match[str]") -> bool:
    """Whether a blank precedes the sign and none follows, as in `is -5`."""
    start = match.start()
    return start > 0 and text[start - 1].isspace() and len(match[0]) > 1 and not match[0][1].isspace()


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last complete `\boxed{...}`, braces balanced, or None."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for i in range(start + len("\\boxed"), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : i]
        start = text.rfind("\\boxed{", 0, start)
    return None


def answer_text(text: str) -> str:
    r"""Return the part of a completion that states its answer.

    The line after the last `####` wins, then the last `\boxed{}`, then the whole text.
    """
    if "####" in text:
        return text.rpartition("####")[2].lstrip().split("\n", 1)[0]
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def first_number(text: str) -> str:
    """Cut a text after its first number, so that words behind an answer do not replace it."""
    match = NUMBER.search(LATEX_FRACTION.sub(r"\1/\2", text.translate(MINUS_SIGNS)))
    return match.string[: match.end()] if match else text


class Number:
    """Correct when both numbers are equal as exact fractions."""

    def __call__(self, completion: str, answer: str) -> Verdict:
        """Compare the completion's number with the answer's.

        Raises:
            ValueError: the reference answer itself holds no number.
        """
        expected = parse_last_number(answer)
        if expected is None:
            raise ValueError(f"the reference answer {answer!r} holds no number; choose another verifier")
        stated = answer_text(completion)
        found = parse_last_number(first_number(stated) if "####" in completion else stated)
        if found is None:
            return unparseable("no number")
        return verdict(found == expected, detail=str(found))
