"""The list of all runs, kept in memory: a run's entry is read once, and again only when its files have changed.

This way a thousand runs are checked within milliseconds. The first look reads them all, in the background: a page that cannot wait shows
what is known, and how much is still to be read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.dashboard.sources.cached_values import MOMENT, BackgroundValue
from groupwise.dashboard.sources.evaluations import results_folders
from groupwise.runs.find import RunInfo, run_folders, run_info_and
from groupwise.runs.folder import RECORD, RESULTS, shown_state
from groupwise.runs.store import Store

Stamp = tuple[tuple[int, ...], ...]
"""Identity, times of writing and change, and size of a record's files."""
SPARK = 48
"""Columns of a small picture of a curve."""
FIRST_READ_TIMEOUT = 0.1
"""Seconds that a page waits for runs that have not been read yet."""
AGAIN = 10.0
"""Seconds after which one that could not be read is tried again: what was in the way may have passed."""
FILES = (RECORD, f"{RECORD}-wal")


@dataclass(frozen=True, slots=True)
class Listed:
    """A run in the list."""

    info: RunInfo
    metric: str | None
    """Metric of the small picture: the reward, or the loss if there is none."""
    curve: tuple[float, ...]
    written: float
    """When its record was written to last; seconds since 1970."""
    read: float = 0.0
    """When this was found; seconds of the index's clock."""

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The mean of the first and of the last few values of that metric."""
        if self.metric == "loss":
            return self.info.loss_first, self.info.loss_last
        return self.info.reward_first, self.info.reward_last


@dataclass(frozen=True, slots=True)
class Known:
    """The state of all runs."""

    runs: tuple[Listed, ...]
    """The newest first; broken ones last."""
    unread: int


class RunsIndex:
    """Index of one folder's runs. Thread-safe."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._stamp = BackgroundValue(self._states, clock)
        self._known: dict[str, tuple[Stamp, Listed]] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def known(self, patience: float = FIRST_READ_TIMEOUT) -> Known:
        """All runs; those that could not be read within `patience` seconds are only counted."""
        stamps = {path: stamp_of(path) for path in run_folders(self.folder)}
        with self._lock:
            stale = [path for path in stamps if self._is_stale(path, stamps[path])]
            if stale and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read, args=[stale], daemon=True)
                self._reader.start()
            reader = self._reader
        if stale and reader is not None:
            reader.join(patience)
        with self._lock:
            for removed in self._known.keys() - {path.name for path in stamps}:
                del self._known[removed]
            found = [each for _, each in self._known.values()]

        def newest_first(listed: Listed) -> tuple[bool, float, str]:
            return listed.info.broken is not None, -(listed.info.started or 0.0), listed.info.name

        runs = tuple(sorted(map(_as_now, found), key=newest_first))
        return Known(runs, len(stamps) - len(found))

    def stamp(self, moment: float = MOMENT) -> Any:
        """A value that differs once the list has changed, or a new result exists in a run or beside them. Found once a second for all."""
        return self._stamp.now(moment)

    def _states(self) -> Any:
        known = self.known()
        runs = [(each.info.name, each.info.state, each.written) for each in known.runs]
        results = [path / RESULTS for path in run_folders(self.folder)]
        return (
            known.unread,
            runs,
            [*map(changed, (*results, *results_folders(self.folder).values()))],
        )

    def one(self, path: Path) -> Listed:
        """The current list entry of this run."""
        stamp = stamp_of(path)
        with self._lock:
            if not self._is_stale(path, stamp):
                return _as_now(self._known[path.name][1])
        return self._take_in(path, stamp)

    def _is_stale(self, path: Path, stamp: Stamp) -> bool:
        known = self._known.get(path.name)
        if known is None or known[0] != stamp:
            return True
        return known[1].info.broken is not None and self._clock() - known[1].read >= AGAIN

    def _read(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._take_in(path, stamp_of(path))

    def _take_in(self, path: Path, stamp: Stamp) -> Listed:
        """Read it; `stamp` was taken before, so that what is written meanwhile is read again."""
        listed = replace(read(path, stamp), read=self._clock())
        with self._lock:
            self._known[path.name] = (stamp, listed)
        return listed


def changed(folder: Path) -> int:
    """When a file came into it: they come whole."""
    with suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


def stamp_of(path: Path) -> Stamp:
    """Stamp of a run's record; equal stamps mean that it was not written to."""
    found: list[tuple[int, ...]] = []
    for name in FILES:
        with suppress(OSError):
            facts = os.stat(path / name)
            if facts.st_size:  # a reader leaves an empty one behind
                found.append((facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino))
    return tuple(found)


def read(path: Path, stamp: Stamp) -> Listed:
    """Read a run's list entry; never raises for a broken run."""
    modified = max((each[0] for each in stamp), default=0) / 1e9
    name = os.fsencode(path.name).decode("utf-8", "replace")
    why = "the name of its folder is no text (UTF-8); rename the folder to look at the run"
    try:
        if name == path.name:
            info, found = run_info_and(path, _spark)
            metric, curve = found or (None, ())
            return Listed(info, metric, curve, modified)
    except Exception as error:  # noqa: BLE001 — whatever one folder holds, the others are listed
        why = f"{type(error).__name__}: {error}"
    return Listed(RunInfo(name, path, state=None, broken=why), None, (), modified)


def _spark(store: Store) -> tuple[str | None, tuple[float, ...]]:
    """The metric of the small picture, and its curve: the reward, or the loss if there is none."""
    for name in ("reward", "loss"):
        points = store.thinned_curve(name, SPARK)
        if points:
            return name, tuple(point.mean for point in points if point.mean is not None)
    return None, ()


def _as_now(listed: Listed) -> Listed:
    """A process that ended leaves no trace in the record: whether one works on a run is asked each time."""
    if listed.info.state not in ("running", "crashed"):
        return listed
    state = shown_state(listed.info.path, "running")
    return replace(listed, info=replace(listed.info, state=state))
