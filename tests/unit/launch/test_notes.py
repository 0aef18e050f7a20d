"""What a machine knows of the jobs that were launched from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.launch import notes
from groupwise.launch.notes import Note
from groupwise.launch.places import LOCAL, SSH, Place


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


def test_a_name_does_not_leave_the_folder(state: Path) -> None:
    with pytest.raises(UsageError):
        notes.find("../../../etc/passwd")
    notes.write(Note("../outside", AFAR, Path("/p")))
    assert [path.name for path in state.iterdir()] == ["outside.json"]
