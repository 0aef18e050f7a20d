r"""Finds the answer in a text, and decides if it matches the gold answer.

The answer is the content of the last answer tag, else of the last `\boxed{}`, else the text that the last line calls the answer;
boxes with only commas and `and` between them are one answer. Text in a completion's reasoning, before `</think>` or after a
`<think>` that is not closed, is never an answer.

An answer matches if its text is that of the gold answer, if both are the same words, choice or time of day, or if both are parsed
as mathematics, with nothing left over, and mean the same (see `math_parser` and `meaning`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from groupwise.tasks.rewards.boxes import closing, last_boxed
from groupwise.tasks.rewards.equality import numeric_value
from groupwise.tasks.rewards.math_parser import LONGEST, Node, ParseError, parse, plain_signs
from groupwise.tasks.rewards.meaning import trees_match
from groupwise.tasks.rewards.units import is_unit, words_of

# Locating the answer

_HEADING = re.compile(r"\W*(?:final\s+)?answer\W*", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:incorrect|wrong|not|unclear|unsure)\b|n['’]t\b|\b(?:if|whether)\s+(?:the\s+)?(?:final\s+)?$",
    re.IGNORECASE,
)
"""Text before `answer` in a line that announces no answer."""
_ANNOUNCED = re.compile(r"(?:^\s*####|\banswer\W{0,4}(?:is\s*:?|:|=)\**)\s*(.*)$", re.IGNORECASE)


def final_line_answer(text: str) -> str | None:
    """The answer that the last line announces, `#### 72`, `Answer: 72`, `So the answer is 72.`, or that follows a heading `Answer`;
    None if no line does.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and _HEADING.fullmatch(lines[-2]):
        return lines[-1].strip("* ")
    match = _ANNOUNCED.search(lines[-1]) if lines else None
    if match is None or _DENIED.search(lines[-1][: match.start()]):
        return None
    answer = re.sub(r"(?<!\*)\*++(?=[.\s]*$)", "", match[1].removesuffix(" I hope it is correct."))
    return answer.strip("* ") or None


_AMOUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
_IN_TEXT = re.compile(
    rf"(?:(?<![\w)}}])[-−–])?(?:\d*\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|\d+ \d+/\d+|(?:{_AMOUNT})(?:/(?:{_AMOUNT})"
    r"|e[+-]?\d{1,3}(?!\w)|\s?(?:[*×x]|\\times|\\cdot)\s?10\^(?:\{-?\d{1,3}\}|-?\d{1,3}))?)(?:\s?\\?%)?",
    re.IGNORECASE,
)
"""A number among words: `-3`, `1,234.5`, `.5`, `1/2`, `1 1/2`, `1e6`, `2 × 10^3`, `50 %`."""


def last_number(text: str) -> str | None:
    """The last number in a text, as written; None if there is none."""
    numbers = [match.group() for match in _IN_TEXT.finditer(text)]
    return numbers[-1] if numbers else None


# Text around an answer

_STYLED = r"\\(?:text|mathrm|mathbf|mathit|textrm|textbf|textit|mbox|boxed|fbox)\s*\{"
_STYLE = re.compile(_STYLED)
_UPRIGHT = re.compile(_STYLED + r"([^{}]*)\}")
_SO = r"(?:(?:so|thus|hence|therefore|then),?\s+)?"
_SAID_FIRST = re.compile(
    rf"{_SO}(?:the\s+)?(?:(?:final|correct|right)\s+)?(?:answer|solution|result|value|option|choice)(?:\s+is|\s*=|\s*:|\s+is\s*:)\s*:?\s*"
    rf"|=\s*|####\s*|{_SO}the(?P<what>(?:\s+[a-z]{{3,}}){{1,3}})\s+(?:is|are|was|were|equals)\s+(?=[$\\\d-])",
    re.IGNORECASE,
)
"""Lead-ins of an answer: `The answer is`, `=`, `####`, and `The total cost is` before a number."""
_WRAPPED = re.compile(r"([\"'`*_])(?!\1)([^\"'`*_]+)\1")
_ENVIRONMENT = re.compile(
    r"\\begin\{((?:align|equation|gather|split|multline)(?:ed)?\*?)\}(.*)\\end\{\1\}", re.DOTALL
)
_BOLD_FIRST = re.compile(r"\*\*([^*]+)\*\*(?![\w(\\{*^])")


def strip_wrapping(text: str) -> str:
    """An answer without its wrapping: a box, Markdown, dollars, quotes, `The answer is`, a full stop, a style around the whole."""
    text = text.strip()
    previous = None
    while text != previous:
        previous = text
        for step in _UNWRAPPING:
            text = step(text).strip()
    return text


