"""The coordinator assigns turns: requests come twice, late, from other calls, and after a coordinator or a container was killed in
between."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.clouds.modal.api import Call
from groupwise.jobs.clouds.modal.coordinator import TAKEN_TOKEN, answer, attempt_at
from groupwise.jobs.clouds.modal.worker import ContainerContext, work
from groupwise.jobs.hosts.runner.attempt_folder import void_queued
from groupwise.jobs.hosts.runner.files import write_file, write_json
from groupwise.jobs.hosts.runner.root import TOKEN
from groupwise.jobs.hosts.runner.state import exit_of


@pytest.fixture
def home(tmp_path: Path) -> str:
    """With an attempt that waits."""
    place = attempt_at(str(tmp_path), "job", 1)
    os.makedirs(place.path)
    write_json(place.at("state.json"), {"phase": "queued"})
    write_file(place.at(TOKEN), b"{}")
    return str(tmp_path)


def ask(home: str, what: str, *arguments: Any) -> Any:
    return answer(home, what, ("job", 1, *arguments))


def turn(home: str) -> dict[str, Any]:
    return answer(home, "turns", ([["job", 1]],))["job.1"]


def test_the_first_of_two_calls_takes_the_turn_and_keeps_it(home: str) -> None:
    assert ask(home, "take", 1, "a")["handed_over"] is False
    assert ask(home, "take", 1, "b") is None
    assert ask(home, "take", 1, "a")["handed_over"] is False
    assert turn(home)["call"] == "a"
    assert ask(home, "take", 2, "b") is None


def test_a_token_that_was_voided_or_is_taken_begins_nothing(home: str) -> None:
    """Whoever voids it may have been killed halfway, and a coordinator between token and turn: that one is asked again."""
    place = attempt_at(home, "job", 1)
    for taken, begins in ((TOKEN + ".voided", False), (TAKEN_TOKEN, True)):
        os.rename(place.at(TOKEN), place.at(taken))
        assert (ask(home, "take", 1, "a") is not None) is begins
        if not begins:
            os.rename(place.at(taken), place.at(TOKEN))


def test_an_attempt_that_was_voided_while_queued_cannot_be_taken(home: str) -> None:
    void_queued(attempt_at(home, "job", 1), "")
    assert ask(home, "take", 1, "a") is None


def test_handed_over_it_is_the_next_calls(home: str) -> None:
    ask(home, "take", 1, "a")
    assert ask(home, "hand_over", 1, "b") is False
    assert ask(home, "hand_over", 1, "a") is True
    assert ask(home, "hand_over", 1, "a") is True
    assert ask(home, "take", 1, "a")["handed_over"] is True
    assert ask(home, "note", 2, "c")["given"] == ["c"]
    assert ask(home, "take", 1, "a") is None
    assert ask(home, "hand_over", 1, "a") is False
    assert ask(home, "take", 2, "c")["handed_over"] is False
    assert ask(home, "take", 2, "d") is None


def test_a_container_lost_between_handing_over_and_spawning_spawns_in_the_next(home: str) -> None:
    ask(home, "take", 1, "a")
    ask(home, "hand_over", 1, "a")
    spawned: list[Call] = []
    spawn = lambda call: spawned.append(call) or "b"  # noqa: E731
    coordinator = lambda what, *arguments: answer(home, what, arguments)  # noqa: E731

    def around() -> ContainerContext:
        return ContainerContext(home, home, _Nothing(), coordinator, spawn, {}, {})

    call = Call("job", 1)
    assert "another call continues" in work(call, "a", {}, around())
    assert "another call's turn" in work(call, "a", {}, around())
    assert spawned == [replace(call, number=2)]
    assert turn(home)["given"] == ["b"]


class _Nothing:
    def commit(self) -> None:
        raise AssertionError("nothing was written")

    def reload(self) -> None:
        raise AssertionError("nothing is to be read")


def test_a_job_ended_by_the_coordinator_is_over(home: str) -> None:
    ask(home, "take", 1, "a")
    ask(home, "end", "because")
    assert ask(home, "take", 1, "a") is None
    assert ask(home, "hand_over", 1, "a") is False
    ended = exit_of(attempt_at(home, "job", 1), "exit.json")
    assert ended is not None
    assert (ended["reason"], ended["message"]) == ("cancelled", "because")


def test_requests_for_an_unknown_attempt_write_nothing(tmp_path: Path) -> None:
    home = str(tmp_path)
    assert ask(home, "take", 1, "a") is None
    assert ask(home, "note", 1, "a") is None
    ask(home, "end", "because")
    assert list(tmp_path.rglob("*")) == []
