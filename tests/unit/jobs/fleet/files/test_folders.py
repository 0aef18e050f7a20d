"""By what the folder of a fleet is known to be the same one on several machines."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from groupwise.jobs.fleet.files import folders
from groupwise.jobs.fleet.files.folders import identity_of


def test_a_folder_is_known_again_and_another_is_another(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    known = identity_of(first)
    assert (len(known), identity_of(first)) == (16, known)
    assert identity_of(other) != known
    assert [path.name for path in first.iterdir()] == [folders.IDENTITY]


def test_all_who_come_first_at_once_know_it_by_the_same(tmp_path: Path) -> None:
    many = Barrier(8)

    def look(_: int) -> str:
        many.wait()
        return identity_of(tmp_path)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(look, range(8)))) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_without_second_names_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuses)
    assert identity_of(tmp_path) == identity_of(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
