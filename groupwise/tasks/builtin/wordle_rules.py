"""The rules of Wordle, which the tasks `wordle` and `wordle_game` share: words, marks, facts known about the secret, and parsing of
guesses.

A guess is marked letter by letter: G is in the right place, Y occurs elsewhere in the secret, X does not occur again. Greens use up
their letters of the secret first, then yellows from left to right, so a letter is marked at most as often as it occurs.

    secret  l a b e l
    guess   a l l e y   ->   Y Y Y G X
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from groupwise.core.errors import TaskError
from groupwise.tasks.data.order import Stream

LENGTH = 5
"""Letters in a word."""
GUESSES = 6
"""Most guesses in a game."""
WON = "G" * LENGTH

_LISTS = Path(__file__).with_name("wordlists")
_CLOSING = re.compile(r"</think>", re.IGNORECASE)
_GUESS = re.compile(rf"<guess>\s*\[?([a-z]{{{LENGTH}}})\]?\s*</guess>", re.IGNORECASE)

_RULES = """\
You play Wordle: find the secret word of five letters in {guesses}.
Each letter of a guess is marked. G: right letter, right place. Y: the letter is in the word, in another place. X: the letter is not \
in the word, or not one more time.
Think between <think> and </think>, then give one guess: <guess>word</guess>"""
_NUMBERS = (
    "one guess",
    "two guesses",
    "three guesses",
    "four guesses",
    "five guesses",
    "six guesses",
)


def rules(guesses: int = GUESSES) -> str:
    """The rules, shown to the policy first."""
    return _RULES.format(guesses=_NUMBERS[guesses - 1])


def guess_in(text: str) -> str | None:
    """The guess of a completion: the first well-formed one after the first closing think tag, in lower case; None if there is none."""
    closing = _CLOSING.search(text)
    match = _GUESS.search(text, closing.end()) if closing else None
    return match[1].lower() if match else None


def marks_of(guess: str, secret: str) -> str:
    """The marks of a guess, such as `YYYGX`."""
    remaining = [letter for letter, guessed in zip(secret, guess, strict=True) if letter != guessed]
    marks: list[str] = []
    for letter, guessed in zip(secret, guess, strict=True):
        if letter == guessed:
            marks.append("G")
        elif guessed in remaining:
            remaining.remove(guessed)
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


def marked_guess(guess: str, marks: str) -> str:
    """A marked guess as the policy sees it: `alley: a Y, l Y, l Y, e G, y X`."""
    letters = ", ".join(f"{letter} {mark}" for letter, mark in zip(guess, marks, strict=True))
    return f"{guess}: {letters}"


def choices_line(choices: Sequence[str]) -> list[str]:
    """A line that lists the words to choose from, if the policy is shown some."""
    return [f"The secret is one of: {', '.join(choices)}."] if choices else []


def guesses_left(guesses: int) -> str:
    """The number of guesses left, in words."""
    return "1 guess left." if guesses == 1 else f"{guesses} guesses left."


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Facts that marked guesses reveal about the secret."""

    fixed: Mapping[int, str]
    """The letter at each known position, from 0 (greens)."""
    banned: frozenset[tuple[int, str]]
    """Letters that are not at a position (yellows and greys)."""
    least: Mapping[str, int]
    """Minimum number of occurrences of a letter: the most greens and yellows that one guess had for it."""
    most: Mapping[str, int]
    """Maximum number of occurrences of a letter; known if a guess also had it grey."""

    @classmethod
    def of(cls, guesses: Iterable[str], marks: Iterable[str]) -> Knowledge:
        """Derives the facts from guesses and their marks, in order."""
        fixed: dict[int, str] = {}
        banned: set[tuple[int, str]] = set()
        least: dict[str, int] = {}
        most: dict[str, int] = {}
        for guess, guess_marks in zip(guesses, marks, strict=True):
            pairs = list(zip(guess, guess_marks, strict=True))
            fixed |= {
                position: letter for position, (letter, mark) in enumerate(pairs) if mark == "G"
            }
            banned |= {(index, letter) for index, (letter, mark) in enumerate(pairs) if mark != "G"}
            for letter in guess:
                count = sum(guessed == letter and mark != "X" for guessed, mark in pairs)
                least[letter] = max(count, least.get(letter, 0))
                if (letter, "X") in pairs:
                    most[letter] = min(count, most.get(letter, LENGTH))
        return cls(fixed, frozenset(banned), least, most)

    def allows(self, word: str) -> bool:
        """True if the secret can be this word."""
        for position, letter in self.fixed.items():
            if word[position] != letter:
                return False
        for position, letter in self.banned:
            if word[position] == letter:
                return False
        for letter, times in self.least.items():
            if times and word.count(letter) < times:
                return False
        return all(word.count(letter) <= times for letter, times in self.most.items())

    @property
    def pattern(self) -> str:
        """The known letters in their places, as in `_ a _ _ y`."""
        return " ".join(self.fixed.get(position, "_") for position in range(LENGTH))

    @property
    def elsewhere(self) -> list[str]:
        """Letters known to occur in unknown places, each as often as is certain."""
        fixed_letters = list(self.fixed.values())
        counts = {
            letter: times - fixed_letters.count(letter) for letter, times in self.least.items()
        }
        return sorted(letter for letter, times in counts.items() for _ in range(times))


