"""Messages on a socket pair, and errors that are to be sent."""

import socket
import threading

import pytest

from groupwise.engine.distributed.messages import Call, CallResult, MessageChannel


@pytest.fixture
def ends():
    ours, theirs = (MessageChannel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    sent = [Call(1, "learner.update", (0.5,)), CallResult(2, b"x" * (3 << 20)), CallResult(3, None)]
    sender = threading.Thread(target=lambda: [ours.send(message) for message in sent])
    sender.start()
    assert [theirs.receive() for _ in sent] == sent
    sender.join()


def test_a_peer_that_does_not_read_is_disconnected(ends):
    ours, theirs = ends
    ours.set_send_timeout(0.05)
    ours.send(CallResult(1, "taken"))
    with pytest.raises(OSError, match="temporarily unavailable"):
        ours.send(CallResult(2, b"x" * (3 << 20)))
    assert theirs.receive() == CallResult(1, "taken")
    with pytest.raises(EOFError):
        theirs.receive()


def test_sockets_come_with_their_message(ends):
    ours, theirs = ends
    here, there = socket.socketpair()
    ours.send(CallResult(1, "before"))
    ours.send(CallResult(2, b"x" * (3 << 10)), [there])
    ours.send(CallResult(3, "after"))
    there.close()
    assert [theirs.receive().number for _ in range(3)] == [1, 2, 3]
    (handed,) = theirs.taken_over()
    assert theirs.taken_over() == []
    handed.sendall(b"through it")
    assert here.recv(100) == b"through it"
    for each in (here, handed):
        each.close()


def test_more_sockets_than_the_kernel_hands_over_at_once_come_too(ends):
    ours, theirs = ends
    here, there = socket.socketpair()
    ours.send(CallResult(1, "with many"), [there] * 300)
    assert theirs.receive().value == "with many"
    handed = theirs.taken_over()
    assert len(handed) == 300
    for each in (here, there, *handed):
        each.close()


def test_the_end_is_noticed(ends):
    ours, theirs = ends
    ours.end()
    ours.end()
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(CallResult(1, None))
