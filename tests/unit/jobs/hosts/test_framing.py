import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.jobs.hosts.framing import (
    MAX_NOISE,
    PROTOCOL,
    SPOKEN,
    AnswerReader,
    BadAnswer,
    answer_bytes,
    incomplete_answer_error,
)
from groupwise.jobs.hosts.host import (
    HostError,
    HostUnreachable,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)

LOG_REQUEST = Request("log", most_body=4000, most_payload=200)


def read(data: bytes) -> RunnerResponse:
    reader = AnswerReader(LOG_REQUEST)
    assert reader.feed(data)
    assert reader.answer is not None
    return reader.answer


def words(size: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=size)


@given(
    st.binary(max_size=60),
    st.dictionaries(words(5), words(20), max_size=3),
    st.binary(max_size=200),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_an_answer_is_read_whatever_stands_before_it_and_however_it_is_cut(
    noise: bytes, body: dict[str, str], payload: bytes, cuts: list[int]
) -> None:
    data = noise + answer_bytes(body, payload)
    reader = AnswerReader(LOG_REQUEST)
    whole = False
    for size in cuts:
        if not whole:
            whole = reader.feed(data[:size])
            data = data[size:]
    if not whole:
        assert reader.feed(data)
    assert reader.answer == RunnerResponse(body, payload)


def test_this_protocol_and_the_one_before_are_read_and_no_other() -> None:
    for protocol in {PROTOCOL, PROTOCOL - 1} & {*SPOKEN}:
        assert read(answer_bytes({"ok": True}, protocol=protocol)).body == {"ok": True}
    for protocol in {0, PROTOCOL + 1, 999} - {*SPOKEN}:
        with pytest.raises(BadAnswer, match="release"):
            read(answer_bytes({}, protocol=protocol))


def announced(document: bytes) -> bytes:
    digest = hashlib.sha256(document).hexdigest()
    return f"GROUPWISE-ANSWER 1 {len(document)} {digest} 0\n".encode() + document


def changed() -> bytes:
    whole = bytearray(answer_bytes({"ok": True, "state": "running"}))
    whole[-4] ^= 1
    return bytes(whole)


NO_ANSWERS = {
    "changed on the way": changed(),
    "announces an answer to log of 4001 .* 0": b"GROUPWISE-ANSWER 1 4001 " + b"0" * 64 + b" 0\n",
    "announces an answer to log of 2 .* 201": b"GROUPWISE-ANSWER 1 2 " + b"0" * 64 + b" 201\n",
    "before any answer": b"".join(struct.pack(">I", n) for n in range(MAX_NOISE // 4 + 1000)),
}


@pytest.mark.parametrize("why", NO_ANSWERS)
def test_a_changed_or_endless_answer_is_refused(why: str) -> None:
    with pytest.raises(BadAnswer, match=why):
        read(NO_ANSWERS[why])


@pytest.mark.parametrize(
    "document",
    [b"[]", b'{"a": NaN}', b'{"a": 1e400}', b"{", b"\xff\xfe", b'"ok"', b"[" * 2000],
    ids=len,
)
def test_an_answer_that_is_not_an_object_is_refused(document: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(announced(document))


def test_answers_with_too_many_small_values_are_refused() -> None:
    for many in (b"[],", b'"",'):
        with pytest.raises(BadAnswer, match="more than"):
            read(announced(b'{"x": [' + many * 900 + b"0]}"))


def test_nul_and_lone_surrogates_are_replaced_in_answers() -> None:
    for document in ('{"a": "\\u0000"}'.encode("utf-16"), b'{"a": "\xed\xa0\x80"}'):
        with pytest.raises(BadAnswer):
            read(announced(document))
    told = {"tail": "loss\0\0 \ud800 and \U0001f600", "of": [{"a\0": "plain \\\\u0000"}]}
    assert read(answer_bytes(told)).body == {
        "tail": "loss\ufffd\ufffd ? and \U0001f600",
        "of": [{"a\ufffd": "plain \\\\u0000"}],
    }


def ended(
    status: int | None, complaints: str, output: bytes = b"", *, is_sent: bool = True
) -> HostError:
    reader = AnswerReader(LOG_REQUEST)
    reader.feed(output)
    return incomplete_answer_error(reader, status, complaints, is_sent=is_sent)


def test_an_end_without_an_answer_leaves_it_open_what_happened_once_it_was_sent() -> None:
    for status, said, is_sent in (
        (127, "sh: 1: python3: not found\n", True),
        (127, "sh: 1: python3: not found\n", False),
        (1, "python3: Command not found.\n", False),
    ):
        error = ended(status, said, is_sent=is_sent)
        assert isinstance(error, RunnerRefused)
        assert (error.code, said.strip() in error.message) == ("no_python", True)
    for status in (0, 1, -9):
        greeting = b"Welcome\nof many\nwords"
        error = ended(status, " \n ", greeting, is_sent=False)
        assert isinstance(error, HostUnreachable)
        assert str(error).endswith("ran nothing: words")
        assert isinstance(ended(status, " \n ", greeting), OutcomeUnknown), "READY may be lost"
    began = b"Welcome\nGROUPWISE-READY\n"
    trace = 'Traceback (most recent call last):\n  File "x", line 7, in look\nKeyError: 7\n\n'
    for status, output in ((None, b""), (None, began), (0, began), (1, began), (127, began)):
        for is_sent in (True, False):
            error = ended(status, trace, output, is_sent=is_sent)
            assert isinstance(error, OutcomeUnknown)
            assert str(error).endswith("whole: KeyError: 7")
    assert len(str(ended(1, "first\n" + "x" * 4000, began))) < 500


def test_noise_may_look_like_an_answer_and_stand_behind_one() -> None:
    noise = b"Welcome!\nGROUPWISE-ANSWER is what follows\nGROUPWISE-ANSWER 1 2\nno newline:"
    assert read(noise + answer_bytes({"ok": True}, b"abc") + b"logout\n").payload == b"abc"
