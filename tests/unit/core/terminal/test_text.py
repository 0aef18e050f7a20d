from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.terminal.text import clean, command_line, one_line


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    for letter in clean(text):
        assert letter == "\n" or letter.isprintable() or letter in "\u200c\u200d"
    assert "\n" not in one_line(text)
    assert one_line("a\nb\r\nc") == "a⏎b⏎c"
    clean(text).encode()


@pytest.mark.parametrize(("hostile", "shown"), [
    ("\x1b[31mred\x1b]0;title\x07", "␛[31mred␛]0;title␇"), ("over\rwrite\b", "over␍write␈"), ("\x9b31m", "<U+009B>31m"),
    ("a\u202eb\u2066", "a<U+202E>b<U+2066>"), ("half \ud800", "half <U+D800>"), ("del\x7f nul\0", "del␡ nul␀"),
    ("a\u00a0b\tc", "a b    c"), ("windows\r\nline", "windows\nline"), ("naïve [b]日本[/b] 👩\u200d🚀", "naïve [b]日本[/b] 👩\u200d🚀"),
])  # fmt: skip
def test_hostile_text_is_shown_for_what_it_is(hostile: str, shown: str) -> None:
    assert clean(hostile) == shown


@given(st.lists(st.text()))
def test_a_command_line_means_the_words(words: list[str]) -> None:
    assert shlex.split(command_line(words)) == words


def test_a_command_line_has_no_quotes_within_quotes() -> None:
    assert command_line(["python", "-c", "print('a b')"]) == """python -c "print('a b')\""""
    assert command_line(["echo", "it's $5"]) == """echo 'it'"'"'s $5'"""