def _without_environment(text: str) -> str:
    r"""`\begin{aligned} x &= 3 \end{aligned}`, of a single row."""
    match = _ENVIRONMENT.fullmatch(text)
    return match[2].replace("&", "") if match and r"\\" not in match[2] else text


def _without_box(text: str) -> str:
    inner = last_boxed(text)
    return text if inner is None else inner


def _without_bold(text: str) -> str:
    """Removes bold only at the beginning, as in `**72** apples`; `**3**2` is unchanged."""
    return _BOLD_FIRST.sub(r"\1", text, count=1) if text.startswith("**") else text


def _without_dollars(text: str) -> str:
    r"""Removes the delimiters of mathematics, `$` and `\(`; a dollar without a partner is money."""
    if re.search(r"\\\(.*\\\)|\\\[.*\\\]", text, re.DOTALL):
        text = re.sub(r"\\[()\[\]]", " ", text)
    hidden = text.replace(r"\$", "\0").replace("$$", "$")
    if hidden.count("$") % 2 == 0:
        hidden = hidden.replace("$", " ")
    return hidden.replace("\0", "$")


def _without_empty_end(text: str) -> str:
    r"""Removes `\text{.}`, `\text{(final answer)}` or a lone backslash at the end."""
    return re.sub(
        r"(?:\\q?quad\s*)?\\text\s*\{[\s.,;]*\(?(?:final answer)?\)?[\s.]*\}$|(?<!\\)\\$", "", text
    )


def _without_quotes(text: str) -> str:
    match = _WRAPPED.fullmatch(text)
    return match[2] if match else text


def _without_announcement(text: str) -> str:
    upright = _UPRIGHT.match(text)
    if upright and _SAID_FIRST.match(upright[1]):
        text = upright[1] + text[upright.end() :]
    match = _SAID_FIRST.match(text)
    counts = match and (match["what"] is None or is_unit(match["what"], upright=False))
    return text[match.end() :] if match and counts else text


def _without_full_stop(text: str) -> str:
    """Removes a full stop at the end, but not of `p.m.` or an ellipsis."""
    return text if text.endswith((".m.", "...")) else text.removesuffix(".")


def _without_style(text: str) -> str:
    r"""`\text{…}` and braces around the whole."""
    opening = _STYLE.match(text) or re.match(r"\{", text)
    return (
        text[opening.end() : -1]
        if opening and closing(text, opening.end()) == len(text) - 1
        else text
    )


_UNWRAPPING: tuple[Callable[[str], str], ...] = (
    _without_environment, _without_box, _without_bold, _without_dollars, _without_empty_end, _without_quotes, _without_announcement,
    _without_full_stop, _without_style,
)  # fmt: skip


# Whether two answers match


def answer_matches(gold: str, answer: str) -> bool:
    """True if an answer matches one gold answer. The first comparison below that applies to this kind of answer decides."""
    if len(answer) > LONGEST or not answer.strip():
        return False
    expected, given = strip_wrapping(gold), strip_wrapping(answer)
    if not given:
        return False
    if normalized_text(expected) == normalized_text(given):
        return True
    for rule in (_words_match, _choices_match, _times_match):
        if (verdict := rule(expected, given)) is not None:
            return verdict
    words = words_of(expected)
    try:
        gold_tree, answer_tree = parse_answer(expected, words), parse_answer(given, words)
        return (
            gold_tree is not None
            and answer_tree is not None
            and trees_match(gold_tree, answer_tree)
        )
    except RecursionError:  # a product of hundreds of factors
        return False


def _words_match(gold: str, answer: str) -> bool | None:
    """Compares words; None if either side is not only words."""
    gold_words, answer_words = as_words(gold), as_words(answer)
    return None if gold_words is None or answer_words is None else gold_words == answer_words


def as_words(text: str) -> str | None:
    """Words as they are compared, without case and styles; None for text with digits or mathematical symbols."""
    plain = re.sub(r"\s+", " ", _UPRIGHT.sub(r"\1", text)).strip().strip("().").strip()
    return plain.casefold() if re.fullmatch(r"[^\W\d_]{2,}(?:[ '’-][^\W\d_]+)*", plain) else None


_LETTER = re.compile(r"\(\s*([A-Za-z])\s*\)[.:]?|([A-Z])[.:)]?")
_LETTER_WITH_TEXT = re.compile(
    r"\(?\s*([A-Z])\s*[).:]\s*(?!(?:or|and|not|nor|but|if)\b|\\not|\\ne|\(?[A-Z]\)?\W*$)"
    r"(?!.*(?:\b(?:or|and)\b|[,;/&])\s*\(?[A-Z]\s*[).:])([^\s,;|&=<>].*)",
    re.DOTALL,
)
_TAKEN_BACK = re.compile(
    r"\s\(?[A-H][).:]\s*\S|[,;]\s*\(?[A-H]\W*$|\bis [A-H]\W*$|^ is(?:n['’]t)?\b|\b(?:wrong|incorrect)\b|\bis not (?:right|correct)\b"
)
"""Text after the letter of a choice that takes it back: another choice, or a denial."""
_GOLD_LETTER_WITH_TEXT = re.compile(r"\(?[A-Z]\)|[A-Z]:|[A-Z]\.\s*[\d\\$-]")
"""The beginning of a gold answer that is a choice with its text, `(B) 12`; names such as `E. coli` do not match."""


