r"""Numeric answers: after `####`, in the last `\boxed{}`, or the last number of the text."""

import re
from fractions import Fraction

from callbacks.verifiers.verifier import unparseable, verdict
from datamodules.types import Verdict

MARK = "####"
MAX_TEXT = 4000  # characters that are read; an answer stands at the end
MAX_MARKS = 50  # marked lines that are looked at, from the end
MAX_LENGTH = 100  # characters of a number; a longer one is noise
MAX_EXPONENT = 99
MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
LATEX_NOISE = (("\\!", ""), ("{,}", ","), ("\\$", "$"), ("\\%", "%"), ("\\,", " "))
UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\s?\^(?:\{-?\d+\}|\d+)")
FRACTION = re.compile(
    r"(?P<whole>\d{1,20})?\s?\\[dt]?frac\s?(?:\{\s*(?P<top>-?[\d.,]{1,40})\s*\}\s?\{\s*(?P<bottom>[\d.,]{1,40})\s*\}"
    r"|(?P<top1>\d)(?P<bottom1>\d))"
)
MIXED = re.compile(r"(?<![\d.,/])(\d{1,20})\s(\d{1,20})\s?/\s?(\d{1,20})(?![\d./])")
HEADLINE = re.compile(r"[\W_]*(?:[A-Za-z]+\s)?\d+\s?[.:)]\s+[*_`]*[A-Za-z\\]")  # `2. Conclusion`, `Step 2: conclude`
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = re.compile(
    rf"(?<![\d.])(?P<value>(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:[eE](?P<exponent>[-+]?\d+))?)"
    rf"(?:\s?/\s?(?P<divisor>{DIGITS}))?(?P<percent>\s?%)?"
)
SIGN = re.compile(r"(?P<before>\S?)(?P<gap>\s*)-(?P<space>\s?)[$\u20ac\u00a3]?\s?$")


def parse_last_number(text: str) -> Fraction | None:
    """Return the last number of a text exactly, or None when there is none or it is too large to mean anything.

    Reads `1,234`, `1e3`, a minus sign of any kind, `1/2`, `3 1/2`, `0.5`, `50%` (= 1/2), currency signs, and LaTeX
    fractions.
    """
    plain = _plain(text[-MAX_TEXT:])
    matches = list(NUMBER.finditer(plain))
    return _value(matches[-1], plain) if matches else None


def parse_first_number(text: str) -> Fraction | None:
    """Return the first number of a text, read like the last one."""
    plain = _plain(text[:MAX_TEXT])
    match = NUMBER.search(plain)
    return _value(match, plain) if match else None


def _plain(text: str) -> str:
    """Return a text without LaTeX around its numbers, fractions as a/b."""
    text = text.translate(MINUS_SIGNS)
    for noise, replacement in LATEX_NOISE:
        text = text.replace(noise, replacement)
    return MIXED.sub(_summed, UNIT_POWER.sub("", FRACTION.sub(_slashed, text)))


def _summed(match: "re.Match[str]") -> str:
    whole, top, bottom = (int(group) for group in match.groups())
    return f"{whole * bottom + top}/{bottom}" if 0 < top < bottom else match[0]


def _slashed(match: "re.Match[str]") -> str:
    top, bottom = match["top"] or match["top1"], match["bottom"] or match["bottom1"]
    if match["whole"] is None:
        return f"{top}/{bottom}"
    if not (top.isdigit() and bottom.isdigit()):
        return match[0]
    return f"{int(match['whole']) * int(bottom) + int(top)}/{bottom}"


def _value(match: "re.Match[str]", text: str) -> Fraction | None:
    exponent = match["exponent"] or "0"
    if len(match["value"]) > MAX_LENGTH or len(exponent) > MAX_LENGTH or abs(int(exponent)) > MAX_EXPONENT:
        return None
    value = Fraction(match["value"].replace(",", ""))
    if match["divisor"]:
        divisor = int(match["divisor"][:MAX_LENGTH].replace(",", ""))
        if divisor == 0:
            return None
        value /= divisor
    if match["percent"]:
        value /= 100
    return -value if _is_negated(text[max(0, match.start() - 20) : match.start()]) else value


def _is_negated(before: str) -> bool:
    """Whether the text before a number ends in a minus that is a sign, not an operator between two operands."""
    sign = SIGN.search(before)
    if sign is None:
        return False
    follows_operand = sign["before"].isalnum() or sign["before"] in (")", "]", "%")
    return not follows_operand or (bool(sign["gap"]) and not sign["space"])  # `7-5`, `7 - 5`; but `is -5`


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last complete `\boxed{...}`, braces balanced, or None."""
    text = text[-MAX_TEXT:]
    opened: list[int | None] = []  # where each open brace's content starts, None for a brace without \boxed
    best: tuple[int, int] | None = None
    for brace in re.finditer(r"\\boxed\{|\{|\}", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0].startswith("\\") else None)
        elif opened and (start := opened.pop()) is not None and (best is None or start > best[0]):
            best = (start, brace.start())
    return None if best is None else text[best[0] : best[1]]


def marked_line(text: str) -> str | None:
    """Return what stands behind the last `####` with a digit on its line, or None: a headline is no answer."""
    for part in reversed(text.rsplit(MARK, MAX_MARKS)[1:]):
        line = part[:MAX_TEXT].lstrip().split("\n", 1)[0]
        if any(c.isdigit() for c in line) and not HEADLINE.match(line):
            return line
    return None


def answer_text(text: str) -> str:
    r"""Return the part of a completion that states its answer.

    The last line that starts its answer with `####` wins, then the last `\boxed{}`, then the whole text.
    """
    marked = marked_line(text)
    if marked is not None:
        return marked
    boxed = last_boxed(text)
    return text if boxed is None else boxed


class Number:
    """Correct when both numbers are equal as exact fractions.

    After `####` the first number counts, so that words behind it do not replace it; elsewhere the last one. A percent
    sign that only one of the two has may be left out: `20%` answers "how many percent" whose reference is `20`.
    """

    def __call__(self, completion: str, answer: str) -> Verdict:
        """Compare the completion's number with the answer's.

        Raises:
            ValueError: the reference answer itself holds no number.
        """
        expected, expected_bare = _read(answer)
        if expected is None:
            raise ValueError(f"the reference answer {answer!r} holds no number")
        found, found_bare = _read(completion)
        if found is None:
            return unparseable("no number")
        return verdict(found == expected or found_bare == expected_bare, detail=str(found))

    def check_answer(self, answer: str) -> None:
        """Refuse a reference without a number.

        Raises:
            ValueError: it holds none.
        """
        self("", answer)


def _read(text: str) -> tuple[Fraction | None, Fraction | None]:
    """Return the number that a text states, and the same without regard to a percent sign."""
    parse = parse_last_number if marked_line(text) is None else parse_first_number
    stated = answer_text(text)
    return parse(stated), parse(stated.replace("%", ""))
