r"""Parses mathematical notation completely: LaTeX, Unicode symbols and plain text become one tree, or `ParseError` is raised.

Nothing is skipped. If a part is not in the grammar (an integral, a word that is not a unit, an unclosed bracket), the whole text is
refused, so a part of an answer is never compared in place of the whole. Parsing takes linear time in the length of a text.

    elements   relation (`,` `;` `or` `and` relation)*
    relation   quantity ((`=` `<` `≤` `∈` …) quantity)*  a chain is one relation
    quantity   currency? sum (`%` | unit)?
    sum        product ((`+` `-` `±` `∪` `∩` `∖`) product)*
    product    factor ((`·` `/` or nothing) factor)*      juxtaposition is a product
    factor     base (`^` exponent | `!` | `°`)*
    base       number (`_` base of digits)? | letter (`_` index)? `'`* | function factor | bracket elements bracket | …
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from groupwise.tasks.rewards.units import (
    can_follow_number,
    is_joined_unit,
    is_rate,
    is_unit,
    unit_of,
)

LONGEST = 2_000
"""Longest text that is parsed, in characters."""

DEEPEST = 40
"""Most levels of nested brackets."""


class ParseError(ValueError):
    """The text, or a part of it, is not in the grammar."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a formula: its kind and its parts."""

    kind: str
    """`number`, `name`, `constant`, `+`, `*`, `/`, `^`, `±`, `call`, `tuple`, `interval`, `set`, `list`, `relation`, …"""
    parts: tuple[Node, ...] = ()
    name: str = ""
    """Name of a name, constant or function; the signs of a relation or of an interval's ends; the unit of a quantity."""
    value: Fraction = Fraction(0)
    """Value of a number."""
    decimal: bool = False
    """A number that is written with a decimal point, and so may be rounded."""


def number_node(value: int | Fraction, decimal: bool = False) -> Node:
    """A number."""
    return Node("number", value=Fraction(value), decimal=decimal)


# Different notations with the same meaning

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "∅": r"\emptyset ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "°": r"^\circ ", "**": "^", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "…": r"\ldots ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "→": r"\to ", "′": "'", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    "∖": r"\setminus ", "℃": r"^\circ C", "℉": r"^\circ F", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
        "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split(),
        strict=True,
    )
)
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    ord("，"): ord(","),
    ord("、"): ord(","),
    ord("。"): ord("."),
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SAME_COMMANDS = {
    r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom", r"\le": "leq leqslant", r"\ge": "geq geqslant", r"\ne": "neq",
    "<": "lt", ">": "gt", r"\emptyset": "varnothing O", r"\ldots": "dots cdots dotsc dotsb dotso",
    "|": "lvert rvert vert lVert rVert Vert", r"\{": "lbrace", r"\}": "rbrace", "[": "lbrack", "]": "rbrack",
    " and ": "land wedge", " or ": "lor vee",
}  # fmt: skip
"""LaTeX's other commands for the same sign."""
_REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<=\d)\s*m([²³])(?=\s*\.?\s*$)", r"\\text{ m}\1"),
    (r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+|ⁿ", lambda match: f"^{{{match.group().translate(_RAISED)}}}"),
    (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match.group().translate(_LOWERED)}}}"),
    (r"([∛∜])", lambda match: rf"\sqrt[{'34'['∛∜'.index(match.group())]}]"),
    (r"√", r"\\sqrt "),
    (
        r"\\(?:left|right|middle|displaystyle|textstyle|limits|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|Biggl?|Biggr)(?![a-zA-Z])\.?",
        "",
    ),
    *(
        (rf"\\(?:{'|'.join(names.split())})(?![a-zA-Z])", command.replace("\\", r"\\"))
        for command, names in _SAME_COMMANDS.items()
    ),
    (r"\.\.\.", r"\\ldots"),
    (
        r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:boldsymbol|mathbf|bf|underline|mathit)(?=\s*\{?\s*[-\d])",
        "",
    ),
    (r"(\.\d*)\\dot\s*\{?(\d)\}?$", r"\1\\overline{\2}"),
    (r"(?<![\d.])(\d*\.\d*?)(\d{1,3}?)\2{2,}\s*\\ldots\s*$", r"\1\\overline{\2}"),
    (r"(?<!\w)\(?([0-9A-F]+)\)?\s*(?:\\text\s*\{\s*)?(?:in\s+)?base\s*\}?\s*(\d+)\}?$", r"\1_{\2}"),
    (r"^\(([0-9]+)\)_", r"\1_"),
    (r"\\var(epsilon|phi|theta|rho|sigma)(?![a-zA-Z])", r"\\\1"),
    (
        r"\\textdegree(?![a-zA-Z])|\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])",
        "°",
    ),
    (r"\\%", "%"),
    (r"(?<!\\)\\[,;:!\s]|\\quad(?![a-zA-Z])|\\qquad(?![a-zA-Z])|~", " "),
)
_REWRITTEN = tuple((re.compile(pattern), replacement) for pattern, replacement in _REWRITES)


