r"""The answer in `\boxed{}`: the content of a text's last box, with the text that belongs to it.

A box is an answer by itself if it is surrounded by words, a relation (`x = \boxed{3}`), punctuation or the end of a formula, or
followed by a unit. Boxes with only commas, `and` or `or` between them are one list. If something else belongs to the box
(`-\boxed{3}`, `2\boxed{3}`, `\sqrt{\boxed{3}}`, `not \boxed{3}`, another box in the same sentence), the whole formula or line is
the answer, because a part of it could be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
_JOINT = re.compile(
    r"(?:[\s$,;.*]|\\[()\[\]]|\\(?:quad|qquad|[,;:! ]))*(?:(?:and|or|\\text\s*\{\s*(?:and|or)\s*\})(?:[\s$,;*]|\\[()\[\]])*"
    r"|\n\s*(?:[-*•]|\d+[.)])\s*[$*]*)?"
)
"""Text between the boxes of a list."""
_MANY = 100
"""Most boxes of a sentence that are examined."""
_NEAR = 200
"""Characters on each side of a box that decide if something belongs to it."""
_SENTENCE_ENDS = re.compile(r"\n|[.!?:]\s")


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    inside: str


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` or `\fbox{}`, with the text that belongs to it; None if there is none, or it is not closed."""
    boxes = list(_boxes(text))
    if not boxes or boxes[-1] is None:
        return None
    closed_boxes = [box for box in boxes if box is not None]
    while len(closed_boxes) > 1 and not closed_boxes[-1].inside.strip():
        closed_boxes.pop()  # an empty box is not an answer
    group = [closed_boxes[-1]]
    is_separate = False
    for box in closed_boxes[-2 : -_MANY - 2 : -1]:
        between = text[box.end : group[0].start]
        is_joined = _JOINT.fullmatch(between) is not None and bool(re.search(r"\S", between))
        if not is_joined and _SENTENCE_ENDS.search(between):
            break
        is_separate |= not is_joined
        group.insert(0, box)
    if len({box.inside.strip() for box in group}) == 1 and len(group) > 1:
        return group[-1].inside
    start, end = group[0].start, group[-1].end
    formula_start, formula_end, in_formula = _formula_around(text, start, end)
    before, after = (
        text[max(formula_start, start - _NEAR) : start],
        text[end : min(formula_end, end + _NEAR)],
    )
    if is_separate or not (_ends_apart(before, in_formula) and _begins_apart(after, in_formula)):
        # The formula is the answer, with each box as a bracket.
        formula = text[formula_start:formula_end]
        pieces: list[str] = []
        position = 0
        for box in _boxes(formula):
            if box is None:
                break
            pieces += [formula[position : box.start], f"({box.inside})"]
            position = box.end
        return "".join([*pieces, formula[position:]])
    return ", ".join(box.inside for box in group)


def _boxes(text: str) -> Iterator[_Box | None]:
    """The boxes in order; None for one that is not closed, which ends the search."""
    position = 0
    while match := _BOX.search(text, position):
        # The end of a box and its content; for `\boxed 5`, the next character or command.
        if not match.group().endswith("{"):
            token = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|\S").match(text, match.end())
            inside = None if token is None else (token.end(), token.group())
        else:
            end = closing(text, match.end())
            inside = None if end is None else (end + 1, text[match.end() : end])
        if inside is None:
            yield None
            return
        position = inside[0]
        yield _Box(match.start(), *inside)


def closing(text: str, start: int) -> int | None:
    """Index of the brace that closes the one opened just before `start`; None if there is none."""
    depth = 1
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


# What belongs to a box

_DELIMITER = re.compile(r"(?<!\\)\$\$?|\\[()\[\]]")
_FORMULA = 2_000
"""Characters around a box in which its formula is searched."""


def _formula_around(text: str, start: int, end: int) -> tuple[int, int, bool]:
    """Start and end of the formula around a position, and True; or, outside of a formula, those of its line, and False."""
    line = text.rfind("\n", 0, start) + 1
    delimiters = list(_DELIMITER.finditer(text, max(0, start - _FORMULA), start))
    closed = _DELIMITER.search(text, end, end + _FORMULA)
    if len(delimiters) % 2 and closed is not None:
        return delimiters[-1].end(), closed.start(), True
    line_end = text.find("\n", end)
    return line, len(text) if line_end < 0 else line_end, False


