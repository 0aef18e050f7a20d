"""What the tables of bodies in tests/unit/server/test_schema_walk.py do not show."""

import re
import threading
import time
from contextlib import suppress

import pytest

from groupwise.api.http import strict_json
from groupwise.api.http.strict_json import (
    DEEPEST,
    MAX_ENTRIES,
    MAX_KEYS_IN_ALL,
    MAX_LISTS,
    MAX_TEXTS,
    SLICE,
    NotStrict,
    parse,
)


def test_json_is_parsed_up_to_the_maximum_depth() -> None:
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


def test_json_with_too_many_lists_or_texts_is_refused_before_parsing() -> None:
    assert len(parse(b"[" + b"0," * 1_500_000 + b"0]")) == 1_500_001
    for wrong in (b"[" + b"[]," * MAX_LISTS + b"[]]", b"[" + b'"ab",' * MAX_TEXTS + b'"ab"]'):
        with pytest.raises(NotStrict, match="there are more than"):
            parse(wrong)


def longest_hold(body: bytes) -> float:
    """Seconds of computing time for which reading a body let no other thread run, at most: waiting for the machine does not count."""
    reader = threading.Thread(target=_read, args=(body,))
    reader.start()
    assert reader.ident is not None
    clock = time.pthread_getcpuclockid(reader.ident)
    longest = before = 0.0
    while reader.is_alive():
        try:
            now = time.clock_gettime(clock)
        except OSError:  # it has just ended
            break
        longest, before = max(longest, now - before), now
        time.sleep(0.0005)
    reader.join()
    return longest


def _read(body: bytes) -> None:
    with suppress(NotStrict):
        parse(body)


@pytest.mark.parametrize(
    "entry",
    [b"1,", b"0.5,", b"null,", b'"",', b"[],", b'{"group_id":"g-1","rewards":[0.5,1]},'],
    ids=["whole", "real", "null", "text", "list", "group"],
)
@pytest.mark.parametrize("megabytes", [7, 20])
def test_a_large_body_lets_other_threads_run(entry: bytes, megabytes: int) -> None:
    body = b"[" + entry * (megabytes * 2**20 // len(entry)) + b"1]"
    assert longest_hold(body) < 0.4


def test_commas_within_texts_do_not_count_as_entries() -> None:
    assert len(parse(b'["' + b"," * (MAX_ENTRIES + 5) + b'", 1]')) == 2
    with pytest.raises(NotStrict, match="entries"):
        parse(b"[" + b"0," * MAX_ENTRIES + b"0]")


@pytest.mark.parametrize(
    "body",
    [
        b"[1, 2.5e1, null, true, -0.0]",
        b'{"a": [[1, 2], [3.5, "a, [1, 2]"]], "b": [1, [2, 3, 4], {"c": [5, 6, 7]}]}',
        b'["[1, 2, 3, 4]", [1, 2, 3, 4], []]',
        b'"[1, 2, 3"',
        *(b"[1, 2,]", b"[,1, 2]", b"[1,, 2, 3]", b"[ ,]", b"[1, 2 3, 4]", b"[1, 2, 3", b"[1, 2]]", b"1, 2, 3"),
        *(b"[1, 1e999, 2]", b"[1, NaN, 2]", b"[1, 2, 3] [4, 5]", b'{"a": [1, 2, 3], "a": 1}', b"[1, '2']"),
    ],
)  # fmt: skip
def test_a_list_that_is_read_in_slices_is_the_same(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> object:
        try:
            return repr(parse(body))
        except NotStrict:
            return "refused"

    whole = read()
    for size in (1, 2, 5):
        pattern = strict_json._LONG_LIST_OR_TEXT.pattern.replace(b"%d" % SLICE, b"%d" % size)
        monkeypatch.setattr(strict_json, "_LONG_LIST_OR_TEXT", re.compile(pattern, re.DOTALL))
        monkeypatch.setattr(strict_json, "SLICE", size)
        assert read() == whole
        monkeypatch.undo()


def test_a_long_list_lets_other_threads_run_all_the_time() -> None:
    body = b'{"a": [[' + b"12345," * (MAX_ENTRIES - 9) + b"1]]}"
    assert longest_hold(body) < 0.4


def test_keys_are_counted_before_they_are_parsed() -> None:
    colons = b'["' + b'\\":' * (MAX_KEYS_IN_ALL + 5) + b'", {"a" : 1}]'
    assert parse(colons)[1] == {"a": 1}
    keys = b",".join(b'"k%d" :1' % number for number in range(MAX_KEYS_IN_ALL + 1))
    with pytest.raises(NotStrict, match="keys together"):
        parse(b"{" + keys + b"}")
    assert longest_hold(b"{" + keys * 3 + b"}") < 0.2
