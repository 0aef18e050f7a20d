"""What crosses the socket: values without their surroundings, and errors that people can read on the other side."""

from typing import Any

from groupwise.core.errors import ConfigError, EndpointError, OutOfMemoryError, RunError, StoreError
from groupwise.server.engine.messages import pack, pack_error, unpack, unpack_error
from groupwise.server.run.engine_errors import refusal_of
from groupwise.server.run.engine_supervisor import DISK_FULL_RETRY_SECONDS


def crossed(error: BaseException) -> Any:
    return unpack_error(pack_error(error))


def test_values_and_errors_of_ours_come_back_as_they_are_and_others_are_explained():
    assert unpack(pack((1, {"a": None}))) == (1, {"a": None})
    for error in (ConfigError("a key"), EndpointError("busy", 503)):
        error.add_note("where")
        received = crossed(error)
        assert (type(received), str(received), vars(received)) == (
            type(error),
            str(error),
            vars(error),
        )
    for error, kind in (
        (ZeroDivisionError("by zero"), RunError),
        (MemoryError("by zero"), OutOfMemoryError),
        (OSError(28, "by zero", "run.db"), StoreError),
        (OSError(13, "by zero", "run.db"), RunError),
    ):
        assert type(crossed(error)) is kind
        assert kind is OutOfMemoryError or "by zero" in str(crossed(error))


def test_a_full_disk_of_the_engine_is_reported_as_such():
    refusal = refusal_of(crossed(OSError(28, "No space left on device")), "engine_failed")
    assert (refusal.code, refusal.retry_after) == ("disk_full", DISK_FULL_RETRY_SECONDS)
    assert refusal_of(crossed(OSError(13, "no")), "engine_failed").code == "engine_failed"
