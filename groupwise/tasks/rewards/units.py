"""Units after a number: which words can be a unit, and when two units agree.

A word after a number could change it, so not every word is a unit. Accepted: known units (`72 km/h`), counted things (`72 apples`,
`13 years old`, `5 people`), one of something (`1 apple`, `1/2 cup`), and words of the gold answer. Not accepted, so the answer does
not count as a number: `5 short`, `5 octal`, `5 squared`, `5 basis points`, `5 more than 10`, `5 dozen and 3`.
"""

from __future__ import annotations

import re

_KNOWN: dict[str, str] = {}
"""Every spelling of a unit, mapped to the one that is used in comparisons."""
for _line in """
    km kilometer kilometre | m meter metre | cm centimeter centimetre | mm millimeter millimetre | dm decimeter | nm nanometer | mi mile
    yd yard | ft foot feet | in inch inches | kg kilogram | g gram | mg milligram | lb lbs pound | oz ounce | t ton tonne
    l liter litre | ml milliliter millilitre | dl | cl | pt pint | qt quart | gal gallon | s sec second | min minute | h hr hour | d day
    wk week | mo month | yr year | ms millisecond | ns | n newton | j joule | w watt | kw kilowatt | v volt | a ampere amp | k kelvin
    °c celsius | °f fahrenheit | ° deg degree | rad radian | pa pascal | hz hertz | mi/h mph | km/h kmh kph | mole | kj | kb | mb | gb
    tb | ev | kev | mev | khz | ghz | rpm | kwh | wh | kpa | kcal | cal | mol | gbp | cny | inr | chf | jpy | cent ¢ | dollar $ usd buck
    euro € eur | £ | ¥ yen | hp | db | ha hectare | sq square | cu cubic | unit units
""".replace("\n", "|").split("|"):
    _spellings = _line.split()
    _KNOWN.update(dict.fromkeys(_spellings, _spellings[0] if _spellings else ""))

_OF_ONE_LETTER = frozenset("mshglLNJWVAK")
"""Letters that are a unit if they are written upright."""

_SMALL = frozenset("of by at on am pm per a an the us uk".split())
"""Short words that can occur within a unit."""

NO_UNIT = frozenset(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
    twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion dozen score lakh crore
    half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth
    plus minus time over divided multiplied squared cubed mod modulo remainder factorial root power pi phi prime choose
    sin cos tan cot sec csc log ln exp sqrt max min gcd lcm abc xyz
    or and not no nor but to than is isn are if maybe perhaps about approximately off negative wrong either
    between below above under base binary ternary hex hexadecimal octal undefined infinity infinite none except without least most
    infinitely quadrillion quintillion sextillion septillion googol double doubled triple tripled quadruple quadrupled halved twice thrice
    dont cannot cant wont doesnt isnt impossible unknown unclear unsure uncertain guess undetermined indeterminate nothing
    incorrect false true yes rounded truncated repeating recurring approx roughly around nearly almost exactly only
    basis gross versus always sometimes besides thus this has does was las
    """.split()
)
"""Words after a number that are not units: they change the number or take it back."""


_PLURALS = frozenset(
    """
    people men women children feet teeth mice geese sheep fish deer dice oxen cattle police data media series species pence more fewer les
    """.split()
)
"""Irregular plurals without a final s, and words used with a number of things: `5 more`."""


def words_of(text: str) -> frozenset[str]:
    """The words of a gold answer, in lower case and singular: after the number of an answer they are accepted as its unit."""
    return frozenset(map(singular, re.findall(r"[a-zA-Z]{2,}", text)))


def can_follow_number(phrase: str, unit_words: frozenset[str], at_most_one: bool) -> bool:
    """True if a phrase after a number is a unit or a counted noun: one of its words is a known unit, a plural, or in
    `unit_words` (the words of the gold answer). After a number of at most one (`at_most_one`), any noun can be counted.
    """
    words = re.findall(r"[a-zA-Z$€£¥°¢]+", phrase)
    return at_most_one or any(
        (single := singular(word)) != word.casefold()
        or single in unit_words
        or single in _PLURALS
        or single in _KNOWN
        for word in words
        if word != "in" or len(words) == 1
    )


def is_unit(words: str, upright: bool, is_later: bool = False) -> bool:
    r"""True if each of these words can be part of a unit; `is_later`: they follow its first word.

    A single letter can if it is `upright`, as in `\text{}`.
    """
    letter_runs = re.findall(r"[a-zA-Z$€£¥°]+", words)
    return bool(letter_runs) and all(
        _is_word_of_unit(word, upright, is_later or index > 0)
        for index, word in enumerate(letter_runs)
    )


def _is_word_of_unit(word: str, upright: bool, is_later: bool) -> bool:
    single = singular(word)
    if single in NO_UNIT or word.casefold() in NO_UNIT:
        return False
    if len(word) == 1:
        return word in "$€£¥°" or (upright and word in _OF_ONE_LETTER) or (is_later and word == "a")
    if len(word) == 2:
        return word.casefold() in _KNOWN or word.casefold() in _SMALL
    return True


def is_rate(word: str, per: str) -> bool:
    """True for units such as `m/s`: single letters that are a unit because of the slash between them."""
    return word in ("m", "g", "l", "L") and per in ("s", "h", "l", "L", "m", "ml", "mL", "min")


def is_joined_unit(word: str) -> bool:
    """True if a word is a unit even without a space before it, as in `72km`."""
    return bool(re.fullmatch("km|cm|mm|kg|lbs?|oz|mph", word))


_MILLIONS = frozenset("Mm Mg Ms MW MJ MV MN MA Ml ML MPa MHz".split())
"""Units with the prefix mega: in lower case the prefix would mean a thousandth."""


def singular(word: str) -> str:
    """A word in lower case and in the singular."""
    small = word if word in _MILLIONS else word.casefold()
    return small if len(small) < 3 or small in _KNOWN else small.removesuffix("s")


def unit_of(text: str) -> str:
    """A unit in its form for comparisons: `km/h` for kilometers per hour, `m^2` for square meters."""
    text = re.sub(r"(?i)\bper\b", "/", text)
    text = re.sub(r"\^\{?\s*(-?\d)\s*\}?", r"^\1", text)
    parts: list[str] = []
    for side in text.split("/"):
        words = [singular(word) for word in re.findall(r"[a-zA-Z$€£¥°¢]+(?:\^-?\d)?", side)]
        names: list[str] = []
        power = ""
        for word in words:
            base, _, exponent = word.partition("^")
            name = _KNOWN.get(base, base)
            if name in ("sq", "cu"):
                power = "^2" if name == "sq" else "^3"
            elif name not in ("of", "a", "an", "the"):
                names.append(name + (f"^{exponent}" if exponent else power))
        parts.append(" ".join(names))
    return "/".join(part for part in parts if part)


def units_compatible(one: str, other: str) -> bool:
    """True if two units do not contradict each other: they are equal, or one is missing or just the word `units`."""
    if not one or not other or one == other:
        return True
    return one.partition("^")[0] == "unit" or other.partition("^")[0] == "unit"