def plain_signs(text: str) -> str:
    """The text with one spelling for each sign."""
    text = text.translate(_FULL_WIDTH)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    for sign, name in _GREEK.items():
        text = text.replace(sign, f"\\{name} ")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text


# Tokens

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<number>(?:\d{1,3}(?:(?:,|\{,\})\s?\d{3})+(?![\d,]|\{,)(?:\.\d+)?|\d+\{,\}\d+|\d+(?:\.\d*)?|\.\d+)
        (?:\\overline\{?\d+\}?|[eE][+-]?\d+(?![\d.a-zA-Z]))?)
  | (?P<styled>\\(?:text|textrm|textbf|textit|textsf|mbox|mathrm|mathit|operatorname|rm)\s*\{(?P<inside>[^{}$]*)\})
  | (?P<bold>\\(?:mathbf|boldsymbol|vec|hat|bar|overline|mathbb|mathcal|mathfrak|underline|tilde|widehat|overrightarrow)\s*
        \{?\s*(?P<letters>\\?[A-Za-z]+)\s*\}?)
  | (?P<command>\\(?:[a-zA-Z]+|[{}\\]))
  | (?P<word>[A-Za-z]+)
  | (?P<sign>[-+*/^_=<>(){}\[\]|!%°',;:.‰$€£¥&])
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of notation."""

    kind: str
    text: str
    spaced: bool
    """True if white space precedes it."""


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text. Raises ParseError at a character that is not mathematical."""
    tokens: list[Token] = []
    position, spaced, depth = 0, False, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"{text[position]!r}")
        position = match.end()
        kind = match.lastgroup or ""
        if match["space"] is not None:
            spaced = True
            continue
        piece = match.group()
        if match["styled"] is not None:
            kind, piece = "styled", match["inside"]
        elif match["bold"] is not None:
            kind, piece = "bold", piece.replace(" ", "")
        elif match["number"] is not None:
            kind = "number"
            if depth and "," in piece and "{" not in piece:  # in brackets a comma separates
                piece = piece.partition(",")[0]
                position = match.start() + len(piece)
        elif match["word"] is not None:
            kind = "word"
        elif match["command"] is not None:
            kind = "command"
        else:
            kind = "sign"
        depth += (piece in ("(", "[", r"\{")) - (piece in (")", "]", r"\}"))
        tokens.append(Token(kind, piece, spaced))
        spaced = False
    return tokens


# The grammar

RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\le": "≤", r"\ge": "≥", r"\ne": "≠", r"\in": "∈", r"\approx": "≈", ":": ":",
}  # fmt: skip
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp min max gcd lcm abs floor ceil".split()
)
_GREEK_NAMES = frozenset(_GREEK.values())
_CONSTANTS = {"pi": "π", "infty": "∞", "emptyset": "∅", "e": "e", "i": "i"}
_PLAIN_WORDS = {
    "pi": Node("constant", name="π"),
    "infinity": Node("constant", name="∞"),
    "inf": Node("constant", name="∞"),
    "infty": Node("constant", name="∞"),
}
_SEPARATORS = frozenset({"or", "and"})
_MATRICES = frozenset(
    {"matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "smallmatrix", "array"}
)
_APPLIED = frozenset("fghFGHPTQ")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "sixteen": 16,
}
_NUMBER_WORDS = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip


def parse(text: str, unit_words: frozenset[str] = frozenset()) -> Node:
    """The tree of a text. Raises ParseError if any part is not in the grammar.

    `unit_words` are words that are accepted as a unit after a number, in addition to units and plurals
    (`groupwise.tasks.rewards.units.words_of`).
    """
    if len(text) > LONGEST:
        raise ParseError("longer than an answer is")
    parser = _Parser(tokens_of(plain_signs(text)), unit_words)
    try:
        return parser.parse_all()
    except RecursionError:
        raise ParseError("nested too deep") from None


