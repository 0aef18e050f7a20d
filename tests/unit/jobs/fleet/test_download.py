"""Downloads: complete or absent, kept if unchanged, without harm to other files, resumed after an interruption.

1. A file appears under its name when its hash was found right, with its permission bits.
2. A file that is there and right is kept and not asked for; another one is in the way, and then nothing at all comes, unless forced.
3. After an interruption the file that was on its way goes on where it ended; what is torn there is fetched again.
4. What comes and is not what was said is not kept. One such file, or one that cannot be had, keeps no other from coming.
5. No path leads out of the folder.
"""

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.client import FleetAway
from groupwise.jobs.fleet.download import DownloadError, DownloadRequest, bring, fetch
from groupwise.jobs.hosts.spec import FileEntry


class Left:
    """Files that a job left, and which bytes of them were asked for."""

    def __init__(self, **files: bytes) -> None:
        self.bytes = {name.replace("__", "/"): data for name, data in files.items()}
        self.entries = {
            path: FileEntry(hashlib.sha256(data).hexdigest(), 0o644, len(data))
            for path, data in self.bytes.items()
        }
        self.asked: list[tuple[str, int]] = []
        self.breaks_after: int | None = None

    def pieces(self, path: str, offset: int) -> Iterator[bytes]:
        self.asked.append((path, offset))
        data = self.bytes[path]
        for start in range(offset, len(data), 10):
            if self.breaks_after is not None and start >= self.breaks_after:
                raise FleetAway("cut off")
            yield data[start : start + 10]

    def bring(self, folder: Path, **more: Any) -> frozenset[str]:
        return bring(self.entries, self.pieces, folder, **more)


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob("*.part"))


def test_files_come_with_their_bits(tmp_path: Path) -> None:
    left = Left(a=b"x" * 25, sub__run=b"#!/bin/sh\n", empty=b"")
    left.entries["sub/run"] = FileEntry(left.entries["sub/run"].sha256, 0o4777, 10)
    told: list[tuple[int, int, str]] = []
    assert left.bring(tmp_path, on_progress=lambda *said: told.append(said)) == frozenset()
    assert {path: (tmp_path / path).read_bytes() for path in left.bytes} == left.bytes
    (tmp_path / "new").touch()  # as this user's umask has it
    mode = (tmp_path / "new").stat().st_mode & 0o7777
    (tmp_path / "new").unlink()
    executable = mode & 0o755 | (mode & 0o444) >> 2
    assert (tmp_path / "sub/run").stat().st_mode & 0o7777 == executable
    assert (tmp_path / "a").stat().st_mode & 0o7777 == mode & 0o644
    assert not parts(tmp_path)
    assert told[-1][:2] == (35, 35)
    assert [here for here, _, _ in told] == sorted(here for here, _, _ in told)


def test_complete_files_are_not_downloaded_again(tmp_path: Path) -> None:
    left = Left(a=b"a" * 25, b=b"b" * 25)
    (tmp_path / "a").write_bytes(left.bytes["a"])
    assert left.bring(tmp_path) == {"a"}
    assert left.asked == [("b", 0)]
    assert left.bring(tmp_path) == {"a", "b"}
    assert len(left.asked) == 1


@pytest.mark.parametrize("other", [b"c" * 25, b"longer" * 9, b""])
def test_a_download_over_another_file_needs_force(tmp_path: Path, other: bytes) -> None:
    left = Left(a=b"a" * 25, b=b"b" * 25)
    (tmp_path / "b").write_bytes(other)
    with pytest.raises(UsageError, match=r"^b in .* another file.*--force"):
        left.bring(tmp_path)
    assert left.asked == []
    assert not (tmp_path / "a").exists()
    left.bring(tmp_path, force=True)
    assert (tmp_path / "b").read_bytes() == left.bytes["b"]


def test_a_link_is_another_file_and_is_replaced_itself(tmp_path: Path) -> None:
    """A folder is never."""
    left = Left(a=b"a" * 25)
    (tmp_path / "elsewhere").write_bytes(left.bytes["a"])
    (tmp_path / "a").symlink_to("elsewhere")
    with pytest.raises(UsageError, match="is another file"):
        left.bring(tmp_path)
    left.bring(tmp_path, force=True)
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "elsewhere").exists()
    (tmp_path / "b").mkdir()
    with pytest.raises(UsageError, match="a folder is"):
        Left(b=b"a").bring(tmp_path, force=True)


def test_an_interrupted_download_continues(tmp_path: Path) -> None:
    left = Left(a=b"a" * 25, b=bytes(range(50)))
    left.breaks_after = 30
    with pytest.raises(FleetAway):
        left.bring(tmp_path)
    assert not (tmp_path / "b").exists()
    left.breaks_after = None
    assert left.bring(tmp_path) == {"a"}
    assert left.asked == [("a", 0), ("b", 0), ("b", 30)]
    assert (tmp_path / "b").read_bytes() == left.bytes["b"]
    assert not parts(tmp_path)


@pytest.mark.parametrize("torn", [b"?" * 20, b"?" * 50, b"?" * 70])
def test_a_corrupt_partial_file_is_downloaded_from_the_beginning(
    tmp_path: Path, torn: bytes
) -> None:
    left = Left(b=bytes(range(50)))
    (tmp_path / f".{left.entries['b'].sha256}.part").write_bytes(torn)
    left.bring(tmp_path)
    assert (tmp_path / "b").read_bytes() == left.bytes["b"]
    assert left.asked[-1] == ("b", 0)


