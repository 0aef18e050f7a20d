from hypothesis import given
from hypothesis import strategies as st

from groupwise.server.openai.texts import cut, showable

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def test_the_first_stop_cuts():
    assert cut("one, two; three", [";", ", "]) == "one"
    assert cut("one", []) == "one"
    assert cut("baa", ["a", "baa"]) == "b"
    assert cut("abc", ["c", "bc"]) == "a"


def test_what_may_become_a_stop_is_held_back():
    assert showable("one EN", ["END"]) == "one "
    assert showable("one ENd", ["END"]) == "one ENd"
    assert showable("one END", ["END"]) == "one "


@given(LETTERS, STOPS)
def test_what_is_shown_only_grows_and_is_the_beginning_of_the_whole(text, stops):
    before = ""
    for end in range(len(text) + 1):
        shown = showable(text[:end], stops)
        assert shown.startswith(before)
        assert cut(text, stops).startswith(shown)
        before = shown
