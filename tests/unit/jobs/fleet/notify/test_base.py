import asyncio
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.jobs.fleet.notify.base import LARGEST, PendingIds, ids_in, messages

IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", fullmatch=True)


@pytest.mark.parametrize(("message", "ids"), [
    (b"job-1", {"job-1"}), (b" job-1\n", {"job-1"}), (b'"job-1"', {"job-1"}), (b'{"job_id": "job-1"}', {"job-1"}),
    (b'{"job_ids": ["a", "b"]}', {"a", "b"}), (b'["a", {"job_id": "b"}, 7, null, "not/one", "a"]', {"a", "b"}), (b"123", {"123"}),
    (b"", set()), (b"   ", set()), (b"two words", set()), (b"../../etc/passwd", set()), (b"'; DROP TABLE jobs; --", set()),
    (b"\xff\xfe\x00", set()), (b"{", set()), (b"[" * 60_000, set()), (b"[" * 30_000 + b"]" * 30_000, set()),
    (b'{"job_id": {"job_id": {"job_id": ["a"]}}}', {"a"}), (b'{"jobid": "a"}', set()), (b"a" * 81, set()), (b"a" * (LARGEST + 1), set()),
    (b'["' + b"a" * LARGEST + b'"]', set()), (b" " * LARGEST + b"a", set()), (b"NaN", {"NaN"}), (b"[1e999, NaN]", set()),
    ("jöb".encode(), set()), (b"job-1\x00", set()),
])  # fmt: skip
def test_only_ids_are_read_from_what_strangers_send(message: bytes, ids: set[str]):
    assert ids_in(message) == ids


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["job_id", "job_ids", "x"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.binary(max_size=200) | JSON.map(lambda document: json.dumps(document).encode()))
def test_no_bytes_at_all_do_harm(message: bytes):
    ids_in(message)


@settings(max_examples=30)
@given(st.lists(IDS, unique=True), st.integers(200, 2000))
def test_ids_survive_encoding_into_messages(ids: list[str], largest: int):
    sent = list(messages(ids, largest))
    assert all(len(text) <= largest for text in sent)
    assert frozenset().union(*map(ids_in, sent)) == set(ids)


async def test_ids_taken_before_the_wake_arrives_do_not_end_the_next_wait():
    pending = PendingIds()
    assert await pending.wait(0) == frozenset()
    thread = threading.Thread(target=pending.put, args=(["a"],))
    thread.start()
    thread.join()  # its call to wake us is queued in this loop, and has not run
    assert pending.take() == {"a"}
    waiting = asyncio.create_task(pending.wait(60))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    pending.put(["b"])
    assert await waiting == {"b"}
