r"""Mathematical answers in one way of writing, without a computer algebra system.

Two answers agree if both are numbers and these are equal, or if neither is and both are written alike once LaTeX's ways of saying
the same are gone. A number never agrees with anything else, so 3 is not 4 and not `x`.

Numbers are exact: `3`, `3.0`, `1,234`, `-\frac{1}{2}`, `1\frac{1}{2}`, `1.5\times10^{3}`, also in `\boxed{}`, between dollars, after
`x =`, in bold, with a currency before or a unit behind, in `\text{}` or in plain words: `72 km`, `72km`, `72 miles per hour`. Words
that are no unit, such as `or`, `dozen` and `x`, leave no number. A unit does not matter, unless both numbers have different ones in
plain words. A fraction and a decimal, neither of them whole, may differ by a millionth of themselves, so that 0.333333 is 1/3; two
decimals are equal or not. `50\%` is 50, as answers in per cent are mostly written, and 0.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

ROUNDING = Fraction(1, 1_000_000)
"""Share by which a decimal may differ from the fraction that it stands for: six digits."""

LONGEST = 2_000
"""Characters of an answer; more is no answer, and to read it would take long."""

_DIGITS = 400
"""Characters of a number; a longer one is read as text."""

_WRITTEN_OTHERWISE = (
    ("−", "-"),
    ("–", "-"),
    ("×", r"\times "),
    ("·", r"\cdot "),
    ("÷", "/"),
    ("π", r"\pi "),
    ("∞", r"\infty "),
    ("∅", r"\emptyset "),
    ("≤", r"\le "),
    ("≥", r"\ge "),
    ("≠", r"\ne "),
    ("°", r"^\circ "),
    ("**", "^"),
)
"""Signs that LaTeX has a command for."""

_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_METRES = re.compile(r"(?<=\d)\s*m[²³](?=\s*\.?\s*$)")
"""A unit of one letter, which it is when it is written like that; `m^2` is a square."""
_EXPONENT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+|ⁿ")
_ROOTS = (
    (
        re.compile(r"(?:√|(?<![a-zA-Z\\])sqrt)\s*\(((?:[^()]|\([^()]*\))*)\)"),
        r"\\sqrt{\1}",
    ),
    (re.compile(r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"√(?=\s*\()"), "sqrt"),
)
"""Roots over what is in brackets, a number or a letter."""

_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
        (r"\\[bB]ig+[lr]?(?![a-zA-Z])", ""),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", ""),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"(?i)(?<![a-z\\])infinity(?![a-z])", r"\\infty"),
        (r"\{,\}", ","),
        (r"\\[,!;:]|\\quad(?![a-zA-Z])|\\qquad(?![a-zA-Z])|~|(?<!\\)\\(?=\s)", ""),
        (r"\\\$", ""),
        (r"\\%|(?i:(?<=\d)\s*per ?cent(?![a-z]))", "%"),
        # No letter beside it: `2 and 3` is a list, `salt and pepper` is none. The space keeps `2 and 345` from being 2,345.
        (
            r"(?<=[\d)}\]]),?\s*(?:\\text\s*\{\s*and\s*\}|(?<![a-zA-Z])and(?![a-zA-Z]))\s*(?=[-+\d({\[\\.])",
            ", ",
        ),
    )
)

_BOLD = re.compile(r"\s*\*\*([^*]+)\*\*(?![\w(\\{*^])")
_UNIT = re.compile(r"(?<=[\d}.])\s*\\(?:text|mathrm|textrm|mbox)\{([^{}\d]*)\}(?:\^\{?\d\}?)?\s*$")
_JOINED = r"(?:km|cm|mm|kg|lbs?|oz|mph)(?![a-z])"
"""Units that may stand behind a number without a space: no product of two letters is likely to be meant."""
_SPOKEN = re.compile(
    rf"(?P<number>.*[\d}}.])(?:\s+|(?={_JOINED}))"
    r"(?P<unit>[a-z]{2,}(?:(?:\s+|/)[a-z]{2,}){0,3}(?:\^?[23]|/[a-z])?)",
    re.IGNORECASE | re.DOTALL,
)
_NO_UNIT = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
    twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion dozen score
    half halves third quarter fourth fifth sixth seventh eighth ninth tenth hundredth thousandth
    plus minus times over divided multiplied squared cubed mod modulo remainder factorial root power pi phi
    sin cos tan cot sec csc log ln exp sqrt max min gcd lcm abc xyz
    or and not no nor but to than is isn are if maybe perhaps about approximately off more less negative wrong either
    between below above under
    """.split()
)
"""Words behind a number that are no unit: they change it or take it back."""
_SHORT_UNITS = frozenset(
    """
    km cm mm dm nm mi yd ft in kg mg lb oz ml dl cl pt qt hr ms ns am pm hz mb gb tb kb kw kj hp db ha sq cu of by at on
    """.split()
)
"""Words of two letters that can stand in a unit; others are letters that the number is multiplied by."""
_STYLED = re.compile(
    r"\\(?:text|mathrm|mathbf|mathit|textrm|textbf|textit|mbox|operatorname)\{([^{}]*)\}"
)
_BRACKETED = re.compile(r"\(\s*([a-zA-Z]|[+-]?[\d.]+)\s*\)")
_NAMED = re.compile(r"[a-zA-Z](?:\([a-zA-Z]\))?\s*=(?!=)([^=]+)", re.DOTALL)
_SEGMENT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SPACED = re.compile(r"[+-]?\d{1,3}(?:\s\d{3})+(?:\.\d+)?")
_PLAIN = re.compile(rf"[+-]?{_DECIMAL}")
_SCIENTIFIC = re.compile(
    rf"([+-]?{_DECIMAL})(?:e|(?:\*|\\times|\\cdot|x)10\^)\{{?([+-]?\d{{1,3}})\}}?", re.IGNORECASE
)
_QUOTIENT = re.compile(rf"([+-]?{_DECIMAL})/([+-]?{_DECIMAL})")
_FRACTION = re.compile(rf"([+-]?)(\d*)\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}")
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)/(\d+)")
_AMOUNT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
_IN_TEXT = re.compile(
    rf"(?:(?<![\w)}}])[-−–])?(?:\d*\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|\d+ \d+/\d+|(?:{_AMOUNT})(?:/(?:{_AMOUNT})"
    r"|e[+-]?\d{1,3}(?!\w)|\s?(?:[*×x]|\\times|\\cdot)\s?10\^(?:\{-?\d{1,3}\}|-?\d{1,3}))?)(?:\s?\\?%)?",
    re.IGNORECASE,
)
"""A number among words: `-3`, `1,234.5`, `.5`, `1/2`, `1 1/2`, `1e6`, `2 × 10^3`, `50 %`."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as an answer gives it."""

    value: Fraction
    percent: bool = False
    """Whether a per cent sign stands behind `value`."""
    fraction: bool = field(default=False, compare=False)
    """Whether it is written as one, so that a decimal can be no more than near it."""
    unit: str = field(default="", compare=False)
    """In plain words, without their plural."""


