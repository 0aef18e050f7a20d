"""Checkpoints in a working folder. A checkpoint is complete once its manifest, which is written last, lists only files that exist."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import read_json, write_json
from groupwise.jobs.hosts.runner.protocol import (
    NO_JSON,
    RequestRejected,
    as_list,
    is_count,
    is_sha,
    parse_json,
)
from groupwise.jobs.hosts.runner.work_folder import Walk, read_inside

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from groupwise.jobs.hosts.runner.root import Attempt

SETTLED = 2.0
"""Seconds after a change from which another change of the file certainly shows in its times."""
LARGEST_MANIFEST = 4 << 20
"""Largest `manifest.json` of a checkpoint in bytes, enough for some 30,000 files. A larger file is not a checkpoint's manifest and is not
read."""
MAX_MANIFESTS = 10_000
MANIFESTS_TOGETHER = 32 << 20
"""Most bytes of manifests that are read at once for an attempt; reading them takes about a second."""
REMEMBERED_ABOVE = 64 << 10
"""Size in bytes. Smaller files that are not the manifest of a checkpoint are not remembered: reading them again is cheap."""
MAX_STEPS = 1 << 63
"""The highest step that a database column can hold, plus one."""


def file_identity(file_stat: os.stat_result) -> list[int]:
    """Inode, size and times of a file, which differ once the file was written to or replaced."""
    return [file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns]


class Checkpoint:
    """A folder whose `manifest.json`, written last, contains a step and lists files that all exist."""

    def __init__(self, walk: Walk, path: str, step: int, files: dict[str, dict[str, Any]]) -> None:
        self.path, self.step, self.files = path, step, files
        self.stats = walk.files

    @property
    def manifest(self) -> str:
        """The path of the checkpoint's `manifest.json`."""
        return self.path + "/manifest.json"


def checkpoints_of(attempt: Attempt, folders: Iterable[str]) -> list[Checkpoint]:
    """Complete checkpoints sorted by step, without hidden folders, which are being written. If there are very many or very large manifests,
    only the newest are read."""
    walk = Walk(attempt.work)
    for folder in folders:
        walk.enter(folder)
    foreign, bytes_left = ForeignManifests(attempt), MANIFESTS_TOGETHER
    checkpoints: list[Checkpoint] = []
    manifests = [p for p in walk.files if p.endswith("/manifest.json") and "/." not in "/" + p]
    manifests.sort(key=lambda p: walk.files[p].st_mtime_ns, reverse=True)
    for path in manifests[:MAX_MANIFESTS]:
        file = walk.files[path]
        if file.st_size > min(bytes_left, LARGEST_MANIFEST) or foreign.has(file):
            continue
        bytes_left -= file.st_size
        checkpoint = checkpoint_of(walk, path)
        if checkpoint is None:
            foreign.add(file)
            continue
        stats = {name: walk.files.get(f"{checkpoint.path}/{name}") for name in checkpoint.files}
        if all(f and f.st_size == checkpoint.files[name]["size"] for name, f in stats.items()):
            checkpoints.append(checkpoint)
    foreign.save()
    return sorted(checkpoints, key=lambda c: (c.step, c.path))


def checkpoint_of(walk: Walk, path: str) -> Checkpoint | None:
    """Read a manifest; None if it does not describe a checkpoint, since any file may have this name."""
    try:
        manifest = parse_json(read_inside(walk.work, path, LARGEST_MANIFEST))
        step, files = manifest["step"], manifest["files"]
        is_valid = is_count(step, MAX_STEPS - 1) and all(
            is_count(entry["size"]) and is_sha(entry["sha256"]) for entry in files.values()
        )
    except (RequestRejected, OSError, *NO_JSON, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(walk, path.rpartition("/")[0], step, files) if is_valid else None


class ForeignManifests:
    """Large files named `manifest.json` that belong to no checkpoint, e.g. in data sets. They are not read again while they are
    unchanged."""

    def __init__(self, attempt: Attempt) -> None:
        self.path = attempt.at("others.json")
        self.stored = as_list((read_json(self.path) or {}).get("seen"))
        self.current: list[list[int]] = []
        self.keys = {
            tuple(entry) for entry in map(as_list, self.stored) if all(map(is_count, entry))
        }

    def has(self, file: os.stat_result) -> bool:
        """True if this file was read before and is unchanged."""
        is_known = tuple(file_identity(file)) in self.keys
        if is_known:
            self.current.append(file_identity(file))
        return is_known

    def add(self, file: os.stat_result) -> None:
        """Remember that the file was read, unless it was just written: another change might not show in its times."""
        if file.st_size > REMEMBERED_ABOVE and time.time() - file.st_ctime > SETTLED:
            self.current.append(file_identity(file))

    def save(self) -> None:
        """Save the list for the next call. If that fails, the files are read again."""
        if self.current != self.stored:
            with contextlib.suppress(OSError):
                write_json(self.path, {"seen": self.current})