def _choices_match(gold: str, answer: str) -> bool | None:
    """Compares choices by letter, and by text if both have one: `(B)`, `B` and `B. 12` match; None if the gold answer is not a choice."""
    gold_choice, answer_choice = _parse_choice(gold), _parse_choice(answer)
    if gold_choice is None or (
        gold_choice[1] and not _GOLD_LETTER_WITH_TEXT.match(_UPRIGHT.sub(r"\1", gold))
    ):
        return None
    if answer_choice is None:
        return answer_matches(gold_choice[1], answer) if gold_choice[1] else None
    texts = gold_choice[1], answer_choice[1]
    return gold_choice[0] == answer_choice[0] and (not all(texts) or answer_matches(*texts))


def _parse_choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice, `(c)`, `C` or `C.`, and its text (for `C. 12`, the 12)."""
    unstyled = _UPRIGHT.sub(r"\1", text).strip()
    if match := _LETTER.fullmatch(unstyled):
        return (match[1] or match[2]).upper(), ""
    match = _LETTER_WITH_TEXT.fullmatch(unstyled)
    return (match[1], match[2]) if match and not _TAKEN_BACK.search(f" {match[2]}") else None


_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)


def _times_match(gold: str, answer: str) -> bool | None:
    """Compares times of day; None if either side is not one. `17:00` matches `5:00 p.m.`"""
    gold_time, answer_time = _time_of_day(gold), _time_of_day(answer)
    return None if gold_time is None or answer_time is None else gold_time == answer_time


def _time_of_day(text: str) -> tuple[int, int, int, str] | None:
    unstyled = _UPRIGHT.sub(r"\1", text.replace("~", " ").replace("\\ ", " "))
    match = _TIME.fullmatch(unstyled.strip())
    if match is None:
        return None
    hour, half = int(match[1]), (match[4] or "").casefold()
    if hour >= 13:
        hour, half = hour - 12, half or "p"
    return hour, int(match[2]), int(match[3] or 0), half


def normalized_text(text: str) -> str:
    """A text as it is compared character by character: spaces only between digits, no braces around single characters."""
    joined = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", plain_signs(text))
    return re.sub(r"\{([^{}\\])\}", r"\1", joined)


@lru_cache(maxsize=4096)
def parse_answer(text: str, unit_words: frozenset[str]) -> Node | None:
    """An unwrapped answer parsed as mathematics, with `unit_words` as units; None if it cannot be parsed completely."""
    try:
        return parse(text, unit_words)
    except ParseError:
        return None


# Comparison without calculation


def matches_literally(gold: str, answer: str) -> bool:
    """True if an answer equals the gold one without calculation: the same number in digits, or the same characters."""
    if len(answer) > LONGEST or not answer.strip():
        return False
    expected, given = literal_number(gold), literal_number(answer, gold)
    if expected is not None or given is not None:
        return expected == given
    texts = (normalized_text(strip_wrapping(text)).casefold() for text in (gold, answer))
    return len(set(texts)) == 1


def literal_number(text: str, gold: str | None = None) -> Fraction | None:
    """The number that a text writes in digits, without its unit (for 50 %, 50); None if it must be calculated.

    Words after it count as its unit if the `gold` answer has them; units and plurals always do. Without a gold answer all words do,
    except those that change the number.
    """
    unit_words = words_of(text if gold is None else gold)
    tree = parse_answer(strip_wrapping(text), unit_words) if len(text) <= LONGEST else None
    return None if tree is None else numeric_value(tree)


MAX_DIGITS = 4_000
"""Most digits of a number that is written out; Python refuses more than 4,300."""


def voting_key(answer: str) -> str | None:
    """A text that is the same for answers that mean the same, as far as each answer alone shows; None for an empty answer."""
    if len(answer) > LONGEST:
        return None
    number = literal_number(answer)
    unnamed = re.sub(
        r"^[a-zA-Z](?:\([a-zA-Z]\))?=(?=[^=]+$)", "", normalized_text(strip_wrapping(answer))
    )
    if number is None or max(abs(number.numerator), number.denominator) >= 10**MAX_DIGITS:
        return as_words(unnamed) or unnamed or None
    return str(number)
