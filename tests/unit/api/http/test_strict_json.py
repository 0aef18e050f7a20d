"""What the tables of bodies in tests/unit/server/test_schema_walk.py do not show."""

import pytest

from groupwise.api.http.strict_json import DEEPEST, MOST_LISTS, MOST_TEXTS, NotStrict, parse


def test_what_is_meant_is_read_and_nothing_deeper() -> None:
    assert parse(b'{"a": [1, 2.5, null, true, "\\ud83d\\ude00"]}') == {
        "a": [1, 2.5, None, True, "😀"]
    }
    assert parse(b"[" * DEEPEST + b"]" * DEEPEST)
    for wrong in (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), b'{"\\udc00": 1}', b"[1,"):
        with pytest.raises(NotStrict):
            parse(wrong)


def test_brackets_in_texts_are_no_nesting_however_many() -> None:
    text = '{"a": "' + "[{" * 1000 + '\\" [[[", "b": [' + "[]," * 1000 + "[]]}"
    assert len(parse(text.encode())["b"]) == 1001
    escapes = b'["' + b'\\"[' * 1_000_000 + b'"]'
    assert len(parse(escapes)[0]) == 2_000_000


def test_what_would_fill_the_memory_is_refused_before_it_is_made() -> None:
    assert len(parse(b"[" + b"0," * 1_500_000 + b"0]")) == 1_500_001
    for wrong in (b"[" + b"[]," * MOST_LISTS + b"[]]", b"[" + b'"ab",' * MOST_TEXTS + b'"ab"]'):
        with pytest.raises(NotStrict, match="there are more than"):
            parse(wrong)
