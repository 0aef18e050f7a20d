r"""Where an answer stands in a text, and whether it is right.

An answer is what stands in the last answer tag, else in the last `\boxed{}`, else what the last line calls the answer; boxes with only
commas and `and` between them are one answer. What stands in a completion's reasoning, before `</think>` or behind a
`<think>` that is not closed, is never an answer.

An answer is right if it is written as the gold one is, or if both are read as mathematics, whole, and say the same
(see `formula_reader` and `meaning`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from groupwise.rewards.equality import number_of
from groupwise.rewards.formula_reader import LONGEST, Node, Unread, plain_signs, read
from groupwise.rewards.meaning import same
from groupwise.rewards.units import is_unit, words_of

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
_BETWEEN = re.compile(r"[\s$,;.]*(?:(?:and|or|\\text\s*\{\s*(?:and|or)\s*\})[\s$,;]*)?")


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{}` or `\fbox{}` of a text; None where there is none, or it is not closed.

    Boxes that follow each other with only commas, `and` or `or` between them are a list.
    """
    boxes: list[tuple[int, int, str]] = []
    place = 0
    while found := _BOX.search(text, place):
        inside = _inside(text, found)
        if inside is None:
            return None
        place = inside[0]
        boxes.append((found.start(), *inside))
    while len(boxes) > 1 and not boxes[-1][2].strip():
        boxes.pop()  # an empty box says nothing
    if not boxes:
        return None
    listed = [boxes[-1][2]]
    for before, after in zip(boxes[-2::-1], boxes[:0:-1], strict=False):
        between = _BETWEEN.fullmatch(text, before[1], after[0])
        if between is None or "." in between.group() or not between.group().strip(" $"):
            break
        listed.insert(0, before[2])
    return ", ".join(listed)


def _inside(text: str, found: re.Match[str]) -> tuple[int, str] | None:
    r"""Where a box ends, and what is in it; of `\boxed 5` the next sign or command."""
    if not found.group().endswith("{"):
        sign = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|\S").match(text, found.end())
        return None if sign is None else (sign.end(), sign.group())
    end = closing(text, found.end())
    return None if end is None else (end + 1, text[found.end() : end])


def closing(text: str, start: int) -> int | None:
    """Where the brace that was opened just before `start` closes."""
    depth = 1
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


_AMOUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
_IN_TEXT = re.compile(
    rf"(?:(?<![\w)}}])[-−–])?(?:\d*\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|\d+ \d+/\d+|(?:{_AMOUNT})(?:/(?:{_AMOUNT})"
    r"|e[+-]?\d{1,3}(?!\w)|\s?(?:[*×x]|\\times|\\cdot)\s?10\^(?:\{-?\d{1,3}\}|-?\d{1,3}))?)(?:\s?\\?%)?",
    re.IGNORECASE,
)
"""A number among words: `-3`, `1,234.5`, `.5`, `1/2`, `1 1/2`, `1e6`, `2 × 10^3`, `50 %`."""

# What surrounds an answer

