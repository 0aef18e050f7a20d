"""Segments of the record:

1. put together, they are the record row by row, to the bit, also what only SQLite sees (lengths of tokens that were not kept);
2. each begins where the one before ended; those of deleted checkpoints stay with the run, those of undone steps go;
3. many kept ones become one, whoever dies meanwhile, but never across a checkpoint that stands;
4. damage is noticed, whatever it is, and what is lost is named.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import RunInUseError, StoreError
from groupwise.core.types import Example, Group, RewardPart, Rollout, SamplingParams, Segment
from groupwise.runs import checkpoints, record_segments
from groupwise.runs.folder import RunFolder
from groupwise.runs.record_segments import find_damage, write_record_segment
from groupwise.runs.records import (
    EvaluationRecord,
    ResumeRecord,
    Rewound,
    RolloutFilter,
    StepRecord,
    WarningRecord,
)
from groupwise.runs.recovery import recover
from groupwise.runs.schema import MIGRATIONS
from groupwise.runs.store import Store

TABLES = ("steps", "metrics", "groups", "rollouts", "segments", "parts", "warnings")


def group(draw: int) -> Group:
    """One with all that is hard to keep: NaN, half a surrogate pair, the largest seed, floats without end."""
    rollouts = tuple(
        Rollout(
            draw=draw,
            member=member,
            attempt=0,
            prompt_ids=(1, 2, draw),
            segments=(
                Segment("policy", (7, 8), (-1 / 3, -1e-300), 0, "f", SamplingParams(4), 2**64 - 1),
            ),
            completion="caf\udce9",
            outcome="scored",
            reward=math.nan if member else 0.1 + 0.2,
            parts=(RewardPart("p", None), RewardPart("p", 1 / 3, 0.7, turn=1)),
            notes={"n": [1, None]},
            advantage=-1 / 7,
        )
        for member in range(2)
    )
    return Group(draw, Example(draw, "prompt", {"x": draw}), rollouts, {"m": 0.1})


def recorded(runs: Path, *, keep_tokens: bool = True) -> RunFolder:
    """A run of six steps with checkpoints after 2, 4 and 6, of which the first is deleted."""
    folder = RunFolder.create(runs, "r", {"a": 1}, {"kind": "rl"}, keep_tokens=keep_tokens)
    folder.store.add_evaluation(EvaluationRecord(0, "before", "r@0", {"x": 0.1}, [{"a": 1}]))
    for step in range(6):
        commit(folder, step)
        if step % 2:
            save(folder, step + 1)
            name = f"step-{step + 1}"
            folder.store.add_evaluation(EvaluationRecord(step + 1, name, "r", {"x": step}))
    folder.store.record_resume(ResumeRecord(3, Rewound(1, 2), 5.0, {"k": [1, 2]}))
    checkpoints.prune(folder.checkpoints, 2)
    return folder


@pytest.fixture
def run(tmp_path):
    folder = recorded(tmp_path)
    yield folder
    folder._release()


def commit(folder: RunFolder, step: int) -> None:
    record = StepRecord(step, step, step + 1, f"f{step}", (2 * step,), 1e-5, 9.5, (2 * step + 1,))
    metrics = {"loss": math.nan, "reward": 1 / (step + 3)}
    said = WarningRecord(step + 1, "length", "ends" if step % 2 else "begins", "so", {"now": 0.1})
    folder.store.commit_step(record, [group(2 * step), group(2 * step + 1)], metrics, [said])


def save(folder: RunFolder, step: int) -> None:
    def fill(building: Path) -> None:
        write_record_segment(folder.path, folder.store.path, building, step)

    checkpoints.save(folder.checkpoints, step, fill)


def rows(record: Path, tables: tuple[str, ...] = TABLES) -> dict[str, list[tuple[object, ...]]]:
    connection = sqlite3.connect(record)
    connection.text_factory = bytes
    found = {
        table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
        for table in tables
    }
    connection.close()
    return found


def lose(folder: RunFolder) -> Path:
    """Close the run as a crash would, with its record gone."""
    folder._release()
    for ending in ("", "-wal", "-shm"):
        folder.path.joinpath(f"run.db{ending}").unlink(missing_ok=True)
    return folder.path


def steps_of(segment: Path) -> list[int]:
    connection = sqlite3.connect(segment)
    found = [step for (step,) in connection.execute("SELECT step FROM steps ORDER BY step")]
    connection.close()
    return found


# 1


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_put_together_they_are_the_record(tmp_path, keep_tokens):
    run = recorded(tmp_path, keep_tokens=keep_tokens)
    before = rows(run.store.path)
    path = lose(run)
    made = recover(path)
    assert made is not None
    assert (made.steps, made.lost, made.damaged, made.trouble) == (6, (), None, "was missing")
    assert rows(path / "run.db") == before
    assert all(before.values())


def test_evaluations_and_facts_come_back_as_of_the_last_checkpoint_and_the_run_continues(run):
    path = lose(run)
    recover(path)
    with RunFolder.open(path) as folder:
        store = folder.store
        names = [(found.step, found.name, found.rows) for found in store.evaluations()]
        assert names == [(0, "before", ({"a": 1},)), (2, "step-2", ()), (4, "step-4", ())]
        assert store.get_meta()["kind"] == "rl"
        assert store.resumes() == [], "it was resumed after the last checkpoint"
        assert len(store.rollouts(RolloutFilter(text="prompt"))) == 24
        commit(folder, 6)
        assert store.last_step() == 6


def test_a_segment_of_a_format_without_warnings_gives_the_rest(tmp_path):
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        connection.executescript(
            "".join(MIGRATIONS[: MIGRATIONS.index(next(m for m in MIGRATIONS if "warnings" in m))])
            + "INSERT INTO steps VALUES (0, 0, 1, 'f', '[0]', 0.1, 2.0, '[]');"
            "INSERT INTO groups (draw, step, position, example, prompt, prompt_text, columns, metrics)"
            " VALUES (0, 0, 0, 0, '\"p\"', 'p', '{\"task\": \"sums\"}', '{}');"
        )
    record_segments._build_record(tmp_path / "run.db", [tmp_path / "old.db"])
    found = rows(tmp_path / "run.db")
    assert (len(found["steps"]), found["warnings"]) == (1, [])
    with Store.open(tmp_path / "run.db", readonly=True) as store:
        assert store.tasks(9) == ["sums"], "which older ones did not say by themselves"


def test_equal_records_give_equal_bytes(run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_record_segment(run.path, run.store.path, tmp_path / name, 6)
    assert (tmp_path / "a/record.db").read_bytes() == (tmp_path / "b/record.db").read_bytes()


# 2


def test_each_begins_where_the_one_before_ended(run):
    assert steps_of(run.path / "records/step-2.db") == [0, 1]
    assert steps_of(run.checkpoints / "step-4/record.db") == [2, 3]
    assert steps_of(run.checkpoints / "step-6/record.db") == [4, 5]
    assert not (run.checkpoints / "step-2").exists()


def test_a_missing_segment_is_made_up_for_by_the_next_one(run, tmp_path):
    run.path.joinpath("checkpoints/step-4/record.db").unlink()
    write_record_segment(run.path, run.store.path, tmp_path, 5)
    assert steps_of(tmp_path / "record.db") == [2, 3, 4]


def test_a_crash_before_a_checkpoint_is_deleted_loses_nothing(run, die_at):
    die_at("file:step-4.db:before", lambda: checkpoints.prune(run.checkpoints, 1))
    assert (run.checkpoints / "step-4/record.db").exists()
    checkpoints.prune(run.checkpoints, 1)
    assert {path.name for path in run.path.glob("records/*.db")} == {"step-2.db", "step-4.db"}


# 3


@pytest.fixture
def merging(monkeypatch):
    monkeypatch.setattr(record_segments, "MERGED_AT_ONCE", 3)


def go_on(folder: RunFolder, first: int, last: int, protect: Collection[int] = ()) -> None:
    """Steps with an evaluation and a checkpoint after each of them, of which one is kept."""
    for step in range(first, last):
        commit(folder, step)
        save(folder, step + 1)
        named = EvaluationRecord(step + 1, f"step-{step + 1}", "r", {"x": step}, [{"a": step}])
        folder.store.add_evaluation(named)
        checkpoints.prune(folder.checkpoints, 1, protect)


def kept(run: Path) -> set[str]:
    return {path.name for path in run.glob("records/*")}


def all_of(record: Path) -> dict[str, list[tuple[object, ...]]]:
    return rows(record, (*TABLES, "evaluations", "evaluation_rows"))


def test_many_segments_are_merged_into_one(tmp_path, merging):
    run = RunFolder.create(tmp_path, "r", {}, {"kind": "rl"})
    go_on(run, 0, 9)
    assert kept(run.path) == {"steps-1-to-3.db", "steps-4-to-6.db", "step-7.db", "step-8.db"}
    assert steps_of(run.path / "records/steps-4-to-6.db") == [3, 4, 5]
    run.store.rewind(9)
    before = all_of(run.store.path)
    path = lose(run)
    made = recover(path)
    assert made is not None
    assert (made.steps, made.lost) == (9, ())
    after = all_of(path / "run.db")
    assert {table: after[table] for table in TABLES} == {table: before[table] for table in TABLES}
    assert after["evaluations"] == before["evaluations"][:-1], "the last one came after it"
    assert len(after["evaluation_rows"]) == 8


def test_dying_in_a_merge_loses_nothing(tmp_path, merging):
    """At each of its durable writes: the record can be put together, and the next merge leaves none of what was merged."""
    points: list[str] = []
    atomic_files.on_write = points.append
    try:
        RunFolder.create(tmp_path / "whole", "r", {}, {"kind": "rl"})._release()
        with RunFolder.open(tmp_path / "whole" / "r") as whole:
            go_on(whole, 0, 4)
            before = rows(whole.store.path)
    finally:
        atomic_files.on_write = lambda name: None
    first = points.index("file:steps-1-to-3.db:before")
    merge = points[first : points.index("remove:step-3.db:after") + 1]
    assert len(merge) == 8, merge
    for number, point in enumerate(merge):
        runs = tmp_path / str(number)
        RunFolder.create(runs, "r", {}, {"kind": "rl"})._release()
        assert die_there(runs / "r", point) == 9, point
        for ending in ("", "-wal", "-shm"):
            (runs / "r" / f"run.db{ending}").unlink(missing_ok=True)
        made = recover(runs / "r")
        assert made is not None
        assert (made.steps, made.lost) == (4, ()), point
        assert rows(runs / "r" / "run.db") == before, point
        with RunFolder.open(runs / "r") as folder:
            go_on(folder, 4, 5)
        assert kept(runs / "r") == {"steps-1-to-3.db", "step-4.db"}, point


def die_there(run: Path, point: str) -> int:
    child = os.fork()
    if child == 0:
        atomic_files.on_write = lambda name: os._exit(9) if name == point else None
        try:
            with RunFolder.open(run) as folder:
                go_on(folder, 0, 4)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_segments_of_a_protected_checkpoint_are_not_merged_with_later_ones(tmp_path, merging):
    """SFT keeps its best checkpoint; a resume from there drops what came later and nothing else."""
    run = RunFolder.create(tmp_path, "r", {}, {"kind": "sft"})
    go_on(run, 0, 8, protect={3})
    assert kept(run.path) == {"step-1.db", "step-2.db", "steps-4-to-6.db", "step-7.db"}
    checkpoints.drop_after(run.checkpoints, 3)
    assert kept(run.path) == {"step-1.db", "step-2.db"}
    made = recover(lose(run))
    assert made is not None
    assert (made.steps, made.lost) == (3, ())


def test_an_unreadable_segment_is_left_and_reported(tmp_path, merging, caplog):
    run = RunFolder.create(tmp_path, "r", {}, {"kind": "rl"})
    go_on(run, 0, 3)
    (run.path / "records/step-2.db").write_bytes(b"no database at all" * 1000)
    go_on(run, 3, 4)
    assert kept(run.path) == {"step-1.db", "step-2.db", "step-3.db"}
    assert "could not be merged" in caplog.text
    run._release()


# 4


def in_the_middle(record: Path) -> None:
    content = bytearray(record.read_bytes())
    content[8192:-8192] = b"\xff" * (len(content) - 16384)
    record.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda record: record.write_bytes(b""),
    "another file": lambda record: record.write_bytes(b"no database at all" * 1000),
    "half of it": lambda record: record.write_bytes(record.read_bytes()[: 4096 * 8]),
    "in the middle": in_the_middle,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_noticed_and_mended(run, how):
    before = rows(run.store.path)
    run._release()
    DAMAGE[how](run.path / "run.db")
    made = recover(run.path)
    assert made is not None
    assert made.damaged == run.path / "run.db.damaged"
    assert made.trouble.startswith(("was damaged", "was empty"))
    assert rows(run.path / "run.db") == before
    assert recover(run.path) is None
    assert find_damage(run.path / "run.db", thorough=True) is None


def test_a_resume_reads_only_the_tables_it_needs_of_a_long_record(run, monkeypatch):
    monkeypatch.setattr(record_segments, "MAX_CHECKED_BYTES", 0)
    run._release()
    record = run.path / "run.db"
    with closing(sqlite3.connect(record)) as connection:
        root = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for table, is_noticed in (("rollouts", False), ("metrics", True)):
        content = bytearray(record.read_bytes())
        place = 4096 * (root[table] - 1)
        record.write_bytes(content[:place] + b"\xff" * 4096 + content[place + 4096 :])
        assert (find_damage(record, thorough=True) is not None) == is_noticed


def test_a_record_that_cannot_be_repaired_says_what_is_missing(run):
    checkpoints.save(run.checkpoints, 6, lambda folder: None)
    (run.path / "run.db").unlink()
    with pytest.raises(RunInUseError):
        recover(run.path)
    path = lose(run)
    with pytest.raises(StoreError, match=r"holds no record\.db"):
        recover(path)
    checkpoints.drop_after(run.checkpoints, 4)
    run.path.joinpath("records/step-2.db").unlink()
    made = recover(path)
    assert made is not None
    assert (made.steps, made.lost) == (2, (0, 1))
    assert "steps 0 to 1" in str(made)
    (path / "run.db").unlink()
    checkpoints.drop_after(run.checkpoints, 0)
    with pytest.raises(StoreError, match="no complete checkpoint"):
        recover(path)


def test_a_crash_while_it_is_mended_is_mended_by_the_next(run, die_at):
    before = rows(run.store.path)
    path = lose(run)
    die_at("file:run.db:before", lambda: recover(path))
    assert not (path / "run.db").exists()
    assert recover(path) is not None
    assert rows(path / "run.db") == before
