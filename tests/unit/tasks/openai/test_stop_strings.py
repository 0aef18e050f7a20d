from hypothesis import given
from hypothesis import strategies as st

from groupwise.tasks.openai.stop_strings import cut_at_stop, streamable_prefix

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def test_the_first_stop_cuts():
    assert cut_at_stop("one, two; three", [";", ", "]) == "one"
    assert cut_at_stop("one", []) == "one"
    assert cut_at_stop("baa", ["a", "baa"]) == "b"
    assert cut_at_stop("abc", ["c", "bc"]) == "a"


def test_a_possible_beginning_of_a_stop_is_held_back():
    assert streamable_prefix("one EN", ["END"]) == "one "
    assert streamable_prefix("one ENd", ["END"]) == "one ENd"
    assert streamable_prefix("one END", ["END"]) == "one "


@given(LETTERS, STOPS)
def test_streamed_text_only_grows_and_is_a_prefix_of_the_final_text(text, stops):
    before = ""
    for end in range(len(text) + 1):
        shown = streamable_prefix(text[:end], stops)
        assert shown.startswith(before)
        assert cut_at_stop(text, stops).startswith(shown)
        before = shown