_STYLED = r"\\(?:text|mathrm|mathbf|mathit|textrm|textbf|textit|mbox|boxed|fbox)\s*\{"
_STYLE = re.compile(_STYLED)
_UPRIGHT = re.compile(_STYLED + r"([^{}]*)\}")
_SAID_FIRST = re.compile(
    r"(?:(?:so|thus|hence|therefore|then),?\s+)?(?:the\s+)?(?:(?:final|correct|right)\s+)?(?:answer|solution|result|value|option|choice)"
    r"(?:\s+is|\s*=|\s*:|\s+is\s*:)\s*:?\s*|=\s*|####\s*"
    r"|(?:(?:so|thus|hence|therefore|then),?\s+)?the(?P<what>(?:\s+[a-z]{3,}){1,3})\s+(?:is|are|was|were|equals)\s+(?=[$\\\d-])",
    re.IGNORECASE,
)
_WRAPPED = re.compile(r"([\"'`*_])(?!\1)([^\"'`*_]+)\1")
_HEADING = re.compile(r"\W*(?:final\s+)?answer\W*", re.IGNORECASE)
_ANNOUNCED = re.compile(r"(?:^\s*####|\banswer\W{0,4}(?:is\s*:?|:|=)\**)\s*(.*)$", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_OPTION = re.compile(r"\(\s*([A-Za-z])\s*\)[.:]?|([A-Z])[.:)]?")
_OPTION_WITH_TEXT = re.compile(
    r"\(?\s*([A-Z])\s*[).:]\s*(?!(?:or|and|not|nor|but|if)\b|\\not|\\ne|\(?[A-Z]\)?\W*$)"
    r"(?!.*(?:\b(?:or|and)\b|[,;/&])\s*\(?[A-Z]\s*[).:])([^\s,;|&=<>].*)",
    re.DOTALL,
)
_LISTED = re.compile(r"\(?[A-Z]\)|[A-Z]:|[A-Z]\.\s*[\d\\$-]")
"""Of a gold answer: `E. coli` is none."""


def bare(text: str) -> str:
    """An answer without what surrounds it: Markdown, dollars, a box, `The answer is`, a full stop, a style around the whole."""
    text = text.strip()
    while True:
        before = text
        inner = boxed(text)
        text = text if inner is None or _numbers_around_box(text, inner) else inner
        text = (
            re.sub(r"\*\*([^*]+)\*\*(?![\w(\\{*^])", r"\1", text, count=1)
            if text.startswith("**")
            else text
        )
        text = re.sub(
            r"\\text\s*\{[\s.,;]*\}$|(?<!\\)\\$", "", _without_dollars(text).strip()
        ).strip()
        text = wrapped[2] if (wrapped := _WRAPPED.fullmatch(text)) else text
        said = _SAID_FIRST.match(text)
        if said and (said["what"] is None or is_unit(said["what"], upright=False)):
            text = text[said.end() :]
        text = (
            text.strip().removesuffix(".").strip()
            if not text.endswith((".m.", "..."))
            else text.strip()
        )
        styled = _STYLE.match(text)
        if styled and closing(text, styled.end()) == len(text) - 1:
            text = text[styled.end() : -1].strip()
        if text.startswith("{") and closing(text, 1) == len(text) - 1:
            text = text[1:-1].strip()
        if text == before:
            return text


def _numbers_around_box(text: str, inner: str) -> bool:
    """Whether numbers without words stand around a box: then the box alone is not the answer."""
    around = re.sub(r"\\[a-zA-Z]+", " ", text.replace(inner, " "))
    return bool(re.search(r"\d", around)) and not re.search(r"[^\W\d_]{2,}", around)


def _without_dollars(text: str) -> str:
    r"""Without the marks of mathematics; a dollar before a number that has no partner is money."""
    text = (
        re.sub(r"\\[()\[\]]", " ", text)
        if re.search(r"\\\(.*\\\)|\\\[.*\\\]", text, re.DOTALL)
        else text
    )
    hidden = text.replace(r"\$", "\0").replace("$$", "$")
    if hidden.count("$") % 2 == 0:
        hidden = hidden.replace("$", " ")
    return hidden.replace("\0", "$")


def in_letters(text: str) -> str | None:
    """Words as they are compared, without case and styles; None for what has digits or signs of mathematics."""
    plain = re.sub(r"\s+", " ", _UPRIGHT.sub(r"\1", text)).strip().strip("().").strip()
    return plain.casefold() if re.fullmatch(r"[^\W\d_]{2,}(?:[ '’-][^\W\d_]+)*", plain) else None


def written(text: str) -> str:
    """A text as it is compared by its signs alone: no spaces, no braces around single signs."""
    joined = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", plain_signs(text))
    return re.sub(r"\{([^{}\\])\}", r"\1", joined)


@lru_cache(maxsize=4096)
def tree_of(text: str, known: frozenset[str]) -> Node | None:
    """What a bare answer says as mathematics, with `known` words as units; None where that cannot be read whole."""
    try:
        return read(text, known)
    except Unread:
        return None


def agrees(gold: str, answer: str) -> bool:
    """Whether an answer says what one gold answer says."""
    if len(answer) > LONGEST or not answer.strip():
        return False
    expected, given = bare(gold), bare(answer)
    if not given:
        return False
    if written(expected) == written(given):
        return True
    words = in_letters(expected), in_letters(given)
    if words[0] is not None and words[1] is not None:
        return words[0] == words[1]
    choice, chosen = _option(expected), _option(given)
    if choice and choice[1] and not _LISTED.match(_UPRIGHT.sub(r"\1", expected)):
        choice = None
    if choice and chosen:
        texts = choice[1], chosen[1]
        return choice[0] == chosen[0] and (not all(texts) or agrees(*texts))
    if choice and choice[1]:
        return agrees(choice[1], given)
    clocks = _clock(expected), _clock(given)
    if clocks[0] is not None and clocks[1] is not None:
        return clocks[0] == clocks[1]
    try:
        known = words_of(expected)
        one, other = tree_of(expected, known), tree_of(given, known)
        return one is not None and other is not None and same(one, other)
    except RecursionError:  # a product of hundreds of factors
        return False


def as_written(gold: str, answer: str) -> bool:
    """Whether an answer is the gold one without any working out: the same number in digits, or the same signs."""
    if len(answer) > LONGEST or not answer.strip():
        return False
    expected, given = number(gold), number(answer, gold)
    if expected is not None or given is not None:
        return expected == given
    return written(bare(gold)).casefold() == written(bare(answer)).casefold()


def number(text: str, gold: str | None = None) -> Fraction | None:
    """The number that a text writes in digits, of a quantity without its unit, of 50 % the 50; None for what must be worked out.

    Words behind it are its unit if the `gold` answer has them, units and plurals always; without a gold answer all but those that
    change a number.
    """
    known = words_of(text if gold is None else gold)
    tree = tree_of(bare(text), known) if len(text) <= LONGEST else None
    return None if tree is None else number_of(tree)


def one_spelling(answer: str) -> str | None:
    """A text that is the same for answers that say the same, as far as that can be told of each alone; None where nothing is said."""
    if len(answer) > LONGEST:
        return None
    read_as = number(answer)
    unnamed = re.sub(r"^[a-zA-Z](?:\([a-zA-Z]\))?=(?=[^=]+$)", "", written(bare(answer)))
    return (in_letters(unnamed) or unnamed or None) if read_as is None else str(read_as)


def announced(text: str) -> str | None:
    """What the last line of a text calls its answer, `#### 72`, `Answer: 72`, `So the answer is 72.`, or what stands in it below the
    heading `Answer`; None where nothing is called so."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and _HEADING.fullmatch(lines[-2]):
        return lines[-1].strip("* ")
    found = _ANNOUNCED.search(lines[-1]) if lines else None
    return found[1].removesuffix(" I hope it is correct.").strip("* ") or None if found else None


def last_number(text: str) -> str | None:
    """The last number that a text holds, as it is written there; None where it holds none."""
    found = [match.group() for match in _IN_TEXT.finditer(text)]
    return found[-1] if found else None


def _option(text: str) -> tuple[str, str] | None:
    """The letter of a choice, `(c)`, `C` or `C.`, and what it stands for, of `C. 12` the 12."""
    unstyled = _UPRIGHT.sub(r"\1", text).strip()
    if found := _OPTION.fullmatch(unstyled):
        return (found[1] or found[2]).upper(), ""
    found = _OPTION_WITH_TEXT.fullmatch(unstyled)
    return (found[1], found[2]) if found else None


def _clock(text: str) -> tuple[int, int, int, str] | None:
    unstyled = _UPRIGHT.sub(r"\1", text.replace("~", " ").replace("\\ ", " "))
    found = _CLOCK.fullmatch(unstyled.strip())
    if found is None:
        return None
    return int(found[1]), int(found[2]), int(found[3] or 0), (found[4] or "").casefold()
