"""Small and read-only disks, for tests with a full disk. Only root may mount them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Generator[Path, None, None]:
    """Mount a disk of this size (such as `1m`) at `path`; the test is skipped if that is not possible."""
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def read_only(path: Path) -> Generator[None, None, None]:
    """Make a mounted disk read-only inside the `with` block."""
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Write a file that fills the disk until `leave` bytes are free. Deleting the file frees the disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    os.truncate(ballast, max(0, ballast.stat().st_size - leave))
    return ballast