def turns_met(word: str, guesses: Sequence[str], marks: Sequence[str]) -> int:
    """Number of turns that allow the word, each checked alone. It equals the number of turns if all together allow it."""
    turns = zip(guesses, marks, strict=True)
    return sum(Knowledge.of([guess], [guess_marks]).allows(word) for guess, guess_marks in turns)


def reasoning(knowledge: Knowledge, guess: str) -> str:
    """Reasoning of the teacher before a guess that the knowledge allows: short, because small models lose track in long lists."""
    elsewhere = f" It also has {', '.join(knowledge.elsewhere)}." if knowledge.elsewhere else ""
    return f"Known: {knowledge.pattern}.{elsewhere} A word that fits is {guess}."


def answer(thought: str, guess: str) -> str:
    """A well-formed completion."""
    return f"<think>\n{thought}\n</think>\n<guess>{guess}</guess>"


# --- words ---------------------------------------------------------------------------------------


Split = Literal["train", "validation", "test"]

FEWEST_SECRETS = 60
"""Validation and test get a tenth each, and a row needs several different words."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a game."""

    secrets: tuple[str, ...]
    dictionary: frozenset[str]
    """Words that count as real, including the secrets."""

    def of(self, split: Split, seed: int) -> list[str]:
        """The secrets of a split, in an order from the seed: a tenth each for test and validation, the rest for training."""
        shuffled = Stream("wordle secrets", seed).sample(self.secrets, len(self.secrets))
        tenth = len(shuffled) // 10
        ends = {"test": (0, tenth), "validation": (tenth, 2 * tenth), "train": (2 * tenth, None)}
        return shuffled[slice(*ends[split])]


@cache
def words_of(secrets: str | None, dictionary: str | None) -> Words:
    """Words of the given files, or the bundled ones. Raises TaskError for files that cannot be used."""
    secret_words = _words_in_file(Path(secrets).expanduser() if secrets else _LISTS / "secrets.txt")
    if len(secret_words) < FEWEST_SECRETS:
        raise TaskError(
            f"task.secrets: {secrets} has {len(secret_words)} words. Training, validation and test have none in common, which takes "
            f"{FEWEST_SECRETS} or more."
        )
    real = _words_in_file(
        Path(dictionary).expanduser() if dictionary else _LISTS / "dictionary.txt"
    )
    return Words(secret_words, frozenset(real) | frozenset(secret_words))


def _words_in_file(file: Path) -> tuple[str, ...]:
    """The words of a file, one per line, in order and each once; empty lines and lines with # are skipped."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"The word list {file} cannot be read: {error}. Give a text file with one word in each line."
        ) from error
    words: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip().lower()
        if word and not re.fullmatch(rf"[a-z]{{{LENGTH}}}", word):
            raise TaskError(
                f"{file}:{number}: {word!r:.40} is not a word of {LENGTH} letters from a to z. Leave it out."
            )
        if word:
            words[word] = None
    return tuple(words)
