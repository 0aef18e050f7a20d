"""The record of a run in segments that are stored with its checkpoints: a run survives the loss of its `run.db`.

    checkpoints/step-N/record.db    the steps since the previous checkpoint, with their metrics, rollouts and evaluations
    records/step-N.db               the segment of a checkpoint that was deleted after newer ones were written
    records/steps-M-to-N.db         the segments of several such checkpoints, from step-M to step-N, merged

A segment has the tables of `run.db` and exactly the same rows: it is a small complete record that is written
once. Each segment also has the facts about the run and its resumes as they were then. All segments in order make up
the record as of the last checkpoint; `rebuild_record` rebuilds it from them if `run.db` is missing or damaged.

Kept segments are merged whenever there are `MERGED_AT_ONCE` of them. The merged file appears in one step, then its parts are deleted: a
process that dies in between leaves rows in two files, which does no harm, and parts that the next merge deletes. A merged segment never
spans a checkpoint that still exists, because a resume from there deletes all segments that end later.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.core.terminal.quantities import counted
from groupwise.runs.database import FORMAT, WRITER_CACHE_KIB, explaining_sqlite
from groupwise.runs.schema import FILL_TASKS
from groupwise.runs.sqlite_file import begin_migration, connect
from groupwise.runs.store import Store

SEGMENT_FILE = "record.db"
"""Name of the segment in the folder of its checkpoint."""
KEPT = "records"
"""Folder of a run that holds the segments of deleted checkpoints."""
MERGED_AT_ONCE = 64
"""Kept segments that are merged into one: a long run then has a few hundred files, and writes each row of its record three times in all."""
MAX_CHECKED_BYTES = 512 * 2**20
"""A larger record is not read as a whole before a resume, which would take longer and longer: it takes 0.6 s of a core for this size."""
_READ_BY_RESUMES = ("meta", "steps", "metrics", "evaluations", "warnings", "resumes")

logger = logging.getLogger(__name__)

_KEPT_NAME = re.compile(r"step-(?P<only>\d+)\.db|steps-(?P<first>\d+)-to-(?P<last>\d+)\.db")

_OF_STEPS = {
    "steps": "step IN (SELECT value FROM json_each(:steps))",
    "metrics": "step IN (SELECT value FROM json_each(:steps))",
    "groups": "step IN (SELECT value FROM json_each(:steps))",
    "rollouts": "step IN (SELECT value FROM json_each(:steps))",
}
_OF_ROLLOUTS = "rollout IN (SELECT id FROM other.rollouts WHERE {})".format(_OF_STEPS["rollouts"])
_TABLES = {**_OF_STEPS, "segments": _OF_ROLLOUTS, "parts": _OF_ROLLOUTS}


@dataclass(frozen=True, slots=True)
class RebuiltRecord:
    """A record that was rebuilt from its segments."""

    trouble: str
    """The problem with the record before, as a verb phrase such as "was missing"."""
    steps: int
    """Number of recovered steps."""
    lost: tuple[int, ...]
    """Steps that are in no segment."""
    damaged: Path | None
    """The present path of the damaged record; None if there was none."""

    def __str__(self) -> str:
        kept_as = f" (kept as {self.damaged.name})" if self.damaged else ""
        recovered_text = f"{counted(self.steps, 'step')} recovered, with everything recorded up to the last checkpoint"
        ranges: list[list[int]] = []
        for step in self.lost:
            if ranges and step == ranges[-1][-1] + 1:
                ranges[-1] = [ranges[-1][0], step]
            else:
                ranges.append([step])
        ranges_text = [f"{first} to {last[0]}" if last else str(first) for first, *last in ranges]
        lost_steps = f"{'step' if len(self.lost) == 1 else 'steps'} {', '.join(ranges_text)}"
        lost_text = (
            f"; {lost_steps} could not be recovered, because no segment holds that part"
            if self.lost
            else ""
        )
        return f"the record {self.trouble}{kept_as} and was rebuilt from the checkpoints: {recovered_text}{lost_text}"


# --- segments --------------------------------------------------------------------------------------


def write_record_segment(run: Path, record: Path, folder: Path, step: int) -> None:
    """Write the record since the previous checkpoint into `folder`, the unfinished folder of the checkpoint after `step` steps."""
    first = max((end for end, _ in _all_segments(run) if end < step), default=0)
    with _new_segment(folder / SEGMENT_FILE) as connection:
        _attach(connection, record, "ro")
        connection.execute("BEGIN")
        _copy_rows(connection, range(first, step), first, step)
        connection.execute("COMMIT")


@contextmanager
def _new_segment(file: Path) -> Generator[sqlite3.Connection]:
    """An empty segment to be filled. Written without fsync: it is flushed when it is renamed into place."""
    with explaining_sqlite(file), closing(connect(file, "rwc")) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        begin_migration(connection, FORMAT)
        connection.execute("COMMIT")
        yield connection


def keep_record_segment(checkpoint: Path) -> None:
    """Keep the segment of a checkpoint that is about to be deleted."""
    segment = checkpoint / SEGMENT_FILE
    if segment.is_file():
        kept_file = checkpoint.parent.parent / KEPT / f"{checkpoint.name}.db"
        atomic_files.keep_file(segment, kept_file)


def drop_record_segments_after(run: Path, step: int) -> None:
    """Delete the kept segments of checkpoints after `step`: their steps are done again."""
    for segment in _kept_segments(run):
        if segment.last > step:
            atomic_files.remove_file(segment.path)


def merge_kept_record_segments(run: Path) -> None:
    """Merge kept segments if there are enough. If the disk fails, they stay unmerged, which does no harm."""
    kept_segments = _kept_segments(run)
    merged = [segment for segment in kept_segments if segment.merged]
    single = [segment for segment in kept_segments if not segment.merged]
    try:
        for part in single:
            if any(
                merged_segment.first <= part.last <= merged_segment.last
                for merged_segment in merged
            ):
                atomic_files.remove_file(part.path)  # left over by a crash
        if len(single) < MERGED_AT_ONCE:
            return
        steps = [step for step, _ in _checkpoint_folders(run)]
        # Consecutive segments with no checkpoint between them.
        for _, segments in groupby(
            single, lambda segment: sum(step < segment.last for step in steps)
        ):
            parts = list(segments)[:MERGED_AT_ONCE]
            if len(parts) < MERGED_AT_ONCE:
                continue
            merged_file = parts[0].path.with_name(f"steps-{parts[0].first}-to-{parts[-1].last}.db")
            building = atomic_files.building_path(merged_file)
            building.unlink(missing_ok=True)
            try:
                with _new_segment(building) as connection:
                    _add_segments(connection, [part.path for part in parts])
                atomic_files.publish_file(building, merged_file)
            finally:
                building.unlink(missing_ok=True)
            for part in parts:
                atomic_files.remove_file(part.path)
    except StoreError as error:
        logger.warning("kept segments of the record could not be merged: %s", error)


@dataclass(frozen=True, slots=True)
class _KeptSegment:
    """A kept segment, with the first and the last step number of its checkpoints; both are the same unless it is merged."""

    path: Path
    first: int
    last: int

    @property
    def merged(self) -> bool:
        return self.path.name.startswith("steps-")


def _kept_segments(run: Path) -> list[_KeptSegment]:
    """Kept segments in order; a merged one comes after its parts."""
    folder = run / KEPT
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [(folder / name, _KEPT_NAME.fullmatch(name)) for name in names]
    segments = [
        _KeptSegment(path, int(name["first"] or name["only"]), int(name["last"] or name["only"]))
        for path, name in matches
        if name
    ]
    return sorted(segments, key=lambda segment: (segment.last, segment.merged))


def _all_segments(run: Path) -> list[tuple[int, Path]]:
    """All segments, with the number of steps after which they were written, in order."""
    checkpoint_segments = [
        (step, path / SEGMENT_FILE)
        for step, path in _checkpoint_folders(run)
        if (path / SEGMENT_FILE).is_file()
    ]
    kept_segments = [(segment.last, segment.path) for segment in _kept_segments(run)]
    return sorted(kept_segments + checkpoint_segments, key=lambda segment: segment[0])


def earlier_record_segments(run: Path, step: int) -> dict[str, Path]:
    """The segments before that of the checkpoint after `step` steps, by their names in `records/`.

    A segment that was kept for a checkpoint whose deletion then failed exists twice; either copy is used.
    """
    return {
        (f"{path.parent.name}.db" if path.name == SEGMENT_FILE else path.name): path
        for end, path in _all_segments(run)
        if end < step
    }


def _checkpoint_folders(run: Path) -> list[tuple[int, Path]]:
    """The folders of checkpoints with their steps, in any state."""
    matches = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in run.glob("checkpoints/*")]
    return [(int(name[1]), path) for name, path in matches if name]


# --- the record ----------------------------------------------------------------------------------


def find_damage(record: Path, *, thorough: bool = False) -> str | None:
    """Why a record has to be rebuilt from segments; None if it is usable, or if rebuilding would not help.

    `thorough` reads the whole file, or, if it is larger than `MAX_CHECKED_BYTES`, the tables that a resume depends on.
    """
    if not record.is_file():
        return "was missing"
    try:
        with closing(connect(record, "ro")) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                return "was empty"
            connection.execute("SELECT max(step) FROM steps").fetchone()
            is_short = record.stat().st_size <= MAX_CHECKED_BYTES
            checked = () if not thorough else ("1",) if is_short else _READ_BY_RESUMES
            results = [
                connection.execute(f"PRAGMA quick_check({part})").fetchone() for part in checked
            ]
    except sqlite3.OperationalError:  # locked, not readable, not ours: opening it reports that
        return None
    except sqlite3.DatabaseError as error:
        return f"was damaged ({error})"
    damage = next((text for (text,) in results if text != "ok"), None)
    return None if damage is None else f"was damaged ({damage})"


def rebuild_record(run: Path, record: Path, step: int, trouble: str) -> RebuiltRecord:
    """Rebuild the record after `step` steps from its segments. The caller holds the run's lock.

    A damaged record is renamed and kept. StoreError if there is no segment of that step: it was lost, or never written.
    """
    segments = [(end, segment) for end, segment in _all_segments(run) if end <= step]
    if step not in dict(segments):
        raise StoreError(
            f"{record} {trouble}, and the checkpoint after {step} steps holds no {SEGMENT_FILE} from which it could be "
            "rebuilt. Restore the file from a copy, or start another run from these weights with --init-from."
        )
    building = atomic_files.building_path(record)
    _build_record(building, [segment for _, segment in segments])
    # A damaged record is set aside, with SQLite's `-wal` and `-shm` files.
    names = (
        record.with_name(f"{record.name}.damaged{'' if n == 1 else f'-{n}'}") for n in count(1)
    )
    renamed_path = next(name for name in names if not name.exists())
    with atomic_files.explaining_disk_errors(record):
        for ending in ("-wal", "-shm", ""):
            source = record.with_name(record.name + ending)
            if source.exists():
                source.rename(renamed_path.with_name(renamed_path.name + ending))
    damaged = renamed_path if renamed_path.exists() else None
    atomic_files.publish_file(building, record)
    with Store.open(record) as store:
        recovered_steps = {step_record.step for step_record in store.steps()}
    lost = tuple(sorted(set(range(step)) - recovered_steps))
    return RebuiltRecord(trouble, len(recovered_steps), lost, damaged)


def _build_record(building: Path, segments: Sequence[Path]) -> None:
    # Create the tables.
    Store.create(building).close()
    with explaining_sqlite(building), closing(connect(building, "rw")) as connection:
        connection.execute(f"PRAGMA main.cache_size = -{WRITER_CACHE_KIB}")
        _add_segments(connection, segments)
    with Store.open(building) as store:
        store.rebuild_text_index()


def _add_segments(connection: sqlite3.Connection, segments: Sequence[Path]) -> None:
    """Add the rows of segments that a record lacks; evaluations, warnings and facts of later segments replace earlier ones."""
    for segment in segments:
        _attach(connection, segment, "ro&immutable=1")
        connection.execute("BEGIN")
        missing = connection.execute(
            "SELECT step FROM other.steps WHERE step NOT IN (SELECT step FROM main.steps)"
        )
        _copy_rows(connection, [step for (step,) in missing], 0, None)
        connection.execute("COMMIT")
        connection.execute("DETACH other")
    connection.executescript(FILL_TASKS)  # segments of an older format have no tasks


# --- rows ----------------------------------------------------------------------------------------


def _attach(connection: sqlite3.Connection, path: Path, mode: str) -> None:
    """Attach another record: its tables are then called `other.<table>`."""
    connection.execute("ATTACH ? AS other", (f"{path.absolute().as_uri()}?mode={mode}",))


def _copy_rows(
    connection: sqlite3.Connection, steps: Sequence[int], first: int, last: int | None
) -> None:
    """Copy these steps from the other record, its facts, and its evaluations and warnings after `first` to `last` steps.

    Evaluations of the same policy and name, and warnings of the same step and name, are replaced. A record of an older format has no
    warnings.
    """
    step_values = {"steps": json.dumps(list(steps))}
    for table, condition in _TABLES.items():
        _copy_table(connection, table, condition, step_values)
    step_range = "step >= :first AND (:last IS NULL OR step <= :last)"
    bounds = {"first": first, "last": last}
    connection.execute(
        "DELETE FROM main.evaluations WHERE EXISTS (SELECT 1 FROM other.evaluations o WHERE o.id = evaluations.id"
        " OR (o.step, o.name, o.policy) = (evaluations.step, evaluations.name, evaluations.policy))"
    )
    _copy_table(connection, "evaluations", step_range, bounds)
    rows = f"evaluation IN (SELECT id FROM other.evaluations WHERE {step_range})"
    _copy_table(connection, "evaluation_rows", rows, bounds)
    tables = "SELECT 1 FROM other.sqlite_master WHERE name = 'warnings'"
    if connection.execute(tables).fetchone():
        connection.execute(
            "DELETE FROM main.warnings WHERE (step, name) IN (SELECT step, name FROM other.warnings)"
        )
        _copy_table(connection, "warnings", step_range, bounds)
    for table, condition in {"meta": "key != 'text_index'", "resumes": "TRUE"}.items():
        connection.execute(f"DELETE FROM main.{table} WHERE {condition}")
        _copy_table(connection, table, condition, {})


def _copy_table(
    connection: sqlite3.Connection, table: str, condition: str, values: Mapping[str, object]
) -> None:
    """Copy rows of the other record, with the columns that it has: an older record lacks later columns."""
    info = connection.execute("SELECT name FROM pragma_table_info(?, 'other')", (table,))
    columns = ", ".join(f'"{name}"' for (name,) in info)
    connection.execute(
        f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM other.{table} WHERE {condition}",
        values,
    )
