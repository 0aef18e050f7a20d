"""The list of all runs, kept in memory: a run's entry is read once, and again only when its files have changed.

So a thousand runs are checked within milliseconds. The first access reads them all in the background: meanwhile a page shows the
runs that are known, and how many are still to be read.
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
"""Identity, modification and change times, and size of a record's files."""
SPARK = 48
"""Columns of a sparkline."""
FIRST_READ_TIMEOUT = 0.1
"""Seconds that a page waits for runs that have not been read yet."""
AGAIN = 10.0
"""Seconds after which a run that could not be read is tried again: the cause may be gone."""
FILES = (RECORD, f"{RECORD}-wal")


@dataclass(frozen=True, slots=True)
class Listed:
    """A run in the list."""

    info: RunInfo
    metric: str | None
    """Metric of the sparkline: the reward, or the loss if there is no reward."""
    curve: tuple[float, ...]
    written: float
    """Time at which the record was last written; seconds since 1970."""
    read: float = 0.0
    """Time at which this entry was read; seconds of the index's clock."""

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The means of the first few and of the last few values of that metric."""
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

    def all_runs(self, timeout: float = FIRST_READ_TIMEOUT) -> Known:
        """All runs; runs that could not be read within `timeout` seconds are only counted."""
        stamps = {path: stamp_of(path) for path in run_folders(self.folder)}
        with self._lock:
            stale = [path for path in stamps if self._is_stale(path, stamps[path])]
            if stale and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read, args=[stale], daemon=True)
                self._reader.start()
            reader = self._reader
        if stale and reader is not None:
            reader.join(timeout)
        with self._lock:
            for removed in self._known.keys() - {path.name for path in stamps}:
                del self._known[removed]
            found = [run for _, run in self._known.values()]

        def newest_first(listed: Listed) -> tuple[bool, float, str]:
            return listed.info.broken is not None, -(listed.info.started or 0.0), listed.info.name

        runs = tuple(sorted(map(_as_now, found), key=newest_first))
        return Known(runs, len(stamps) - len(found))

    def stamp(self, moment: float = MOMENT) -> Any:
        """A value that changes when the list changes, or a new result is in a run or next to the runs. Computed once a second for
        all pages.
        """
        return self._stamp.now(moment)

    def _states(self) -> Any:
        known = self.all_runs()
        runs = [(run.info.name, run.info.state, run.written) for run in known.runs]
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
        """Read a run's entry. `stamp` was taken before, so anything written meanwhile causes another read."""
        listed = replace(read(path, stamp), read=self._clock())
        with self._lock:
            self._known[path.name] = (stamp, listed)
        return listed


def changed(folder: Path) -> int:
    """Time of the last new file in a folder, from the folder's own mtime: files are moved into it complete."""
    with suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


def stamp_of(path: Path) -> Stamp:
    """Stamp of a run's record; equal stamps mean that it was not written to."""
    found: list[tuple[int, ...]] = []
    for name in FILES:
        with suppress(OSError):
            facts = os.stat(path / name)
            if facts.st_size:  # a reader leaves an empty file
                found.append((facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino))
    return tuple(found)


def read(path: Path, stamp: Stamp) -> Listed:
    """Read a run's list entry; never raises for a broken run."""
    modified = max((entry[0] for entry in stamp), default=0) / 1e9
    name = os.fsencode(path.name).decode("utf-8", "replace")
    why = "the name of its folder is no text (UTF-8); rename the folder to look at the run"
    try:
        if name == path.name:
            info, found = run_info_and(path, _spark)
            metric, curve = found or (None, ())
            return Listed(info, metric, curve, modified)
    except Exception as error:  # noqa: BLE001 — an unreadable folder must not hide the others
        why = f"{type(error).__name__}: {error}"
    return Listed(RunInfo(name, path, state=None, broken=why), None, (), modified)


def _spark(store: Store) -> tuple[str | None, tuple[float, ...]]:
    """The metric of the sparkline and its curve: the reward, or the loss if there is no reward."""
    for name in ("reward", "loss"):
        points = store.thinned_curve(name, SPARK)
        if points:
            return name, tuple(point.mean for point in points if point.mean is not None)
    return None, ()


def _as_now(listed: Listed) -> Listed:
    """The entry with its current state: a process that ended leaves no trace in the record, so whether one is alive is checked each
    time.
    """
    if listed.info.state not in ("running", "crashed"):
        return listed
    state = shown_state(listed.info.path, "running")
    return replace(listed, info=replace(listed.info, state=state))
