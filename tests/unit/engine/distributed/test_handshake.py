"""Two processes authenticate each other over a network, and every message; a stranger learns nothing that helps.

1. Who knows the secret is let in under its number; who does not is not, on either side, whatever it sends.
2. What was overheard is of no use: not for another call, nor in this one.
3. A message that was changed, repeated, left out or made up is none, and ends the connection before it is unpickled.
"""

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from groupwise.core.errors import UsageError
from groupwise.core.processes.frames import add_frame
from groupwise.core.rendezvous import KEY_FILE
from groupwise.engine.distributed import handshake, peer
from groupwise.engine.distributed.handshake import (
    Seal,
    TamperedMessageError,
    UnknownCallerError,
    _handshake_code,
    client_handshake,
    read_attempt_secret,
    server_handshake,
)
from groupwise.engine.distributed.messages import CallResult, MessageChannel

SECRET = b"of this attempt"
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The first process's end and a rank's."""
    ends = socket.socketpair()
    yield ends
    for each in ends:
        each.close()


@contextmanager
def beside(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Done in a thread meanwhile; what it comes to."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    yield found
    thread.join()


def both(ours: bytes = SECRET, theirs: bytes = SECRET) -> tuple[list[Any], tuple[Any, Any]]:
    """What each side comes to, the first process's first; and their ends."""
    first, rank = socket.socketpair()
    found: list[Any] = [None, None]

    def side(number: int, come_to: Callable[[], Any], end: socket.socket) -> None:
        try:
            found[number] = come_to()
        except (OSError, ValueError) as error:
            found[number] = error
            end.close()

    sides = (
        threading.Thread(target=side, args=(0, lambda: server_handshake(first, ours), first)),
        threading.Thread(target=side, args=(1, lambda: client_handshake(rank, theirs, 3), rank)),
    )
    for each in sides:
        each.start()
    for each in sides:
        each.join()
    return found, (first, rank)


def test_a_shared_secret_opens_a_channel_in_both_directions() -> None:
    ((number, seal), its), (here, there) = both()
    assert number == 3
    ours, theirs = MessageChannel(here, seal), MessageChannel(there, its)
    for each in range(3):
        ours.send(CallResult(each, b"x" * each))
        theirs.send(CallResult(each, None))
    assert [theirs.receive().number for _ in range(3)] == [0, 1, 2]
    assert [ours.receive().number for _ in range(3)] == [0, 1, 2]
    ours.close()
    theirs.close()


def test_another_secret_fails_on_both_sides() -> None:
    found, ends = both(theirs=b"another")
    assert isinstance(found[0], UnknownCallerError)
    assert isinstance(found[1], OSError)
    for each in ends:
        each.close()


def receive_bytes(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += end.recv(count)
    return data


def test_the_caller_rejects_a_replayed_challenge(pair: Pair) -> None:
    """Who only repeats what it heard is not believed."""
    first, rank = pair
    first.sendall(b"c" * 32)
    with (
        beside(lambda: first.sendall(receive_bytes(first, 72)[-32:])),
        pytest.raises(UnknownCallerError, match="not the first process"),
    ):
        client_handshake(rank, SECRET, 1)


def test_an_answer_is_good_for_one_challenge(pair: Pair) -> None:
    said = b"00000001" + b"r" * 32
    first, rank = pair
    with beside(lambda: server_handshake(first, SECRET)[0]) as found:
        answer = said + _handshake_code(SECRET, b"rank", rank.recv(32) + said)
        rank.sendall(answer)
    assert found == [1]
    another, again = socket.socketpair()
    with another, again:
        again.sendall(answer)
        with pytest.raises(UnknownCallerError):
            server_handshake(another, SECRET)


def sealed() -> tuple[Seal, Seal]:
    return Seal(b"one", b"other"), Seal(b"other", b"one")


def sent(seal: Seal, message: object) -> bytes:
    data = pickle.dumps(message)
    return add_frame(seal.code(data) + data)


class Spoils:
    """Unpickled, it tells."""

    done: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Spoils.done.append, ("unpickled",)


@pytest.mark.parametrize("what", ["made up", "changed", "repeated", "left out", "sent back"])
def test_forged_changed_repeated_or_reordered_messages_are_never_unpickled(what: str) -> None:
    ours, theirs = sealed()
    first, second = sent(ours, "first"), sent(ours, Spoils())
    wires = {
        "made up": [add_frame(b"x" * 32 + pickle.dumps(Spoils()))],
        "changed": [first[:-2] + b"x."],
        "repeated": [first, first],
        "left out": [second],
        "sent back": [sent(Seal(b"other", b"one"), Spoils())],
    }
    here, there = socket.socketpair()
    line = MessageChannel(there, theirs)
    here.sendall(b"".join(wires[what]))
    if what == "repeated":
        assert line.receive() == "first"
    with pytest.raises(TamperedMessageError):
        line.receive()
    assert Spoils.done == []
    here.close()
    line.close()


def test_the_secret_is_in_a_file_that_is_named(tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "key"
    assert read_attempt_secret({}) is None
    with pytest.raises(UsageError, match="cannot be read"):
        read_attempt_secret({KEY_FILE: str(path)})
    path.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_attempt_secret({KEY_FILE: str(path)})
    path.write_text("secret\n")
    assert read_attempt_secret({KEY_FILE: str(path)}) == b"secret"
    monkeypatch.delenv(KEY_FILE, raising=False)
    with pytest.raises(UsageError, match="the same file"):
        peer._call_first_rank(["127.0.0.1", "1"], 1)


def test_a_stranger_that_sends_slowly_is_disconnected_after_the_timeout(
    monkeypatch: Any, pair: Pair
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 0.3)
    first, rank = pair
    over = threading.Event()

    def says() -> None:
        while not over.wait(0.05):
            rank.sendall(b"x")

    with beside(says):
        with pytest.raises(TimeoutError):
            server_handshake(first, SECRET)
        over.set()


def test_a_rank_calls_again_while_the_first_one_is_busy_with_others(monkeypatch: Any) -> None:
    monkeypatch.setattr(peer, "RETRY_SECONDS", 0.0)
    monkeypatch.delenv(KEY_FILE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def first() -> int:
            for _ in range(2):
                door.accept()[0].close()
            with door.accept()[0] as connection:
                return server_handshake(connection, SECRET)[0]

        with beside(first) as found:
            peer._call_first_rank(
                ["127.0.0.1", str(door.getsockname()[1]), SECRET.decode()], 2
            ).close()
    assert found == [2]