def agree(gold: str, answer: str) -> bool:
    """Whether an answer says the same as the gold one; False where it says nothing."""
    if len(answer) > LONGEST:
        return False
    expected, given = number(gold), number(answer)
    if expected is not None and given is not None:
        return same_number(expected, given)
    if expected is not None or given is not None:
        return False
    written = canonical(answer)
    return written != "" and written == canonical(gold)


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal; a percentage that meets a plain number may stand for itself and for its hundredth part."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    rounded = gold.fraction != answer.fraction
    if gold.percent == answer.percent:
        return _close(gold.value, answer.value, rounded)
    golds = (gold.value, gold.value / 100) if gold.percent else (gold.value,)
    answers = (answer.value, answer.value / 100) if answer.percent else (answer.value,)
    return any(_close(one, other, rounded) for one in golds for other in answers)


def number(text: str) -> Number | None:
    """The number that a text is, None if it is none."""
    bare, unit = _without_unit(bare_maths(text))
    percent = bare.endswith("%")
    bare = re.sub(r"^([+-]?)\s*[$€£¥]\s*", r"\1", bare.rstrip("%").strip())
    value = _value(bare) if len(bare) <= _DIGITS else None
    return None if value is None else Number(value, percent, "/" in bare or r"\frac" in bare, unit)


def last_number(text: str) -> str | None:
    """The last number that a text holds, as it is written there; None where it holds none."""
    found = [match.group() for match in _IN_TEXT.finditer(text)]
    return found[-1] if found else None


def canonical(text: str) -> str:
    """A text that is no number as it is compared: small letters, no spaces, no braces around single signs."""
    unstyled = _STYLED.sub(r"\1", bare_maths(text))
    products = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", "*", unstyled)
    joined = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", products.strip())  # `1 23` is not `12 3`
    return re.sub(r"\{([^{}\\])\}", r"\1", joined).casefold()


def one_spelling(answer: str) -> str | None:
    """A text that is the same for answers that say the same, as far as that can be told of each alone; None where nothing is said.

    Of a number it is the value, without its unit: `1/2` for 0.5 and `50` for 50 %. A decimal that stands for a fraction is another
    number here, and what only algebra can tell to be equal is another text.
    """
    if len(answer) > LONGEST:
        return None
    read = number(answer)
    return (canonical(answer) or None) if read is None else str(read.value)


