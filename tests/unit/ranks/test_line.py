"""Messages on a socket pair, and errors that are to be sent."""

import pickle
import socket
import threading

import pytest

from groupwise.errors import ConfigError, RunError
from groupwise.ranks.line import Answered, Call, Line, portable


@pytest.fixture
def ends():
    ours, theirs = (Line(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    sent = [Call(1, "learner.update", (0.5,)), Answered(2, b"x" * (3 << 20)), Answered(3, None)]
    sender = threading.Thread(target=lambda: [ours.send(message) for message in sent])
    sender.start()
    assert [theirs.receive() for _ in sent] == sent
    sender.join()


def test_who_takes_nothing_is_given_up(ends):
    ours, theirs = ends
    ours.give_up_after(0.05)
    ours.send(Answered(1, "taken"))
    with pytest.raises(OSError, match="temporarily unavailable"):
        ours.send(Answered(2, b"x" * (3 << 20)))
    assert theirs.receive() == Answered(1, "taken")
    with pytest.raises(EOFError):
        theirs.receive()


def test_what_is_there_is_taken_at_once(ends):
    ours, theirs = ends
    for number in range(3):
        ours.send(Answered(number, number))
    assert theirs.arrived() == [Answered(number, number) for number in range(3)]


def test_sockets_come_with_their_message(ends):
    ours, theirs = ends
    here, there = socket.socketpair()
    ours.send(Answered(1, "before"))
    ours.send(Answered(2, b"x" * (3 << 10)), [there])
    ours.send(Answered(3, "after"))
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
    ours.send(Answered(1, "with many"), [there] * 300)
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
        ours.send(Answered(1, None))


def test_what_cannot_be_sent_disturbs_nothing(ends):
    ours, theirs = ends
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ours.send(Answered(1, lambda: 0))
    ours.send(Answered(2, "next"))
    assert theirs.receive() == Answered(2, "next")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return portable(caught)


def test_messages_for_people_stay_as_they_are_and_other_errors_say_where_they_were_raised():
    sent = pickle.loads(pickle.dumps(raised(ConfigError("give another one"))))
    assert (type(sent), str(sent)) == (ConfigError, "give another one")
    assert getattr(sent, "__notes__", []) == []
    sent = pickle.loads(pickle.dumps(raised(KeyError("policy"))))
    assert isinstance(sent, KeyError)
    assert "in raised" in sent.__notes__[0]


def test_an_error_that_cannot_be_sent_is_told():
    class Odd(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    sent = raised(Odd(1, 2))
    assert isinstance(sent, RunError)
    assert "Odd: 1 and 2" in str(sent)
