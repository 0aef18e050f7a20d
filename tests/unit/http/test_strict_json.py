import pytest

from groupwise.http.strict_json import DEEPEST, NotStrict, parse


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a": 1, "a": 1}', "twice"),
        (b"[NaN]", "NaN"),
        (b"[1e999]", "double"),
        (b"[" + b"1" * 5000 + b"]", "digits"),
        (b'"\xff"', "UTF-8"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "deep"),
        (b"[1,", "Expecting value"),
    ],
)
def test_what_others_read_in_silence_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(NotStrict, match=problem):
        parse(text)


def test_what_is_meant_is_read() -> None:
    assert parse(b'{"a": [1, 2.5, null, true, "\\ud83d\\ude00"]}') == {
        "a": [1, 2.5, None, True, "😀"]
    }
    assert parse(b"[" * DEEPEST + b"]" * DEEPEST)


def test_brackets_in_texts_are_no_nesting() -> None:
    text = '{"a": "' + "[{" * 1000 + '\\" [[[", "b": [' + "[]," * 1000 + "[]]}"
    assert len(parse(text.encode())["b"]) == 1001


def test_a_long_text_of_escapes_is_looked_through_in_little_memory() -> None:
    text = b'["' + b'\\"[' * 1_000_000 + b'"]'
    assert len(parse(text)[0]) == 2_000_000