def bare_maths(text: str) -> str:
    """What is meant, without what surrounds it: a box, dollars, `x =`, a full stop, brackets around a letter or number.

    Commands that say the same become one.
    """
    text = _BOLD.sub(r"\1", text, count=1) if _BOLD.match(text) else text
    for sign, command in _WRITTEN_OTHERWISE:
        text = text.replace(sign, command)
    inner = boxed(text)
    inner = _METRES.sub("", _segment(text if inner is None else inner))
    inner = _EXPONENT.sub(_lowered, inner)
    for pattern, replacement in (*_ROOTS, *_REWRITTEN):
        inner = pattern.sub(replacement, inner)
    inner = inner.strip().removesuffix(".").strip()
    inner = _unwrapped(inner)
    named = _NAMED.fullmatch(inner)
    inner = named.group(1).strip() if named else inner
    bracketed = _BRACKETED.fullmatch(inner)
    return bracketed.group(1) if bracketed else inner


def _lowered(exponent: re.Match[str]) -> str:
    """`^2` for ², `^{10}` for ¹⁰."""
    digits = exponent.group().translate(_RAISED)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{}` or `\fbox{}` of a text; None where there is none, or it is not closed."""
    found = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not found:
        return None
    start = found[-1].end()
    end = _closing(text, start)
    return None if end is None else text[start:end]


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened just before `start` closes."""
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return start + brace.start()
    return None


def _segment(text: str) -> str:
    """The last piece of mathematics between delimiters; the whole text where none is marked."""
    joined = re.sub(r"(?<!\$)\$,?\s*and\s*\$(?!\$)", " and ", text)  # `$2$ and $3$`
    found = _SEGMENT.findall(re.sub(r"\\\$", "", joined))
    return next(part for part in found[-1] if part) if found else text


def _unwrapped(text: str) -> str:
    """Without braces or a style around the whole."""
    while True:
        if text.startswith("{") and _closing(text, 1) == len(text) - 1:
            text = text[1:-1].strip()
        elif styled := _STYLED.fullmatch(text):
            text = styled.group(1).strip()
        else:
            return text


def _without_unit(text: str) -> tuple[str, str]:
    """A number without the unit behind it, and that unit if it is one in plain words."""
    styled = _UNIT.search(text)
    if styled:
        return (text[: styled.start()] if _is_unit(styled.group(1)) else text).strip(), ""
    spoken = _SPOKEN.fullmatch(text) if len(text) <= _DIGITS else None
    if spoken is None or not _is_unit(spoken["unit"]) or not _known_where_short(spoken["unit"]):
        return text.strip(), ""
    return spoken["number"], " ".join(_singular(word) for word in spoken["unit"].split())


def _is_unit(text: str) -> bool:
    """Whether words behind a number can be its unit."""
    return _NO_UNIT.isdisjoint(_singular(word) for word in re.findall("[a-zA-Z]+", text))


def _known_where_short(unit: str) -> bool:
    pairs = re.findall(r"(?<![a-z])[a-z]{2}(?![a-z])", unit.casefold())
    return _SHORT_UNITS.issuperset(pairs)


def _singular(word: str) -> str:
    small = word.casefold()
    return small if small in _NO_UNIT or len(small) < 3 else small.removesuffix("s")


def _value(text: str) -> Fraction | None:
    if _GROUPED.fullmatch(text) or _SPACED.fullmatch(text):
        return Fraction(re.sub(r"[,\s]", "", text))
    if mixed := _MIXED.fullmatch(text):
        return _mixed(*mixed.groups())
    tight = re.sub(r"\s+", "", text) if not re.search(r"\d\s+[\d.]", text) else text
    if _PLAIN.fullmatch(tight):
        return Fraction(tight)
    if scientific := _SCIENTIFIC.fullmatch(tight):
        return Fraction(scientific.group(1)) * Fraction(10) ** int(scientific.group(2))
    if quotient := _QUOTIENT.fullmatch(tight):
        return _divided(Fraction(quotient.group(1)), Fraction(quotient.group(2)))
    if fraction := _FRACTION.fullmatch(tight):
        return _mixed(*fraction.groups())
    return None


def _mixed(sign: str, whole: str, over: str, under: str) -> Fraction | None:
    r"""`1\frac{1}{2}` is one and a half."""
    part = _divided(Fraction(over), Fraction(under))
    return None if part is None else (int(whole or 0) + part) * (-1 if sign == "-" else 1)


def _divided(over: Fraction, under: Fraction) -> Fraction | None:
    return over / under if under else None


def _close(gold: Fraction, answer: Fraction, rounded: bool) -> bool:
    """Whether two numbers are equal, or one is the other `rounded`."""
    if gold == answer:
        return True
    whole = gold.denominator == 1 or answer.denominator == 1
    return rounded and not whole and abs(gold - answer) <= ROUNDING * max(abs(gold), abs(answer))
