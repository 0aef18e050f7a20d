"""What a machine stores about the jobs that were launched from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.launch import local_registry
from groupwise.jobs.launch.local_registry import Note
from groupwise.jobs.launch.places import LOCAL, SSH, JobBackend


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "groupwise" / "launches"


AFAR = JobBackend(SSH, {"host": "h", "user": "u", "port": 2, "key": None, "host_key": "k"})


def test_a_note_comes_back_as_it_was() -> None:
    found = [Note("a", AFAR, Path("/p")), Note("b", JobBackend(LOCAL), Path("/q"))]
    for each in reversed(found):
        local_registry.write(each)
    assert local_registry.list_notes() == found
    assert local_registry.find("a") == found[0]
    assert str(local_registry.find("a").place) == "ssh:u@h:2"
    local_registry.remove(found[0])
    local_registry.remove(found[0])
    assert local_registry.list_notes() == found[1:]


def test_a_job_elsewhere_of_the_same_name_keeps_its_note() -> None:
    kept, other = Note("a", AFAR, Path("/p")), Note("a", JobBackend(LOCAL), Path("/p"))
    local_registry.write(kept)
    assert local_registry.is_of_another(other)
    local_registry.remove(other)
    assert local_registry.find("a") == kept
    another_way = replace(kept, place=JobBackend(SSH, {**AFAR.detail, "key": "/a/key"}))
    assert not local_registry.is_of_another(another_way)
    local_registry.remove(another_way)
    assert local_registry.list_notes() == []
    assert not AFAR.is_same(JobBackend(SSH, {**AFAR.detail, "host_key": "another"}))


def test_a_name_does_not_leave_the_folder(state: Path) -> None:
    with pytest.raises(UsageError):
        local_registry.find("../../../etc/passwd")
    local_registry.write(Note("../outside", AFAR, Path("/p")))
    assert [path.name for path in state.iterdir()] == ["outside.json"]
