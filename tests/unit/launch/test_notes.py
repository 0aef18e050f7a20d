"""What a machine knows of the jobs that were launched from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.launch import notes
from groupwise.launch.notes import Note
from groupwise.launch.places import LOCAL, SSH, Place, reach


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "groupwise" / "launches"


AFAR = Place(SSH, {"host": "h", "user": "u", "port": 2, "key": None, "host_key": "k"})


def test_a_note_comes_back_as_it_was() -> None:
    found = [Note("a", AFAR, Path("/p")), Note("b", Place(LOCAL), Path("/q"))]
    for each in reversed(found):
        notes.write(each)
    assert notes.every() == found
    assert notes.find("a") == found[0]
    assert str(notes.find("a").place) == "ssh:u@h:2"
    notes.remove(found[0])
    notes.remove(found[0])
    assert notes.every() == found[1:]


def test_a_job_elsewhere_of_the_same_name_keeps_its_note() -> None:
    kept, other = Note("a", AFAR, Path("/p")), Note("a", Place(LOCAL), Path("/p"))
    notes.write(kept)
    assert notes.is_of_another(other)
    notes.remove(other)
    assert notes.find("a") == kept
    another_way = replace(kept, place=Place(SSH, {**AFAR.detail, "key": "/a/key"}))
    assert not notes.is_of_another(another_way)
    notes.remove(another_way)
    assert notes.every() == []
    assert not AFAR.is_same(Place(SSH, {**AFAR.detail, "host_key": "another"}))


def test_an_agent_is_the_one_of_the_login_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is another one the next day, and one that was written down is dead by then."""
    place = Place(SSH, {**AFAR.detail, "agent": True})
    for socket in ("/run/yesterday", "/run/today"):
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        backend: Any = reach(Place.from_document(place.document()))
        assert backend._runner.host._agent_path == socket
    assert "/run" not in str(place.document())
    monkeypatch.delenv("SSH_AUTH_SOCK")
    earlier: Any = reach(Place(SSH, {**AFAR.detail, "agent": "/run/kept"}))
    assert earlier._runner.host._agent_path == "/run/kept", "where there is no other"


def test_a_note_may_say_later_where_the_results_are() -> None:
    note = Note("a", AFAR, Path("/p"))
    notes.note_fetched(note, Path("/there"))
    assert notes.every() == [], "it is not known from here"
    notes.write(note)
    notes.note_fetched(note, Path("/there"))
    notes.note_fetched(replace(note, place=Place(LOCAL)), Path("/elsewhere"))
    assert notes.find("a") == replace(note, fetched=Path("/there"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"place": {"kind": "moon", "detail": {}}}'])
def test_what_cannot_be_read_is_passed_over(state: Path, text: str) -> None:
    notes.write(Note("one", AFAR, Path("/p")))
    (state / "broken.json").write_text(text)
    assert [each.name for each in notes.every()] == ["one"]
    with pytest.raises(UsageError, match=r"there are: one\. .*--at ssh:USER@HOST"):
        notes.find("broken")


def test_a_name_does_not_leave_the_folder(state: Path) -> None:
    with pytest.raises(UsageError):
        notes.find("../../../etc/passwd")
    notes.write(Note("../outside", AFAR, Path("/p")))
    assert [path.name for path in state.iterdir()] == ["outside.json"]
