"""`seal`: marks a checkpoint of any trainer as complete: the fleet can then mirror it while the job continues.

A trainer writes many files, and only the trainer knows when it has written the last one. It then calls `seal`, which writes
`manifest.json` with step, sizes and hashes after all other files. From a program that is not in Python:

    python -m groupwise.jobs.hosts.seal outputs/checkpoint-500 500

It needs only the standard library, from Python 3.8 on: if a machine lacks Groupwise, this file is sent with the job."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

MANIFEST = "manifest.json"
_PIECE = 1 << 20


def seal(folder: str | Path, step: int) -> Path:
    """Write the manifest of a finished checkpoint after `step` training steps; returns its path.

    All files of the checkpoint are flushed to disk first. Call it from one process of a job, rank 0, once all writing processes have
    finished (a barrier). Raises ValueError if the folder contains anything that cannot be sent: a link, a socket."""
    root = Path(folder)
    manifest, new = root / MANIFEST, root / (MANIFEST + ".new")
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(root.rglob("*")):
        if path in (manifest, new) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise ValueError(
                f"{path} is a link or no plain file: a checkpoint that travels has to be whole without it."
            )
        sha256, size = hashlib.sha256(), 0
        with open(path, "rb") as stream:
            while piece := stream.read(_PIECE):
                sha256.update(piece)
                size += len(piece)
            os.fsync(stream.fileno())
        entry: dict[str, int | str] = {"size": size, "sha256": sha256.hexdigest()}
        files[path.relative_to(root).as_posix()] = entry
    if not files:
        raise ValueError(
            f"{root} holds no file: what is to be sealed is the folder of one checkpoint."
        )
    with open(new, "w", encoding="utf-8") as file:
        json.dump({"step": step, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, manifest)
    return manifest


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        sys.exit("usage: python -m groupwise.jobs.hosts.seal FOLDER STEP")
    try:
        seal(sys.argv[1], int(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"seal: {error}")