_STYLES = r"(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|displaystyle|large|Large|huge|Huge|color|textcolor|underline|left)"
_SAYS_NO = frozenset("not or and nor neither except without isn never maybe perhaps either".split())
_CHANGES_IT = frozenset(
    "or nor not mod choose factorial squared cubed times plus minus over divided".split()
)
"""Words after a box that turn it into another answer."""
_APART_BEFORE = re.compile(
    r"(?:[=≈→⇒⟹∴:;.&(\[\"'`“‘：，；。（]|[-=]>|<[^<>\n]{1,20}>|\\\\"
    r"|\\(?:approx|implies|Rightarrow|Longrightarrow|longrightarrow|rightarrow|to|therefore|iff|equiv|in|quad|qquad"
    rf"|{_STYLES}|[,;:! $]))$"
)
_DASH = re.compile(r"(?:^\s*[#>]+|(?:^|\w)\s*[-*•])\s+[$*]*$")
"""A heading, a quote, a bullet, or a dash between words: not a minus sign."""
_APART_BEHIND = re.compile(
    r"\s*(?:$|\^\s*\{?\s*\\circ|°|\\?%|\\(?:text\w*|mathrm|mbox)\b|\\(?:quad|qquad|right|[,;:! )\]])"
    r"|[.:;?&=≈)}\]\"'`”’。，；：？！）]|<(?=[/|a-zA-Z])|\\\\|\\(?:approx|implies|Rightarrow|iff|end)\b)"
)


def _ends_apart(before: str, in_formula: bool) -> bool:
    """True if the text before a box does not belong to it."""
    if not in_formula and _DASH.search(before):
        return True
    if in_formula and re.search(r"(?<![a-zA-Z\\])[a-zA-Z]+$", before):
        return False  # a factor
    before = before.rstrip("$* \t") if not in_formula else before.rstrip()
    brace = re.search(rf"(?:\\{_STYLES}\s*(?:\{{[^{{}}]*\}}\s*)?)?(?<!\\)\{{$", before)
    if brace and (
        brace.group() != "{"
        or not re.search(r"\\[A-Za-z]+(?:\{[^{}]*\}|\[[^\]]*\])?\{$|[\^_]\{$", before)
    ):
        return _ends_apart(before[: brace.start()], in_formula)
    if not before or _APART_BEFORE.search(before):
        return True
    if re.search(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}$", before):
        return not _SAYS_NO & {
            word.casefold() for word in re.findall(r"[a-zA-Z]+", before[before.rfind("\\") :])
        }
    if before.endswith(","):
        return not in_formula
    word = re.search(r"(?:^|[^\w\\])([^\W\d_]{2,}|a)$|([^\W\d_a-zA-Z])$", before)
    return word is not None and (word[1] or "").casefold() not in _SAYS_NO


def _begins_apart(after: str, in_formula: bool) -> bool:
    """True if the text after a box does not belong to it."""
    if not in_formula:
        after = after.lstrip("$* \t")
        if re.match(r"!?\s*$|!\s", after):
            return True
    if _APART_BEHIND.match(after):
        return not re.match(r"[)\]}\s]*+[.,;]?\s*+(?:or|nor)\b", after)
    if re.match(r"\s*,", after):
        return not re.match(r"\s*,\s*(?:[-+\d\\(]|or\b)", after)
    word = re.match(r"\s+([^\W\d_]{2,})\b(.*)|([^\W\d_]{2,})\b(.*)", after, re.DOTALL)
    if word is None:
        return False
    first, rest = (word[1] or word[3]).casefold(), word[2] or word[4] or ""
    if first in _CHANGES_IT:
        return False
    if first == "and":
        return not re.match(r"\s*(?:\$\s*)?[-+\d\\(]", rest)
    return not (
        first in ("is", "are", "was")
        and re.match(r"\s*(?:not|n['’]t|wrong|incorrect|false)\b", rest)
    )
