import hashlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.hosts.framing import (
    MOST_NOISE,
    PROTOCOL,
    SPOKEN,
    AnswerReader,
    BadAnswer,
    Exchange,
    accepted,
    answer_bytes,
    request_bytes,
    without_answer,
)
from groupwise.hosts.port import Answer, OutcomeUnknown, Request, RunnerRefused

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


def read(data: bytes) -> Answer:
    reader = AnswerReader()
    assert reader.feed(data)
    assert reader.answer is not None
    return reader.answer


def test_a_request_tells_length_and_hash_and_carries_its_payload() -> None:
    asked = Request("put", {"root": "~", "blobs": [["a", 3]]}, b"\0\nx", {"TOKEN": "hidden"})
    header, _, rest = request_bytes(asked).partition(b"\n")
    word, protocol, length, digest = header.split()
    document = rest[: int(length)]
    assert (word, int(protocol)) == (b"GROUPWISE", PROTOCOL)
    assert hashlib.sha256(document).hexdigest().encode() == digest
    assert rest[int(length) :] == b"\0\nx"
    assert json.loads(document) == {
        "protocol": PROTOCOL,
        "verb": "put",
        "root": "~",
        "blobs": [["a", 3]],
        "payload": 3,
        "secrets": {"TOKEN": "hidden"},
    }
    plain = json.loads(request_bytes(Request("hello")).partition(b"\n")[2])
    assert plain == {"protocol": PROTOCOL, "verb": "hello"}


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
    reader = AnswerReader()
    whole = False
    for size in cuts:
        if not whole:
            whole = reader.feed(data[:size])
            data = data[size:]
    if not whole:
        assert reader.feed(data)
    assert reader.answer == Answer(body, payload)


def test_noise_may_stand_right_before_the_answer_or_look_like_one() -> None:
    noise = b"Welcome!\nGROUPWISE-ANSWER is what follows\nGROUPWISE-ANSWER 1 2\nno newline:"
    assert read(noise + answer_bytes({"ok": True})).body == {"ok": True}
    assert read(answer_bytes({}, b"abc") + b"logout\n").payload == b"abc"


def test_this_protocol_and_the_one_before_are_read_and_no_other() -> None:
    for protocol in {PROTOCOL, PROTOCOL - 1} & {*SPOKEN}:
        assert read(answer_bytes({"ok": True}, protocol=protocol)).body == {"ok": True}
    for protocol in {0, PROTOCOL + 1, 999} - {*SPOKEN}:
        with pytest.raises(BadAnswer, match="release"):
            read(answer_bytes({}, protocol=protocol))


def test_an_answer_that_was_changed_is_none() -> None:
    whole = bytearray(answer_bytes({"ok": True, "state": "running"}))
    whole[-4] ^= 1
    with pytest.raises(BadAnswer, match="changed on the way"):
        read(bytes(whole))


@pytest.mark.parametrize("document", [b"[]", b"{", b"\xff\xfe", b'"ok"', b"[" * 10**5], ids=len)
def test_an_answer_that_is_no_object_is_none(document: bytes) -> None:
    digest = hashlib.sha256(document).hexdigest()
    with pytest.raises(BadAnswer, match=r"JSON|object is expected"):
        read(f"GROUPWISE-ANSWER 1 {len(document)} {digest} 0\n".encode() + document)


def test_endless_noise_is_given_up() -> None:
    reader = AnswerReader()
    pieces = [struct.pack(">I", n) * 250 for n in range(MOST_NOISE // 1000 + 100)]
    with pytest.raises(BadAnswer, match="before any answer"):
        any(map(reader.feed, pieces))


def test_an_answer_that_announces_too_much_is_not_waited_for() -> None:
    with pytest.raises(BadAnswer, match="announces"):
        read(b"GROUPWISE-ANSWER 1 999999999999 " + b"0" * 64 + b" 0\n")


def test_a_refusal_is_raised_with_its_code() -> None:
    with pytest.raises(RunnerRefused, match="no room") as refused:
        accepted(Answer({"error": {"code": "disk_full", "message": "no room"}}))
    assert refused.value.code == "disk_full"


def test_what_no_database_takes_does_not_come_through() -> None:
    told = {"tail": "loss\0\0 \ud800 and \U0001f600", "of": [{"a\0": "plain \\\\u0000"}]}
    assert read(answer_bytes(told)).body == {
        "tail": "loss\ufffd\ufffd ? and \U0001f600",
        "of": [{"a\ufffd": "plain \\\\u0000"}],
    }


def test_a_machine_without_python_has_done_nothing() -> None:
    error = without_answer(AnswerReader(), 127, "sh: 1: exec: python3: not found\n")
    assert isinstance(error, RunnerRefused)
    assert error.code == "no_python"
    assert "python3: not found" in error.message


@pytest.mark.parametrize("status", [None, 0, 1, -9])
def test_an_end_without_an_answer_leaves_it_open_what_happened(status: int | None) -> None:
    reader = AnswerReader()
    reader.feed(b"Connection to nowhere")
    error = without_answer(reader, status, "")
    assert isinstance(error, OutcomeUnknown)
    assert "Connection to nowhere" in str(error)


def test_of_a_runner_that_broke_only_its_last_words_are_told() -> None:
    trace = 'Traceback (most recent call last):\n  File "x", line 7, in look\nKeyError: 7\n\n'
    told = str(without_answer(AnswerReader(), 1, trace))
    assert told.endswith("before its answer was whole: KeyError: 7")
    assert len(str(without_answer(AnswerReader(), 1, "first\n" + "x" * 4000))) < 500
    noisy = AnswerReader()
    noisy.feed(b"Welcome\nof many\nwords")
    assert str(without_answer(noisy, 0, " \n ")).endswith("whole: words")


async def test_an_exchange_takes_the_first_answer_and_no_later_error() -> None:
    exchange = Exchange()
    exchange.heard(answer_bytes({"n": 1}))
    exchange.heard(answer_bytes({"n": 2}))
    exchange.over()
    assert (await exchange.answer).body == {"n": 1}
    assert exchange.answered


async def test_an_exchange_that_nobody_waits_for_complains_to_nobody() -> None:
    exchange = Exchange()
    exchange.fail(OutcomeUnknown("gone"))
    exchange.drop()
    other = Exchange()
    other.drop()
    other.over()
    assert other.answer.cancelled()
