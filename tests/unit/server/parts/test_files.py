"""Files of parts are transferred in pieces, and never leave their folder."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from groupwise.api.schemas.parts import PIECE
from groupwise.api.schemas.problems import Refusal
from groupwise.server.parts.files import Files
from tests.meanwhile import right_after

BAD = (
    *("..", "../a", "a/../b", "/etc/passwd", "a//b", "a/", "", ".hidden", "a/.b", "a\\b", "a b"),
    *("a/b/c/d/e", "x" * 201, "a\n", "ä", "a\0"),
)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "parts")


@pytest.mark.parametrize("path", BAD)
def test_paths_that_lead_elsewhere_are_refused(files: Files, path: str) -> None:
    for ask in (
        lambda: files.write(path, 0, b"x"),
        lambda: files.list(path),
        lambda: files.read(path, 0),
        lambda: files.delete(path),
        lambda: files.folder(path),
    ):
        with pytest.raises(Refusal) as refused:
            ask()
        assert refused.value.code == "invalid_request"
    assert not list(files.root.rglob("*"))


def test_pieces_make_a_file_and_may_come_again(files: Files) -> None:
    for offset, piece in ((0, b"abc"), (3, b"def"), (3, b"dEf"), (6, b"")):
        receipt = files.write("a/b.bin", offset, piece)
    assert [(each.path, each.size) for each in receipt.files] == [("b.bin", 6)]
    assert [(each.path, each.size) for each in files.list("a").files] == [("b.bin", 6)]
    contents = [files.read("a/b.bin", offset) for offset in (0, 4, 60, 2**52)]
    assert contents == [b"abcdEf", b"Ef", b"", b""]
    with pytest.raises(Refusal, match="6 bytes"):
        files.write("a/b.bin", 7, b"x")
    files.write("a/b.bin", 0, b"new")
    assert files.read("a/b.bin", 0) == b"new", "sent anew from its beginning"
    content = bytes(range(256)) * (PIECE // 256) + b"rest"
    files.write("large", 0, content)
    assert files.read("large", 0) + files.read("large", PIECE) == content


def test_missing_files_and_writes_after_removal_are_refused(files: Files) -> None:
    files.write("a/b", 0, b"x")
    for ask in (lambda: files.read("a", 0), lambda: files.list("a/b"), lambda: files.read("c", 0)):
        with pytest.raises(Refusal) as refused:
            ask()
        assert refused.value.code == "unknown_file"
    files.delete("nothing")
    files.delete("a")
    with pytest.raises(Refusal):
        files.list("a")
    files.remove()
    with pytest.raises(Refusal):
        files.write("b/c", 0, b"x")
    assert not files.root.exists()


def test_sealed_files_cannot_be_changed_while_they_are_loaded(files: Files) -> None:
    files.write("sent/model/a", 0, b"x")
    files.seal("sent/model", None)
    files.delete("sent/model")
    for path in ("sent/model", "sent/model/a", "sent/model/b/c"):
        with pytest.raises(Refusal, match="stays as it is"):
            files.write(path, 0, b"y")
    files.write("sent/models/a", 0, b"x")
    first, second = (files.seal("twice") for _ in "ab")
    files.unseal(first)
    with pytest.raises(Refusal, match="stays as it is"):  # the other one is still loading
        files.write("twice/a", 0, b"x")
    files.unseal(second)
    files.write("twice/a", 0, b"x")


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "disk_full"), (errno.EISDIR, "invalid_request")]
)
def test_a_disk_that_refuses(
    files: Files, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Refusal) as refused:
        files.write("a", 0, b"x")
    assert refused.value.code == code


def test_files_that_another_request_deletes_meanwhile_are_missing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ask in (lambda: files.list("a"), lambda: files.read("a/b", 0)):
        files.write("a/b", 0, b"x")
        right_after(
            monkeypatch, Path, "is_file", lambda: files.delete("a"), lambda path: path.name == "b"
        )
        with pytest.raises(Refusal) as refused:
            ask()
        assert refused.value.code == "unknown_file"
