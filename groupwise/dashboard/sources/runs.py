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

from groupwise.dashboard.sources.cached_values import NEWER_VALUE_TIMEOUT, BackgroundValue
from groupwise.dashboard.sources.evaluations import results_folders
from groupwise.runs.find import RunInfo, run_folders, run_info_and
from groupwise.runs.folder import RECORD, RESULTS, shown_state
from groupwise.runs.store import Store

Stamp = tuple[tuple[int, ...], ...]
"""Identity, modification and change times, and size of a record's files."""
SPARK_COLUMNS = 48
"""Columns of a sparkline."""
FIRST_READ_TIMEOUT = 0.1
"""Seconds that a page waits for runs that have not been read yet."""
RETRY_SECONDS = 10.0
"""Seconds after which a run that could not be read is tried again: the cause may be gone."""
RECORD_FILES = (RECORD, f"{RECORD}-wal")


@dataclass(frozen=True, slots=True)
class RunEntry:
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
class AllRuns:
    """The state of all runs."""

    runs: tuple[RunEntry, ...]
    """The newest first; broken ones last."""
    unread: int


class RunsIndex:
    """Index of one folder's runs. Thread-safe."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._stamp = BackgroundValue(self._compute_stamp, clock)
        self._entries: dict[str, tuple[Stamp, RunEntry]] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def all_runs(self, timeout: float = FIRST_READ_TIMEOUT) -> AllRuns:
        """All runs; runs that could not be read within `timeout` seconds are only counted."""
        stamps = {path: stamp_of(path) for path in run_folders(self.folder)}
        with self._lock:
            stale = [path for path in stamps if self._is_stale(path, stamps[path])]
            if stale and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read_stale, args=[stale], daemon=True)
                self._reader.start()
            reader = self._reader
        if stale and reader is not None:
            reader.join(timeout)
        with self._lock:
            for removed in self._entries.keys() - {path.name for path in stamps}:
                del self._entries[removed]
            entries = [run for _, run in self._entries.values()]

        def newest_first(entry: RunEntry) -> tuple[bool, float, str]:
            return entry.info.broken is not None, -(entry.info.started or 0.0), entry.info.name

        runs = tuple(sorted(map(_with_current_state, entries), key=newest_first))
        return AllRuns(runs, len(stamps) - len(entries))

    def stamp(self, timeout: float = NEWER_VALUE_TIMEOUT) -> Any:
        """A value that changes when the list changes, or a new result is in a run or next to the runs. Computed once a second for
        all pages.
        """
        return self._stamp.latest(timeout)

    def _compute_stamp(self) -> Any:
        all_runs = self.all_runs()
        runs = [(run.info.name, run.info.state, run.written) for run in all_runs.runs]
        results = [path / RESULTS for path in run_folders(self.folder)]
        return (
            all_runs.unread,
            runs,
            [*map(folder_mtime, (*results, *results_folders(self.folder).values()))],
        )

    def entry(self, path: Path) -> RunEntry:
        """The current list entry of this run."""
        stamp = stamp_of(path)
        with self._lock:
            if not self._is_stale(path, stamp):
                return _with_current_state(self._entries[path.name][1])
        return self._read_into_index(path, stamp)

    def _is_stale(self, path: Path, stamp: Stamp) -> bool:
        entry = self._entries.get(path.name)
        if entry is None or entry[0] != stamp:
            return True
        return entry[1].info.broken is not None and self._clock() - entry[1].read >= RETRY_SECONDS

    def _read_stale(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._read_into_index(path, stamp_of(path))

    def _read_into_index(self, path: Path, stamp: Stamp) -> RunEntry:
        """Read a run's entry. `stamp` was taken before, so anything written meanwhile causes another read."""
        entry = replace(read_entry(path, stamp), read=self._clock())
        with self._lock:
            self._entries[path.name] = (stamp, entry)
        return entry


def folder_mtime(folder: Path) -> int:
    """Time of the last new file in a folder, from the folder's own mtime: files are moved into it complete."""
    with suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


def stamp_of(path: Path) -> Stamp:
    """Stamp of a run's record; equal stamps mean that it was not written to."""
    stamps: list[tuple[int, ...]] = []
    for name in RECORD_FILES:
        with suppress(OSError):
            facts = os.stat(path / name)
            if facts.st_size:  # a reader leaves an empty file
                stamps.append((facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino))
    return tuple(stamps)


def read_entry(path: Path, stamp: Stamp) -> RunEntry:
    """Read a run's list entry; never raises for a broken run."""
    modified = max((file_stamp[0] for file_stamp in stamp), default=0) / 1e9
    name = os.fsencode(path.name).decode("utf-8", "replace")
    reason = "the name of its folder is not text (UTF-8); rename the folder to look at the run"
    try:
        if name == path.name:
            info, sparkline = run_info_and(path, _sparkline)
            metric, curve = sparkline or (None, ())
            return RunEntry(info, metric, curve, modified)
    except Exception as error:  # noqa: BLE001 — an unreadable folder must not hide the others
        reason = f"{type(error).__name__}: {error}"
    return RunEntry(RunInfo(name, path, state=None, broken=reason), None, (), modified)


def _sparkline(store: Store) -> tuple[str | None, tuple[float, ...]]:
    """The metric of the sparkline and its curve: the reward, or the loss if there is no reward."""
    for name in ("reward", "loss"):
        points = store.thinned_curve(name, SPARK_COLUMNS)
        if points:
            return name, tuple(point.mean for point in points if point.mean is not None)
    return None, ()


def _with_current_state(entry: RunEntry) -> RunEntry:
    """The entry with its current state: a process that ended leaves no trace in the record, so whether one is alive is checked each
    time.
    """
    if entry.info.state not in ("running", "crashed"):
        return entry
    state = shown_state(entry.info.path, "running")
    return replace(entry, info=replace(entry.info, state=state))