@pytest.mark.parametrize("wrong", [b"?" * 50, b"short", b"?" * 51])
def test_a_download_with_a_wrong_hash_is_not_kept(tmp_path: Path, wrong: bytes) -> None:
    left = Left(b=bytes(range(50)))
    left.bytes["b"] = wrong
    with pytest.raises(DownloadError, match="1 of 1 file did"):
        left.bring(tmp_path)
    assert list(tmp_path.iterdir()) == []


class Broken(Left):
    """A fleet that gives one of the files to nobody."""

    def __init__(self, error: Exception, **files: bytes) -> None:
        super().__init__(**files)
        self._error = error

    def pieces(self, path: str, offset: int) -> Iterator[bytes]:
        if path == "b":
            raise self._error
        yield from super().pieces(path, offset)


@pytest.mark.parametrize(
    "error", [Refusal("unknown_file"), Refusal("internal"), OSError(errno.ENAMETOOLONG, "too long")]
)
def test_a_file_that_cannot_be_fetched_does_not_block_the_others(
    tmp_path: Path, error: Exception
) -> None:
    with pytest.raises(DownloadError, match=r"^1 of 3 files .*: b: "):
        Broken(error, a=b"a", b=b"b", c=b"c").bring(tmp_path)
    assert (tmp_path / "a").read_bytes() + (tmp_path / "c").read_bytes() == b"ac"


def test_two_at_once_do_not_write_one_file(tmp_path: Path) -> None:
    left = Left(b=bytes(range(50)))
    pieces = left.pieces

    def meanwhile(path: str, offset: int) -> Iterator[bytes]:
        with pytest.raises(DownloadError, match="another process"):
            left.bring(tmp_path)
        return pieces(path, offset)

    bring(left.entries, meanwhile, tmp_path)
    assert (tmp_path / "b").read_bytes() == left.bytes["b"]


# What is wanted


class Fleet:
    """A fleet that has something of one job."""

    def __init__(self, left: Left, checkpoints: list[dict[str, Any]] | None = None) -> None:
        self._left, self._checkpoints = left, checkpoints or []

    def artefacts(self, job_id: str, *, epoch: int | None = None, rank: int = 0) -> dict[str, Any]:
        files = {p: [e.sha256, e.mode, e.size] for p, e in self._left.entries.items()}
        return {"epoch": epoch or 7, "rank": rank, "files": files, "left_out": [["l", "link"]]}

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        return self._checkpoints

    def artefact_pieces(
        self, job_id: str, path: str, *, epoch: int, rank: int = 0, offset: int = 0
    ) -> Iterator[bytes]:
        assert epoch == 7
        return self._left.pieces(path, offset)

    def checkpoint_pieces(self, job_id: str, sha256: str, *, offset: int = 0) -> Iterator[bytes]:
        path = next(p for p, e in self._left.entries.items() if e.sha256 == sha256)
        return self._left.pieces(path, offset)


def test_files_and_folders_are_chosen(tmp_path: Path) -> None:
    fleet = Fleet(Left(out__a=b"1", out__sub__b=b"2", out__sub2__c=b"3"))
    found = fetch(fleet, "job-1", tmp_path, DownloadRequest(["out/sub/", "./out/a"]))
    assert [each["path"] for each in found["files"]] == ["out/a", "out/sub/b"]
    assert not (tmp_path / "out/sub2").exists()
    with pytest.raises(UsageError, match=r"'out/sub3'.* out/sub"):
        fetch(fleet, "job-1", tmp_path, DownloadRequest(["out/sub3"]))
    with pytest.raises(UsageError, match="out/a, out/sub/b"):
        fetch(fleet, "job-1", tmp_path, DownloadRequest(["weights"]))


def test_without_outputs_the_checkpoints_are_named(tmp_path: Path) -> None:
    class Running(Fleet):
        def artefacts(self, job_id: str, *, epoch: int | None = None, rank: int = 0) -> Any:
            raise Refusal("unknown_file", f"{job_id} is running.")

    with pytest.raises(Refusal, match="fetch job-1 --checkpoints"):
        fetch(Running(Left(), [{"path": "outputs"}]), "job-1", tmp_path, DownloadRequest())
    with pytest.raises(Refusal, match=r"running\.$"):
        fetch(Running(Left()), "job-1", tmp_path, DownloadRequest())


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../b", "", "a//b"])
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    left = Left()
    left.entries[path] = FileEntry("0" * 64, 0o644, 1)
    with pytest.raises(DownloadError, match="not fetched"):
        fetch(Fleet(left), "job-1", tmp_path / "here", DownloadRequest())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sha256", ["../../y", "a/b", "0" * 63, 7])
def test_an_invalid_hash_is_refused(tmp_path: Path, sha256: Any) -> None:
    left = Left()
    left.entries["a"] = FileEntry(sha256, 0o644, 1)
    with pytest.raises(DownloadError, match="no hash"):
        fetch(Fleet(left), "job-1", tmp_path, DownloadRequest())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_called_as_what_is_not_whole_takes_no_others_place(tmp_path: Path) -> None:
    left = Left(a=b"1")
    name = f".{left.entries['a'].sha256}.part"
    left.bytes[name], left.entries[name] = (
        b"2",
        FileEntry(hashlib.sha256(b"2").hexdigest(), 0o644, 1),
    )
    with pytest.raises(DownloadError, match="not whole yet"):
        left.bring(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