def _at_most_one(node: Node) -> bool:
    """True for a number that takes a singular unit, as in `1 apple` or `1/2 apple`."""
    numbers = [part.value for part in (node, *node.parts) if part.kind == "number"]
    halves = node.kind == "/" and len(numbers) == 2 and numbers[1] != 0
    of = numbers[0] / numbers[1] if halves else None
    return 0 < (numbers[0] if node.kind == "number" else of or 2) <= 1


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[Token], unit_words: frozenset[str]) -> None:
        self._tokens = tokens
        self._unit_words = unit_words
        self._position = 0
        self._depth = 0
        self._bars = 0
        """Number of open `|…`: inside one, a bar closes it and opens no other."""
        self._in_function = 0
        """Nesting depth of function arguments: only inside them degrees are numbers."""
        self._in_set = 0
        """Nesting depth of sets: only inside them `:` means `such that`."""

    # Looking ahead and advancing

    def _peek(self, offset: int = 0) -> Token:
        index = self._position + offset
        return self._tokens[index] if index < len(self._tokens) else Token("end", "", False)

    def _next_token(self) -> Token:
        token = self._peek()
        self._position += 1
        return token

    def _next_is(self, *texts: str) -> bool:
        token = self._peek()
        return token.kind in ("sign", "command") and token.text in texts

    def _take_sign(self, *texts: str) -> bool:
        if self._next_is(*texts):
            self._position += 1
            return True
        return False

    def _expect_sign(self, text: str) -> None:
        if not self._take_sign(text):
            raise ParseError(f"{self._peek().text or 'the end'!r} where {text!r} was expected")

    # Lists and relations

    def parse_all(self) -> Node:
        """Parses all tokens."""
        tree = self._parse_elements()
        if self._peek().kind != "end":
            raise ParseError(f"{self._peek().text!r} is left over")
        return tree

    def _take_separator(self) -> str | None:
        """Take `,`, `;`, `or` or `and`, also a comma and a word."""
        start = self._position
        comma = self._take_sign(",", ";")
        token = self._peek()
        word = token.text.strip().casefold() if token.kind in ("word", "styled") else ""
        if word in _SEPARATORS:
            self._position += 1
            return word
        if comma:
            return ","
        self._position = start
        return None

    def _parse_elements(self) -> Node:
        elements = [self._parse_relation()]
        separators: list[str] = []
        while (separator := self._take_separator()) is not None:
            separators.append(separator)
            elements.append(self._parse_relation())
        if not separators:
            return elements[0]
        kinds = set(separators) - {","}
        if len(kinds) > 1:
            raise ParseError("`and` beside `or`")
        return Node("list", tuple(elements), name=kinds.pop() if kinds else ",")

    def _parse_relation(self) -> Node:
        sides = [self._worded_name() or self._parse_quantity()]
        signs: list[str] = []
        while True:
            token = self._peek()
            if token.kind not in ("sign", "command") or token.text not in RELATIONS:
                break
            self._position += 1
            signs.append(RELATIONS[token.text])
            sides.append(self._parse_quantity())
        if not signs:
            return sides[0]
        if set(signs) == {":"}:
            return Node("ratio", tuple(sides))
        if signs[0] == ":" and ":" not in signs[1:] and self._in_set:
            return Node(
                "such", (sides[0], Node("relation", tuple(sides[1:]), name="".join(signs[1:])))
            )
        if ":" in signs:
            raise ParseError("`:` beside a relation")
        return Node("relation", tuple(sides), name="".join(signs))

    def _worded_name(self) -> Node | None:
        r"""The name in `Area = 5` and `\text{Area of } \triangle ABC = 5`."""
        token, offset = self._peek(), 1
        long = token.kind == "styled" or (token.kind == "word" and len(token.text) > 3)
        if not long or not is_unit(token.text, upright=False):
            return None
        while (
            self._peek(offset).text in (r"\triangle", r"\angle")
            or self._peek(offset).text.isupper()
        ):
            offset += 1
        if self._peek(offset).text != "=":
            return None
        words = [self._next_token().text.strip() for _ in range(offset)]
        return Node("name", name=" ".join(words))

    def _parse_quantity(self) -> Node:
        """A sum, with a unit before or after it."""
        negative = False
        start = self._position
        if self._next_is("-") and self._peek(1).text in ("$", "€", "£", "¥"):
            self._position += 1
            negative = True
        currency = self._next_token().text if self._next_is("$", "€", "£", "¥", r"\$") else ""
        if negative and not currency:
            self._position = start
        quantity = self._parse_sum()
        if negative:
            quantity = Node("*", (number_node(-1), quantity))
        unit, scale, percent = self._parse_unit(currency)
        if unit and not can_follow_number(
            unit, self._unit_words, scale == 1 and _at_most_one(quantity)
        ):
            raise ParseError(f"{unit!r} is not a unit")
        if scale != 1:
            quantity = Node("*", (quantity, number_node(scale)))
        if percent:
            return Node("percent", (quantity,))
        return Node("quantity", (quantity,), name=unit_of(unit)) if unit else quantity

    def _parse_unit(self, currency: str) -> tuple[str, int, bool]:
        """The parts around a number: its unit, a number word's factor, and whether it is a percentage."""
        scale = self._take_number_words()
        if self._take_sign("%") or self._take_word("percent", "per cent"):
            # After a percentage: `of the students`.
            token = self._peek()
            if token.kind in ("word", "styled") and token.text.strip().startswith("of"):
                while self._peek().kind in ("word", "styled"):
                    token = self._next_token()
                    self._word_of_unit(token.text.strip(), token.kind == "styled", is_later=True)
            return "", scale, True
        pieces = [currency] if currency else []
        while (piece := self._piece_of_unit(bool(pieces))) is not None:
            if piece.startswith("^"):
                if pieces[-1] in ("degree", "celsius", "fahrenheit"):
                    raise ParseError("a power of degrees")
                pieces[-1] += piece
            else:
                pieces.append(piece)
        return " ".join(pieces), scale, False

    def _take_number_words(self) -> int:
        """Multiply a number by a number word after it, such as `million`."""
        scale = 1
        while (token := self._peek()).kind in ("word", "styled"):
            word = token.text.strip().casefold()
            factor = _NUMBER_WORDS.get(word) or _NUMBER_WORDS.get(word.removesuffix("s"))
            if factor is None:
                break
            self._position += 1
            scale *= factor
        return scale

    def _take_word(self, *words: str) -> bool:
        token = self._peek()
        is_match = token.kind in ("word", "styled") and token.text.strip().casefold() in words
        self._position += is_match
        return is_match

    def _piece_of_unit(self, is_later: bool) -> str | None:
        """One word or sign of a unit; `is_later`: it is not the first. None at the end of the unit."""
        token = self._peek()
        if token.kind in ("word", "styled"):
            if token.text.strip().casefold() in _SEPARATORS:
                return None
            if is_later and self._take_word("per"):
                return "/"
            if is_later and (power := {"squared": "^2", "cubed": "^3"}.get(token.text.strip())):
                self._position += 1
                return power
            self._position += 1
            return self._word_of_unit(token.text.strip(), token.kind == "styled", is_later)
        if not is_later:
            return self._parse_degrees() if self._take_sign("°") else None
        if self._take_sign("/"):
            if self._peek().kind not in ("word", "styled"):
                raise ParseError("a unit divided by what is none")
            return "/"
        if self._take_sign("^"):
            return f"^{self._whole_exponent()}"
        return "" if self._take_sign(r"\cdot", "*", ".") else None

    def _parse_degrees(self) -> str:
        """After the degree sign: an angle, Celsius or Fahrenheit."""
        scale = self._peek().text.strip()
        if scale in ("C", "F") and self._next_token():
            return "celsius" if scale == "C" else "fahrenheit"
        return "degree"

    def _word_of_unit(self, words: str, upright: bool, is_later: bool) -> str:
        inner = plain_signs(words).strip()
        plain_words = re.sub(r"\^\{?-?\d\}?|[/·.\s]|\bper\b", " ", inner)
        of_rate = not upright and len(words) == 1 and (is_later or self._next_is("/"))
        if not is_unit(plain_words, upright or of_rate, is_later):
            raise ParseError(f"{words!r} is not a unit")
        return inner

    def _whole_exponent(self) -> str:
        braced = self._take_sign("{")
        sign = "-" if self._take_sign("-") else ""
        token = self._next_token()
        if token.kind != "number" or not token.text.isdigit():
            raise ParseError("a unit to no whole power")
        if braced:
            self._expect_sign("}")
        return sign + token.text

    # Sums and products

    def _enter_level(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ParseError("nested too deep")

    def _parse_sum(self) -> Node:
        self._enter_level()
        terms = [self._parse_signed_product()]
        while self._next_is(
            "+", "-", r"\pm", r"\mp", r"\cup", r"\cap", r"\setminus", r"\backslash"
        ):
            sign = self._next_token().text
            term = self._parse_signed_product()
            if sign == "-":
                term = Node("*", (number_node(-1), term))
            elif sign in (r"\pm", r"\mp"):
                term = Node("±", (term,), name=sign[1:])
            elif sign != "+":
                kind = {r"\cup": "∪", r"\cap": "∩"}.get(sign, "∖")
                left = terms[0] if len(terms) == 1 else Node("+", tuple(terms))
                terms = [Node(kind, (left, term))]
                continue
            terms.append(term)
        node = terms[0] if len(terms) == 1 else Node("+", tuple(terms))
        if self._take_sign(r"\over"):  # it and `\choose` divide the whole group
            node = Node("/", (node, self._parse_sum()))
        elif self._take_sign(r"\choose"):
            node = Node("call", (node, self._parse_sum()), name="binom")
        self._depth -= 1
        return node

    def _parse_signed_product(self) -> Node:
        if self._take_sign("-"):
            if self._next_is("-", "+"):
                raise ParseError("two signs")
            return Node("*", (number_node(-1), self._parse_signed_product()))
        if self._take_sign("+"):
            return self._parse_signed_product()
        if self._next_is(r"\pm", r"\mp"):
            sign = self._next_token().text
            return Node("±", (self._parse_product(),), name=sign[1:])
        return self._parse_product()

    def _parse_product(self) -> Node:
        node = self._parse_factor()
        while True:
            if self._take_sign(r"\cdot", r"\times", "*"):
                node = Node("*", (node, self._parse_signed_factor()))
            elif not self._is_rate() and self._take_sign("/", r"\div"):
                node = Node("/", (node, self._parse_signed_factor()))
            elif self._is_times_letter():
                self._position += 1
                node = Node("*", (node, self._parse_factor()))
            elif self._begins_factor(node):
                node = self._juxtapose(node)
            else:
                return node

    def _parse_signed_factor(self) -> Node:
        if self._take_sign("-"):
            return Node("*", (number_node(-1), self._parse_factor()))
        self._take_sign("+")
        return self._parse_factor()

    def _is_rate(self) -> bool:
        """True for a slash and the word of a unit, as in `$5/year`."""
        word = self._peek(1)
        long = (
            word.kind == "word" and len(word.text) > 3 and word.text not in FUNCTIONS | _GREEK_NAMES
        )
        return long and self._next_is("/") and is_unit(word.text, upright=False)

    def _is_times_letter(self) -> bool:
        """True for the letter x between two numbers, as in `2 x 10^3`."""
        previous = self._tokens[self._position - 1] if self._position else Token("end", "", False)
        return (
            self._peek().text == "x"
            and previous.kind == "number"
            and self._peek(1).kind == "number"
        )

    def _begins_factor(self, left: Node) -> bool:
        """True if one more factor follows directly. Raises ParseError for a number after a letter or bracket."""
        token = self._peek()
        if token.kind == "bold":
            return True
        if token.kind == "number":
            if left.kind != "number" and left.name != "factorial":
                raise ParseError(f"{token.text!r} directly behind another factor")
            return left.name == "factorial"
        if token.kind == "word":
            return self._is_letters(token, True)
        if token.kind == "styled":
            return token.text.strip() in ("e", "i") or token.text.strip() in FUNCTIONS
        if token.kind == "command":
            name = token.text[1:]
            return (
                name in ("frac", "sqrt", "binom", "pi", "lfloor", "lceil", "infty")
                or name in FUNCTIONS
                or name in _GREEK_NAMES
            )
        if token.text == "(":
            return True
        if token.text == "|":
            return not self._bars
        return token.text == "{"

    def _is_letters(self, token: Token, follows_factor: bool) -> bool:
        """True if a run of letters is a product of letters, not a unit or another word."""
        word = token.text
        if word in FUNCTIONS or word in _PLAIN_WORDS or word in _GREEK_NAMES or word == "sqrt":
            return True
        if word.casefold() in _SEPARATORS:
            return False
        if follows_factor and is_joined_unit(word):
            return False
        if (
            follows_factor
            and token.spaced
            and self._peek(1).text == "/"
            and is_rate(word, self._peek(2).text)
        ):
            return False
        if follows_factor and token.spaced and len(word) >= 2 and is_unit(word, False):
            return False
        return len(word) <= 3

    def _juxtapose(self, left: Node) -> Node:
        previous = self._tokens[self._position - 1]
        token = self._peek()
        right = self._parse_factor()
        if (
            previous.kind == "number"
            and left.kind == "number"
            and token.text == r"\frac"
            and right.kind == "/"
            and all(part.kind == "number" and part.value.denominator == 1 for part in right.parts)
        ):
            return Node("+", (left, right))  # a mixed number
        return Node("*", (left, right))

    # Factors

    def _parse_factor(self) -> Node:
        base = self._parse_base()
        while True:
            if self._take_sign("^"):
                base = Node("^", (base, self._parse_exponent()))
            elif self._take_sign("!"):
                if self._next_is("!"):
                    raise ParseError("a double factorial")
                base = Node("call", (base,), name="factorial")
            elif (
                self._next_is("°")
                and self._peek(1).text.strip() not in ("C", "F")
                and self._in_function
            ):
                self._position += 1
                base = Node("call", (base,), name="degrees")
            else:
                return base

    def _parse_exponent(self) -> Node:
        if self._next_is("{"):
            return self._parse_brace_group()
        if self._take_sign("-"):
            return Node("*", (number_node(-1), self._parse_exponent()))
        if self._take_sign("+"):
            return self._parse_exponent()
        token = self._peek()
        if token.kind == "word" and len(token.text) > 1:
            return self._split_letter()
        if token.kind == "number":
            return self._parse_plain_number()
        return self._parse_base()

    def _split_letter(self) -> Node:
        """The first letter of a run; the rest remains as a token."""
        token = self._peek()
        if token.text in _PLAIN_WORDS:
            self._position += 1
            return _PLAIN_WORDS[token.text]
        if len(token.text) > 1:
            self._tokens[self._position : self._position + 1] = [
                Token("word", token.text[0], token.spaced),
                Token("word", token.text[1:], False),
            ]
        letter = self._next_token().text
        if letter in _CONSTANTS and not self._next_is("_"):
            return Node("constant", name=_CONSTANTS[letter])
        name_node = self._parse_subscript(Node("name", name=letter))
        if letter in _APPLIED and self._next_is("("):
            inside = self._parse_bracket_group()
            arguments = inside.parts if inside.kind == "tuple" else (inside,)
            return Node("applied", arguments, name=name_node.name)
        return name_node

    def _parse_base(self) -> Node:
        token = self._peek()
        if token.kind == "number":
            return self._parse_number()
        if token.kind == "word":
            return self._parse_word()
        if token.kind == "bold":
            self._position += 1
            return self._parse_subscript(Node("name", name=token.text))
        if token.kind == "styled":
            return self._parse_styled_text()
        if token.kind == "command":
            return self._parse_command()
        if token.text == "|":
            self._position += 1
            self._bars += 1
            inner = self._parse_sum()
            self._bars -= 1
            self._expect_sign("|")
            return Node("call", (inner,), name="abs")
        if token.text in ("(", "[", "]"):
            return self._parse_bracket_group()
        if token.text == "{":
            return self._parse_brace_group()
        raise ParseError(
            f"{token.text or 'the end'!r} where a number, a name or a bracket was expected"
        )

    def _parse_number(self) -> Node:
        text = self._next_token().text
        plain, _, repeated = text.partition(r"\overline")
        mantissa, _, exponent = plain.replace(" ", "").lower().partition("e")
        decimal_comma = re.fullmatch(r"(\d+)\{,\}(\d+)", mantissa)
        if decimal_comma and len(decimal_comma[2]) != 3:
            mantissa = f"{decimal_comma[1]}.{decimal_comma[2]}"
        mantissa = mantissa.replace("{,}", "").replace(",", "")
        if len(exponent) > 5 or (exponent and abs(int(exponent)) > 999):
            raise ParseError("an exponent beyond all numbers")
        value = Fraction(mantissa.removesuffix(".") or "0") * Fraction(10) ** int(exponent or 0)
        if repeated:
            if "." not in mantissa:
                raise ParseError("a line over a whole number")
            digits = re.findall(r"\d+", repeated)[0]
            decimals = len(mantissa.partition(".")[2])
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**decimals)
            return number_node(value)
        node = number_node(value, "." in mantissa or bool(decimal_comma))
        if self._next_is("_"):
            self._position += 1
            # `_8`, `_{8}` and `_{\text{eight}}`.
            braced = self._next_is("{") and self._peek(1).kind in ("styled", "word")
            token = self._peek(braced)
            if token.kind in ("styled", "word") and token.text.strip() in _BASES:
                self._position += 1 + braced
                if braced:
                    self._expect_sign("}")
                base = number_node(_BASES[token.text.strip()])
            else:
                base = self._parse_exponent()
            if node.decimal or base.kind != "number":
                raise ParseError("a number with an index")
            if base.value == 10:
                return node
            return Node("based", (base,), name=mantissa)
        return self._parse_mixed_number(node)

    def _parse_mixed_number(self, number: Node) -> Node:
        """Parses `1 1/2` as one and a half, and `1 234` as a number with a thousands separator."""
        tokens = [self._peek(offset) for offset in range(3)]
        if tokens[0].kind != "number" or not tokens[0].spaced or number.value.denominator != 1:
            return number
        if (
            tokens[1].text == "/"
            and tokens[2].kind == "number"
            and all(t.text.isdigit() for t in (tokens[0], tokens[2]))
        ):
            self._position += 3
            if int(tokens[2].text) == 0:
                raise ParseError("a division by zero")
            return number_node(number.value + Fraction(int(tokens[0].text), int(tokens[2].text)))
        if number.value >= 1000 or number.value == 0:
            raise ParseError("two numbers side by side")
        digits = str(number.value)
        while re.fullmatch(r"\d{3}(?:\.\d+)?", self._peek().text) and self._peek().spaced:
            digits += self._next_token().text
            if "." in digits:
                break
        if self._peek().kind == "number" or digits == str(number.value):
            raise ParseError("two numbers side by side")
        return number_node(Fraction(digits), "." in digits)

    def _parse_word(self) -> Node:
        token = self._peek()
        word = token.text
        if word in _PLAIN_WORDS:
            self._position += 1
            return _PLAIN_WORDS[word]
        if word == "sqrt":
            self._position += 1
            return self._parse_root()
        if word in FUNCTIONS:
            self._position += 1
            return self._parse_call(word)
        if word in _GREEK_NAMES:
            self._position += 1
            return self._parse_subscript(Node("name", name=word))
        if not self._is_letters(token, False):
            raise ParseError(f"the word {word!r}")
        return self._split_letter()

    def _parse_styled_text(self) -> Node:
        token = self._next_token()
        text = token.text.strip()
        if text in FUNCTIONS:
            return self._parse_call(text)
        if text in _CONSTANTS:
            return Node("constant", name=_CONSTANTS[text])
        if len(text) == 1 and text.isalpha():
            return self._parse_subscript(Node("name", name=text))
        raise ParseError(f"the words {text!r}")

    def _parse_subscript(self, name_node: Node) -> Node:
        name = name_node.name
        if self._take_sign("_"):
            if not self._take_sign("{"):
                index = self._next_token().text
            else:
                depth = 1
                pieces: list[str] = []
                while depth:
                    token = self._next_token()
                    if token.kind == "end":
                        raise ParseError("an index without an end")
                    depth += (token.text == "{") - (token.text == "}")
                    pieces.append(token.text)
                index = "".join(pieces[:-1])
            name += f"_{index}"
        while self._take_sign("'"):
            name += "'"
        return Node("name", name=name)

    def _parse_command(self) -> Node:
        name = self._next_token().text[1:]
        if name in FUNCTIONS:
            return self._parse_call(name)
        if name in _CONSTANTS and len(name) > 1:
            return Node("constant", name=_CONSTANTS[name])
        if name in _GREEK_NAMES:
            return self._parse_subscript(Node("name", name=name))
        commands: dict[str, Callable[[], Node]] = {
            "frac": lambda: Node("/", (self._parse_argument(), self._parse_argument())),
            "binom": lambda: Node(
                "call", (self._parse_argument(), self._parse_argument()), name="binom"
            ),
            "sqrt": self._parse_root,
            "{": self._parse_set,
            "lfloor": lambda: self._parse_rounding("floor"),
            "lceil": lambda: self._parse_rounding("ceil"),
            "langle": self._parse_angle_brackets,
            "ldots": lambda: Node("dots"),
            "begin": self._parse_matrix,
            "angle": lambda: Node("name", name=f"∠{self._next_token().text}"),
        }
        if name not in commands:
            raise ParseError(f"\\{name}")
        return commands[name]()

    def _parse_rounding(self, name: str) -> Node:
        inner = self._parse_sum()
        self._expect_sign(rf"\r{name}")
        return Node("call", (inner,), name=name)

    def _parse_angle_brackets(self) -> Node:
        inner = self._parse_elements()
        self._expect_sign(r"\rangle")
        return Node("tuple", inner.parts if inner.kind == "list" else (inner,))

    def _parse_argument(self) -> Node:
        r"""The argument of a command: in braces, or the next token; for a number only its next digit, as in `\frac12`."""
        if self._next_is("{"):
            return self._parse_brace_group()
        token = self._peek()
        if token.kind == "number":
            digits = re.match(r"\d", token.text)
            if digits is None:
                raise ParseError("a fraction of a point")
            rest = token.text[1:]
            self._tokens[self._position : self._position + 1] = [
                Token("number", token.text[0], token.spaced),
                *([Token("number", rest, False)] if rest else []),
            ]
            self._position += 1
            return number_node(int(token.text[0]))
        if token.kind == "word":
            return self._split_letter()
        return self._parse_base()

    def _parse_root(self) -> Node:
        degree = number_node(2)
        if self._take_sign("["):
            degree = self._parse_sum()
            self._expect_sign("]")
        token = self._peek()
        if token.kind == "number":  # people write `√12` and `\sqrt12` for the root of twelve
            inner = self._parse_plain_number()
        elif self._next_is("("):
            inner = self._parse_bracket_group()
        else:
            inner = self._parse_argument()
        return Node("call", (inner, degree), name="root")

    def _parse_plain_number(self) -> Node:
        token = self._next_token()
        if not re.fullmatch(r"\d+(?:\.\d+)?", token.text):
            raise ParseError("such a number here")
        return number_node(Fraction(token.text), "." in token.text)

    def _parse_call(self, name: str) -> Node:
        """A function and its argument."""
        base = self._parse_exponent() if self._take_sign("_") else None
        power = self._parse_exponent() if self._take_sign("^") else None
        if base is None and self._take_sign("_"):
            base = self._parse_exponent()
        if base is not None and name != "log":
            raise ParseError(f"{name} with an index")
        self._in_function += 1
        if self._next_is("("):
            inside = self._parse_bracket_group()
            arguments = inside.parts if inside.kind == "tuple" else (inside,)
            while self._take_sign("°"):
                arguments = (Node("call", arguments, name="degrees"),)
            if self._next_is("^"):
                raise ParseError("a power behind the bracket of a function")
        else:
            arguments = (self._parse_call_product(),)
        self._in_function -= 1
        if power == Node("*", (number_node(-1), number_node(1))):
            if name not in ("sin", "cos", "tan"):
                raise ParseError(f"the inverse of {name}")
            return Node("call", arguments, name=f"arc{name}")
        if base is not None:
            arguments, name = (*arguments, base), "log_"
        if name in ("gcd", "lcm", "min", "max"):
            arguments = tuple(sorted(arguments, key=repr))
        node = Node("call", arguments, name=name)
        return node if power is None else Node("^", (node, power))

    def _parse_call_product(self) -> Node:
        """The argument of a function without brackets: juxtaposed factors, up to the next function."""
        self._enter_level()
        if self._take_sign("-"):
            node = Node("*", (number_node(-1), self._parse_factor()))
        else:
            node = self._parse_factor()
        while self._begins_factor(node):
            token = self._peek()
            text = token.text.strip().removeprefix("\\")
            if text in FUNCTIONS or token.text == "(":
                break
            node = self._juxtapose(node)
        while (
            self._next_is("/")
            and self._peek(1).kind == "number"
            and node.kind in ("number", "constant")
        ):
            self._position += 1
            node = Node("/", (node, self._parse_factor()))
        self._depth -= 1
        return node

    # Brackets

    def _parse_brace_group(self) -> Node:
        self._expect_sign("{")
        inner = self._parse_sum()
        self._expect_sign("}")
        return inner

    def _parse_bracket_group(self) -> Node:
        self._enter_level()
        opening = self._next_token().text
        bars, self._bars = self._bars, 0
        inner = self._parse_elements()
        self._bars = bars
        closing = self._next_token().text
        self._depth -= 1
        if closing not in (")", "]", "["):
            raise ParseError(f"{closing or 'the end'!r} where a bracket should close")
        parts = inner.parts if inner.kind == "list" else (inner,)
        if inner.kind == "list" and inner.name != ",":
            raise ParseError("`or` within brackets")
        ends = {"(": "(", "[": "[", "]": "("}[opening] + {")": ")", "]": "]", "[": ")"}[closing]
        if opening == "(" and closing == ")":
            return (
                Node("tuple", parts)
                if len(parts) > 1
                else Node("group", parts)
                if inner.kind in ("relation", "quantity")
                else inner
            )
        if len(parts) != 2:
            if ends == "[]" and opening == "[" and len(parts) == 1:
                return inner
            raise ParseError("no interval")
        return Node("interval", parts, name=ends)

    def _parse_set(self) -> Node:
        if self._take_sign(r"\}"):
            return Node("constant", name="∅")
        bars, self._bars = self._bars, 1  # a bar closes the text before it
        self._in_set += 1
        inner = self._parse_elements()
        self._in_set -= 1
        self._bars = bars
        if self._take_sign("|", r"\mid"):
            condition = self._parse_elements()
            self._expect_sign(r"\}")
            return Node("such", (inner, condition))
        self._expect_sign(r"\}")
        if inner.kind == "such":
            return inner
        return Node("set", inner.parts if inner.kind == "list" else (inner,))

    def _parse_matrix(self) -> Node:
        kind = self._parse_environment()
        if kind not in _MATRICES:
            raise ParseError(f"the environment {kind}")
        rows: list[Node] = []
        row = [self._parse_sum()]
        while True:
            if self._take_sign("&"):
                row.append(self._parse_sum())
            elif self._take_sign("\\\\"):
                rows.append(Node("row", tuple(row)))
                if self._next_is(r"\end"):
                    break
                row = [self._parse_sum()]
            else:
                rows.append(Node("row", tuple(row)))
                break
        self._expect_sign(r"\end")
        if self._parse_environment() != kind:
            raise ParseError("another environment's end")
        matrix = Node("matrix", tuple(rows))
        return Node("call", (matrix,), name="determinant") if kind == "vmatrix" else matrix

    def _parse_environment(self) -> str:
        self._expect_sign("{")
        name = self._next_token().text
        self._expect_sign("}")
        return name
