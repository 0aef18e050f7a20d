"""Compressed bodies: what is unpacked, and what is refused."""

import gzip
import tracemalloc

import pytest

from groupwise.api.http.bodies import Bodies
from groupwise.api.schemas.problems import Refusal

LIMIT = 1000
BODY = b'{"a": "' + b"b" * 500 + b'"}'


async def read(body, encoding="gzip"):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    headers = {"content-encoding": encoding, "content-length": str(len(body))}
    return await Bodies(LIMIT).read(headers, receive)


async def test_gzip_is_unpacked():
    assert await read(gzip.compress(BODY)) == BODY
    assert await read(gzip.compress(b"a" * LIMIT), "GZIP") == b"a" * LIMIT
    assert await read(BODY, "identity") == BODY
    assert await read(b"") == b""


async def test_a_small_body_does_not_fill_the_memory():
    bomb = gzip.compress(bytes(1 << 26))[:LIMIT]
    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            await read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 100 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("body", "encoding", "code"), [
    (gzip.compress(b"a" * (LIMIT + 1)), "gzip", "too_large"),
    (gzip.compress(b"a" * 10_000_000)[:LIMIT], "gzip", "too_large"),
    (BODY, "gzip", "unsupported_media_type"), (gzip.compress(BODY)[:-1], "gzip", "unsupported_media_type"),
    (gzip.compress(BODY) * 2, "gzip", "unsupported_media_type"), (BODY, "br", "unsupported_media_type"),
], ids=["long", "bomb", "plain", "cut", "twice", "brotli"])  # fmt: skip
async def test_bodies_that_cannot_be_decompressed_are_refused(body, encoding, code):
    with pytest.raises(Refusal) as refused:
        await read(body, encoding)
    assert refused.value.code == code
    if code != "too_large":
        assert refused.value.errors[0].field == "Content-Encoding"
