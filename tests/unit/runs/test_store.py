"""The run's record.

1. Every group comes back as it was written, to the last bit.
2. A step is there with everything, or not at all; steps come one after the other.
3. A rewind leaves exactly what the record was after so many steps.
4. Readers see whole steps while the writer commits.
5. Lists of rollouts use the indexes, and every filter means what it says.
6. What cannot be read or written says why, and what to do.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.core.types import Example, Group, RewardPart, Rollout, SamplingParams, Segment
from groupwise.runs import database, schema, text_index
from groupwise.runs.query import Plan, rollout_query
from groupwise.runs.records import (
    CurvePoint,
    EvaluationRecord,
    Rewound,
    RolloutFilter,
    StepRecord,
    WarningRecord,
)
from groupwise.runs.search import PromptFilter
from groupwise.runs.store import Store
from groupwise.runs.tables import task_of

WORDS = st.text(st.characters(exclude_categories=()), max_size=12)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
NUMBERS = st.floats(allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
SEEN_IN_INDEX = 6
"""The first format whose index of texts holds prompts as they are shown."""
COLUMNS = st.dictionaries(WORDS, JSON, max_size=3)
PARAMS = st.builds(
    SamplingParams, max_tokens=st.integers(1, 10_000), temperature=NUMBERS, stop_token_ids=TOKENS,
    stop=st.lists(WORDS, max_size=2).map(tuple), min_tokens=st.integers(0, 9), top_k=st.none() | st.integers(1, 99),
    top_p=st.none() | st.floats(0.01, 0.99), min_p=st.none() | st.floats(0.01, 1.0),
)  # fmt: skip
MESSAGES = st.lists(st.dictionaries(WORDS, JSON, max_size=2), max_size=2).map(tuple)
SEGMENTS = st.builds(
    Segment,
    source=st.sampled_from(["policy", "environment", "inserted", "teacher"]),
    token_ids=TOKENS,
    sampling_logprobs=st.none() | st.lists(NUMBERS, max_size=5).map(tuple),
    policy_version=st.none() | st.integers(0, 2**40),
    fingerprint=st.none() | WORDS,
    params=st.none() | PARAMS,
    seed=st.none() | st.integers(0, 2**64 - 1),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    prompt_ids=st.none() | TOKENS,
    learner_logprobs=st.none()
    | st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(tuple),
)
TURNS = st.none() | st.integers(0, 9)
PARTS = st.builds(RewardPart, name=NAMES, value=st.none() | NUMBERS, weight=NUMBERS, turn=TURNS)

DieAt = Callable[[str, Callable[[], object]], None]


@st.composite
def groups(draw: Callable[[Any], Any]) -> Group:
    number = draw(st.integers(0, 2**40))
    members = draw(st.integers(0, 3))
    return Group(
        draw=number,
        example=Example(
            draw(st.integers(0, 2**40)),
            draw(WORDS | st.lists(st.dictionaries(WORDS, JSON, max_size=2), max_size=2)),
            draw(COLUMNS),
        ),
        rollouts=tuple(
            Rollout(
                draw=number,
                member=member,
                attempt=draw(st.integers(0, 3)),
                prompt_ids=draw(TOKENS),
                segments=tuple(draw(st.lists(SEGMENTS, max_size=3))),
                completion=draw(WORDS),
                outcome=draw(st.sampled_from(["pending", "scored", "failed", "timed_out"])),
                reason=draw(st.none() | WORDS),
                reward=draw(st.none() | NUMBERS),
                parts=tuple(draw(st.lists(PARTS, max_size=3))),
                notes=draw(COLUMNS),
                advantage=draw(st.none() | NUMBERS),
                messages=draw(st.none() | MESSAGES),
                ended_by=draw(st.sampled_from([None, "environment", "tokens", "turns"])),
            )
            for member in range(members)
        ),
        metrics=draw(st.dictionaries(WORDS, NUMBERS, max_size=2)),
    )


def group(draw: int, **changes: Any) -> Group:
    """A group of two: one right, one wrong."""

    def rollout(member: int, reward: float) -> Rollout:
        return Rollout(
            draw=draw,
            member=member,
            attempt=0,
            prompt_ids=(1, 2, 3),
            segments=(Segment("policy", (4, 5), (-0.1, -0.2), 0, "f0", None, 7, "stop"),),
            completion=f"answer {member} of draw {draw}",
            outcome="scored",
            reward=reward,
            parts=(RewardPart("right", reward), RewardPart("short", 0.5)),
            advantage=reward - 0.5,
        )

    rollouts = changes.pop("rollouts", (rollout(0, 1.0), rollout(1, 0.0)))
    return Group(draw, Example(draw % 5, f"question {draw}"), rollouts, **changes)


def step(number: int, draws: tuple[int, ...] = ()) -> StepRecord:
    return StepRecord(number, number, number + 1, f"f{number + 1}", draws, 1e-5, 1000.0 + number)


def fill(store: Store, steps: int, start: int = 0) -> None:
    """Steps of two groups each."""
    for number in range(start, start + steps):
        draws = (2 * number + 1, 2 * number)
        store.commit_step(
            step(number, draws),
            [group(draw) for draw in draws],
            {"reward": number / 10, "loss": -1.0, "time/step": 3.0 + number},
        )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "run.db") as opened:
        yield opened


class TestRoundTrip:
    @given(groups())
    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def test_any_group_comes_back_equal(self, store: Store, written: Group) -> None:
        store.keep_unfinished([written])
        assert store.group(written.draw) == written

    def test_logprobs_keep_every_bit(self, store: Store) -> None:
        """Those of the learner those that it has: four bytes each."""
        drawn = (-0.0, 5e-324, -math.inf, math.nan, 0.1 + 0.2)
        learnt = (-0.0, -math.inf, math.nan, struct.unpack("<f", struct.pack("<f", -0.1))[0], 0.5)
        segment = Segment("policy", tuple(range(5)), drawn, learner_logprobs=learnt)
        store.keep_unfinished([group(0, rollouts=(Rollout(0, 0, 0, (), (segment,), ""),))])
        read = store.unfinished_groups()[0].rollouts[0].segments[0]
        for found, wrote in ((read.sampling_logprobs, drawn), (read.learner_logprobs, learnt)):
            assert found is not None
            assert struct.pack("<5d", *found) == struct.pack("<5d", *wrote)
        with closing(sqlite3.connect(store.path)) as connection:
            query = "SELECT length(learner_logprobs) FROM segments"
            assert connection.execute(query).fetchone() == (4 * len(learnt),), "bytes"

    def test_a_nan_reward_is_not_taken_for_none(self, store: Store) -> None:
        part = RewardPart("odd", math.nan)
        odd = Rollout(0, 0, 0, (), (), "", "failed", "NaN", math.nan, (part,))
        store.keep_unfinished([group(0, rollouts=(odd,))])
        (read,) = store.unfinished_groups()[0].rollouts
        assert math.isnan(read.reward or 0.0)
        assert math.isnan(read.parts[0].value or 0.0)
        assert store.rollouts(RolloutFilter(min_reward=0.0)) == []
        assert store.rollouts(RolloutFilter(part="odd", order="best")) == []

    def test_a_column_that_json_cannot_hold_is_kept_as_its_repr(self, store: Store) -> None:
        class Rude:
            def __repr__(self) -> str:
                raise RuntimeError("no")

        columns = {"image": b"\x89PNG", "pair": (1, 2), "odd": {(1, 2): "x"}, "plain": [1.5, None]}
        store.keep_unfinished([Group(0, Example(0, "p", {**columns, "rude": Rude()}), ())])
        read = dict(store.unfinished_groups()[0].example.columns)
        assert "Rude object" in read.pop("rude")["__repr__"]
        assert read == {
            "image": {"__repr__": "b'\\x89PNG'"}, "pair": [1, 2], "odd": {"__repr__": "{(1, 2): 'x'}"}, "plain": [1.5, None],
        }  # fmt: skip

    def test_without_tokens_everything_else_stays(self, tmp_path: Path) -> None:
        with Store.create(tmp_path / "slim.db", keep_tokens=False) as slim:
            slim.commit_step(step(0, (0,)), [group(0)], {})
            (read,) = slim.groups(0)
            (view, _) = slim.rollouts(RolloutFilter())
        [segment] = read.rollouts[0].segments
        assert (segment.token_ids, segment.sampling_logprobs, segment.learner_logprobs) == (
            (),
            None,
            None,
        )
        assert read.rollouts[0].prompt_ids == ()
        assert (view.completion_tokens, view.completion) == (2, "answer 0 of draw 0")

    def test_a_number_that_does_not_fit_is_refused_whole(self, store: Store) -> None:
        for odd in ({"token_ids": (2**31,)}, {"seed": 2**64}, {"seed": -1}):
            segment = replace(Segment("policy", (1,)), **odd)
            with pytest.raises(StoreError, match="does not fit"):
                store.keep_unfinished([group(0, rollouts=(Rollout(0, 0, 0, (), (segment,), ""),))])
            assert store.unfinished_groups() == []


class TestSteps:
    def test_a_step_comes_back_in_the_order_of_training(self, store: Store) -> None:
        assert (store.last_step(), store.steps()) == (None, [])
        fill(store, 2)
        assert store.last_step() == 1
        assert store.steps() == [step(0, (1, 0)), step(1, (3, 2))]
        assert store.groups(1) == [group(3), group(2)]
        view = store.rollouts(RolloutFilter(group=2))[0]
        assert (view.step, view.example, view.prompt) == (1, 1, "question 1")
        assert view.parts == (RewardPart("right", 1.0), RewardPart("short", 0.5))
        assert (view.advantage, view.truncated) == (0.5, False)

    @pytest.mark.parametrize(("number", "draws", "groups", "says"), [
        (0, (), (), "the next one is 1"), (2, (), (), "the next one is 1"),
        (7, (), (), "the next one is 1"), (1, (9,), (8,), "each draw must come once"),
        (1, (8, 8), (8,), "each draw must come once"), (1, (), (8,), "each draw must come once"),
        (1, (8, 9), (8,), "each draw must come once"), (1, (0,), (0,), "draw 0 belongs to step 0"),
    ])  # fmt: skip
    def test_a_step_out_of_order_or_with_used_draws_is_refused(
        self, store: Store, number: int, draws: tuple[int, ...], groups: tuple[int, ...], says: str
    ) -> None:
        fill(store, 1)
        before = store.deterministic_dump()
        with pytest.raises(StoreError, match=says):
            store.commit_step(step(number, draws), [group(draw) for draw in groups], {})
        assert store.deterministic_dump() == before

    def test_a_rollout_of_another_draw_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError, match=r"rollouts of the draws \[5, 5\]"):
            store.keep_unfinished([group(0, rollouts=group(5).rollouts)])

    def test_a_kept_group_moves_into_its_step(self, store: Store) -> None:
        store.keep_unfinished([group(0), group(1)])
        store.commit_step(step(0, (1,)), [group(1, metrics={"late": 1.0})], {})
        assert store.groups(0) == [group(1, metrics={"late": 1.0})]
        assert store.unfinished_groups() == [group(0)]

    def test_metrics(self, store: Store) -> None:
        fill(store, 3)
        store.commit_step(step(3), [], {"reward": math.nan, "only/here": 2})
        assert store.metric_names() == ["loss", "only/here", "reward", "time/step"]
        curve = store.metrics(["reward"], since=1)["reward"]
        assert curve[:2] == [(2, 0.1), (3, 0.2)]
        assert math.isnan(curve[2][1])
        assert set(store.metrics()) == set(store.metric_names())
        assert store.metrics(["missing"]) == {}
        assert store.step_metrics(1) == {"loss": -1.0, "reward": 0.1, "time/step": 4.0}

    def test_values_that_are_not_finite_are_counted_and_left_out_of_curves(
        self, store: Store
    ) -> None:
        values = [1.0, float("nan"), 3.0, float("inf"), float("-inf"), float("nan")]
        for number, value in enumerate(values):
            store.commit_step(step(number), [], {"a": value, "b": 10.0 * number})
        assert store.thinned_curve("a", 2) == [
            CurvePoint(2.0, 1, 3, 2.0, 1.0, 3.0, 1),
            CurvePoint(5.0, 4, 6, None, None, None, 3),
        ]
        assert store.thinned_sum(["a", "b"], 2) == [
            CurvePoint(2.0, 1, 3, 34 / 3, 1.0, 23.0),
            CurvePoint(5.0, 4, 6, 40.0, 30.0, 50.0),
        ]
        assert store.thinned_sum(["none"], 2) == []

    def test_a_column_has_a_time(self, store: Store) -> None:
        assert store.thinned_times(2, None) == []
        for number in range(4):
            store.commit_step(step(number), [], {"a": 1.0})  # done at 1000 and a second each
        assert [at.mean for at in store.thinned_times(9, (2, 3))] == [1.0, 2.0]
        store.set_meta({"created_at": 990.0})
        assert store.thinned_times(2, (1, 4)) == [
            CurvePoint(1.5, 1, 2, 10.5, 10.0, 11.0),
            CurvePoint(3.5, 3, 4, 12.5, 12.0, 13.0),
        ]
        store.commit_step(step(4), [], {"a": 1.0, "late": 2.0})
        assert store.thinned_times(2, (1, 5), "late") == [CurvePoint(4.25, 5, 5, 14.0, 14.0, 14.0)]
        assert store.seconds_after([0, 1, 4, 9]) == {0: 0.0, 1: 10.0, 4: 13.0}
        for odd in (5000.0, "1990", None, -1.0, 1e30):
            store.set_meta({"created_at": odd})
            assert [at.mean for at in store.thinned_times(9, (2, 3))] == [1.0, 2.0]

    def test_a_thinned_curve_keeps_what_stands_out(self, store: Store) -> None:
        values = [0.0, 9.0, 1.0, 2.0, math.nan, 3.0, 4.0]
        for at, value in enumerate(values):
            late = {"late": value} if at > 2 else {}
            store.commit_step(step(at), [], {"reward": value, **late})
        assert store.range_of(["late", "none"]) == (4, 7)
        assert store.range_of(["late", "reward"]) == (1, 7)
        assert store.range_of(["none"]) is None
        assert store.thinned_curve("none", 3) == []
        halves = store.thinned_curve("reward", 2, (1, 6))
        assert halves == [CurvePoint(2.0, 1, 3, 10 / 3, 0.0, 9.0), CurvePoint(5.0, 4, 6, 2.5, 2.0, 3.0, 1)]  # fmt: skip
        assert store.thinned_curve("late", 2, (1, 6)) == halves[1:]
        near = store.thinned_curve("reward", 2, (2, 3))
        assert near == [CurvePoint(2.0, 2, 2, 9.0, 9.0, 9.0), CurvePoint(3.0, 3, 3, 1.0, 1.0, 1.0)]
        assert [each.at for each in store.thinned_curve("late", 100)] == [4.0, 5.0, 6.0, 7.0]
        assert store.thinned_curve("reward", 9, (5, 1)) == []


class TestRewind:
    @pytest.mark.parametrize("to_step", [0, 1, 3, 5])
    def test_leaves_what_the_record_was(self, tmp_path: Path, store: Store, to_step: int) -> None:
        fill(store, 5)
        store.keep_unfinished([group(100), group(101)])
        with Store.create(tmp_path / "short.db") as short:
            fill(short, to_step)
            expected = short.deterministic_dump()
        assert store.rewind(to_step) == Rewound(5 - to_step, 4 * (5 - to_step) + 4)
        assert store.deterministic_dump() == expected
        fill(store, 1, start=to_step)

    def test_drops_warnings_of_later_steps(self, store: Store) -> None:
        """A rewind also removes evaluations of later policies."""
        fill(store, 2)
        for after in range(1, 4):
            store.set_warning(after, "length", WarningRecord(after, "length", "begins", "grows"))
            store.add_evaluation(EvaluationRecord(after, "held_out", "p", {"mean": 0.5}))
        store.rewind(2)
        assert [warning.step for warning in store.warnings()] == [1, 2]
        assert [evaluation.step for evaluation in store.evaluations()] == [1, 2]

    def test_dies_before_or_after_but_not_between(self, tmp_path: Path, die_at: DieAt) -> None:
        for moment, steps in (("before", 3), ("after", 1)):
            path = tmp_path / f"{moment}.db"
            with Store.create(path) as store:
                fill(store, 3)
            die_at(f"commit:rewind:{moment}", lambda path=path: Store.open(path).rewind(1))
            with Store.open(path) as store:
                assert len(store.steps()) == steps
                assert len(store.rollouts(RolloutFilter())) == 4 * steps


class TestCrash:
    @pytest.mark.parametrize(("moment", "steps"), [("before", 2), ("after", 3)])
    def test_a_step_is_committed_as_a_whole_or_not_at_all(
        self, tmp_path: Path, moment: str, steps: int, die_at: DieAt
    ) -> None:
        path = tmp_path / "run.db"
        with Store.create(path) as store:
            fill(store, 2)
        die_at(f"commit:step:{moment}", lambda: fill(Store.open(path), 1, start=2))
        with Store.create(tmp_path / "whole.db") as whole:
            fill(whole, steps)
            expected = whole.deterministic_dump()
        with Store.open(path, readonly=True) as reader:
            assert reader.deterministic_dump() == expected
        with Store.open(path) as store:
            assert store.deterministic_dump() == expected
            fill(store, 1, start=steps)

    @pytest.mark.parametrize("point", ["commit:migration:before", "commit:migration:after"])
    def test_dying_while_the_file_is_made(self, tmp_path: Path, point: str, die_at: DieAt) -> None:
        path = tmp_path / "run.db"
        die_at(point, lambda: Store.create(path))
        with Store.open(path) as store:
            fill(store, 1)

    def test_a_failed_transaction_leaves_the_record_usable(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = sqlite3.OperationalError("database or disk is full")
        full.sqlite_errorcode = sqlite3.SQLITE_FULL

        def refuse(name: str) -> None:
            raise full

        with monkeypatch.context() as broken:
            broken.setattr(atomic_files, "on_write", refuse)
            with pytest.raises(StoreError, match="Free space") as caught:
                fill(store, 1)
        assert str(store.path) in str(caught.value)
        assert store.last_step() is None
        fill(store, 1)


class TestReaders:
    def test_read_whole_steps_while_the_writer_commits(self, store: Store) -> None:
        done = threading.Event()
        seen: list[tuple[int, int]] = []

        def read() -> None:
            with Store.open(store.path, readonly=True) as reader:
                while not done.is_set() or not seen:
                    with reader.snapshot():
                        found = reader.rollouts(RolloutFilter(limit=1000))
                        seen.append((len(reader.steps()), len(found)))

        thread = threading.Thread(target=read)
        thread.start()
        fill(store, 20)
        done.set()
        thread.join()
        assert all(rollouts == 4 * steps for steps, rollouts in seen)

    def test_a_snapshot_does_not_change_and_is_read_only(self, store: Store) -> None:
        fill(store, 1)
        with Store.open(store.path, readonly=True) as reader:
            with reader.snapshot():
                assert reader.last_step() == 0
                fill(store, 1, start=1)
                assert reader.last_step() == 0
            assert reader.last_step() == 1
            with pytest.raises(StoreError, match="readonly"):
                fill(reader, 1, start=2)

    @pytest.mark.parametrize("writer_dies", [False, True])
    def test_the_last_to_close_leaves_nothing_but_the_record(
        self, tmp_path: Path, writer_dies: bool, die_at: DieAt
    ) -> None:
        path = tmp_path / "run.db"
        with Store.create(path) as writer:
            fill(writer, 1)
        if writer_dies:
            die_at("commit:step:after", lambda: fill(Store.open(path), 1, start=1))
        with Store.open(path, readonly=True) as reader:
            assert reader.last_step() == writer_dies
        assert [each.name for each in tmp_path.iterdir()] == ["run.db"]


class TestRollouts:
    @pytest.mark.parametrize("indexed", [True, False])
    def test_text_written_only_by_the_template_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
    ) -> None:
        without_fts5(monkeypatch, indexed)
        with Store.create(tmp_path / "seen.db") as store:
            store.keep_unfinished([_chat(0, "Tools: sort(words). Now: Sort kiwi"), _chat(1, None)])
            assert draws(store, "Tools: sort") == [0]
            assert draws(store, "Sort kiwi") == [0, 1]
            assert draws(store, "user: Sort") == [1], "the first is not shown like that"
            store.keep_unfinished([_chat(0, "Something else")])
            assert draws(store, "Tools: sort") == []
            store.rewind(0)
            assert draws(store, "else") == []

    @pytest.mark.parametrize("version", range(1, SEEN_IN_INDEX))
    @pytest.mark.parametrize("fts5", [True, False])
    def test_records_of_older_formats_are_searched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, fts5: bool
    ) -> None:
        """Their index held the prompts as they were given."""
        path = tmp_path / "run.db"
        seen = version == SEEN_IN_INDEX - 1
        make_old(
            path,
            version,
            old_rollout(4, prompt="Sort kiwi")
            + "CREATE VIRTUAL TABLE prompt_index USING fts5 (prompt_text, content='groups', content_rowid='draw');"
            "CREATE VIRTUAL TABLE completion_index USING fts5 (completion, content='rollouts', content_rowid='id');"
            "INSERT INTO prompt_index (prompt_index) VALUES ('rebuild');"
            "INSERT INTO completion_index (completion_index) VALUES ('rebuild');"
            "INSERT INTO meta VALUES ('text_index', '\"current\"');"
            + ("UPDATE groups SET prompt_seen = 'Tools. Sort kiwi';" if seen else ""),
        )
        without_fts5(monkeypatch, fts5)
        for readonly in (True, False):
            with Store.open(path, readonly) as store:
                assert (draws(store, "kiwi"), draws(store, "fig")) == ([4], [4])
                assert draws(store, "Tools") == ([4] if seen else [])
        with Store.open(path) as store:
            store.rewind(0)
            store.keep_unfinished([_chat(0, "Something else")])
            assert (draws(store, "else"), draws(store, "fig")) == ([0], [])

    @pytest.mark.parametrize("indexed", [True, False])
    @pytest.mark.parametrize("common", [1, 20_000])
    def test_all_words_are_looked_for_and_phrases_in_quotes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool, common: int
    ) -> None:
        without_fts5(monkeypatch, indexed)
        monkeypatch.setattr("groupwise.runs.search.COMMON", common)
        texts = ("kiwi and fig", "kiwi += 1", "私は東京都に住む kiwi", "ผมสวัสดีครับ 학교에서", "the answer is 5",
                 "the answer is -5.", "C code", "C++ code", "3 14", "\\boxed{3.14}", "ÄPFEL und Öl")  # fmt: skip
        wanted: dict[str, list[int]] = {
            "fig kiwi": [0], "kiwi   FIG": [0], '"kiwi and fig"': [0], '"fig and kiwi"': [], 'fig "kiwi and"': [0], 'kiwi "and fig': [0],
            "sort kiwi": [0], "kiwi += 1": [1], "+=": [1], "東京": [2], "京都": [2], "東京 都": [2], "東京 kiwi": [2], "東京 fig": [],
            "สวัสดี": [3], "학교": [3], '"': [], '""': list(range(11)), "  ": list(range(11)), "-5": [5], '"is -5"': [5], "C++": [7],
            "c++ code": [7], "3.14": [9], "\\boxed{3.14}": [9], "5": [4, 5], "5 -": [5], "Äpfel": [10],
            '"öl"': [10], "UND": [10], "NEAR(": [], "a OR b*": [],
            "'; DROP TABLE rollouts; --": [], "%": [], "\0": [],
        }  # fmt: skip
        with Store.create(tmp_path / "text.db") as store:
            for draw, text in enumerate(texts):
                prompt = "Sort kiwi" if draw == 0 else "?"
                rollout = Rollout(draw, 0, 0, (), (), text, "scored", reward=1.0)
                store.keep_unfinished([Group(draw, Example(0, prompt), (rollout,))])
            for words, found in wanted.items():
                assert draws(store, words) == found, words
                assert draws(store, words, order="newest") == found[::-1], words

    def test_an_index_that_a_writer_without_fts5_left_behind_is_not_trusted_and_catches_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run.db"
        with Store.create(path) as store:
            fill(store, 1)
        with monkeypatch.context() as poor:
            without_fts5(poor)
            with Store.open(path) as store:
                fill(store, 1, start=1)
        for readonly in (True, False):
            with Store.open(path, readonly) as store:
                assert len(store.rollouts(RolloutFilter(text="answer"))) == 8
        with Store.open(path) as store:
            store.rebuild_text_index()
            assert len(store.rollouts(RolloutFilter(text="answer"))) == 8

    @pytest.mark.parametrize(("wanted", "lead", "index"), [
        (RolloutFilter(), None, "sqlite_autoindex_rollouts"),
        (RolloutFilter(order="newest"), None, "SCAN rollouts"),
        (RolloutFilter(order="best"), None, "rollouts_by_reward"),
        (RolloutFilter(order="best", max_reward=0.5), "reward", "rollouts_by_reward"),
        (RolloutFilter(group=3), "draw", "sqlite_autoindex_rollouts"),
        (RolloutFilter(step=3), "step", "rollouts_by_step"),
        (RolloutFilter(step=3, order="best"), "step", "rollouts_by_step_and_reward"),
        (RolloutFilter(step=3, example=3), "example", "rollouts_by_example"),
        (RolloutFilter(step=3, text="answer"), "step", "rollouts_by_step"),
        (RolloutFilter(example=3), "example", "rollouts_by_example"),
        (RolloutFilter(outcome="failed"), "outcome", "rollouts_by_outcome"),
        (RolloutFilter(min_tokens=9), "length", "rollouts_by_length"),
        (RolloutFilter(min_tokens=9, task="even", order="newest"), None, "rollouts_by_task"),
        (RolloutFilter(truncated=True), "truncated", "rollouts_by_truncated"),
        (RolloutFilter(part="right", order="best"), None, "parts_by_name"),
        (RolloutFilter(text="answer"), "text", "INTEGER PRIMARY KEY"),
        (RolloutFilter(task="even"), None, "groups_by_task"),
        (RolloutFilter(task="even", order="newest"), None, "rollouts_by_task"),
        (RolloutFilter(task="even", order="best"), None, "rollouts_by_task_and_reward"),
        (RolloutFilter(task="even", text="?!", order="newest"), None, "rollouts_by_task"),
        (RolloutFilter(task="even", part="right", order="best"), None, "parts_by_name"),
    ])  # fmt: skip
    def test_pages_come_from_an_index(
        self, crowded: sqlite3.Connection, wanted: RolloutFilter, lead: Any, index: str
    ) -> None:
        found = plan(crowded, wanted, lead)
        assert any(index in line for line in found), found
        others = [line for line in found if "rollouts_by" in line and index not in line]
        assert all("rowid=?" in line for line in others), found

    def test_only_a_rollouts_own_reward_parts_are_read(self, crowded: sqlite3.Connection) -> None:
        for wanted, lead in (
            (RolloutFilter(part="right", order="newest"), None),
            (RolloutFilter(part="right", step=3), "step"),
            (RolloutFilter(part="right", step=3, order="best"), "step"),
        ):
            assert "SEARCH part USING PRIMARY KEY (rollout=?)" in plan(crowded, wanted, lead)

    def test_the_first_page_sorts_nothing(self, crowded: sqlite3.Connection) -> None:
        for order, part, task in product(
            ("best", "worst", "draw", "newest"), (None, "right"), (None, "even")
        ):
            found = plan(crowded, RolloutFilter(order=order, part=part, task=task))
            assert not any("TEMP B-TREE" in line for line in found), (order, part, task, found)

    def test_a_long_list_is_of_one_state_and_may_be_asked_for_by_any_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("groupwise.runs.search.AT_ONCE", 2)
        path = tmp_path / "run.db"
        with Store.create(path) as writer, Store.open(path, readonly=True) as reader:
            fill(writer, 2)
            wanted = RolloutFilter(order="best", min_reward=0.5, limit=1, offset=3)
            expected = reader.rollouts(replace(wanted, limit=99, offset=0))
            found = reader.every_rollout(wanted)
            views = [next(found)[0]]
            fill(writer, 1, start=2)
            with ThreadPoolExecutor(1) as elsewhere:
                views += [view for view, _ in elsewhere.submit(list, found).result()]
            assert views == expected != []
            assert len(reader.rollouts(replace(wanted, limit=99, offset=0))) > len(expected)
            broken_off = reader.every_rollout(RolloutFilter())
            next(broken_off)
            broken_off.close()
            assert [*reader.every_rollout(RolloutFilter(step=9))] == []


MIXTURE: tuple[dict[str, Any], ...] = (
    {"task": "sums", "dataset_name": "grid"}, {"task": "", "dataset_name": "grid"},
    {"task": "x" * 300}, {"task": ["no", "label"], "dataset_name": "sums"}, {"task": 3}, {},
)  # fmt: skip
"""What examples say of their task."""


def _chat(draw: int, seen: str | None) -> Group:
    chat = [{"role": "user", "content": "Sort kiwi"}]
    rollout = Rollout(draw, 0, 0, (), (), "x", "scored", reward=1.0)
    return Group(draw, Example(draw, chat), (rollout,), prompt_seen=seen)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """A record of 2,000 rollouts, seen by SQL."""
    path = tmp_path_factory.mktemp("crowded") / "run.db"
    parts = group(0).rollouts[0].parts

    def made(draw: int) -> Group:
        members = (
            Rollout(draw, i, 0, (), (), "answer", "scored", None, i / 8, parts) for i in range(8)
        )
        return group(draw, rollouts=tuple(members))

    with Store.create(path) as store:
        for number in range(10):
            draws = tuple(range(number * 25, number * 25 + 25))
            store.commit_step(step(number, draws), [made(draw) for draw in draws], {})
        assert len(store.rollouts(RolloutFilter(limit=5000))) == 2000
    with closing(sqlite3.connect(path)) as connection:
        yield connection


def plan(record: sqlite3.Connection, wanted: RolloutFilter, lead: Any = None) -> list[str]:
    """How SQLite looks for them."""
    query, values = rollout_query(wanted, Plan(lead))
    return [row[3] for row in record.execute(f"EXPLAIN QUERY PLAN {query}", values)]


def without_fts5(monkeypatch: pytest.MonkeyPatch, indexed: bool = False) -> None:
    """SQLite is one that has no index of texts, unless it has."""
    if not indexed:
        monkeypatch.setattr(text_index, "_has_trigrams", lambda connection: False)


def draws(store: Store, words: str, **wanted: Any) -> list[int]:
    """Of the rollouts that are found."""
    return [view.group - 1 for view in store.rollouts(RolloutFilter(text=words, **wanted))]


class TestTheRest:
    def test_evaluations(self, store: Store) -> None:
        first = EvaluationRecord(0, "held_out", "base", {"mean": 0.1}, ({"row": 0, "ok": True},))
        again = EvaluationRecord(0, "held_out", "base", {"mean": 0.2}, ({"row": 0}, {"row": 1}))
        other = EvaluationRecord(4, "held_out", "run@4", {"mean": 0.3})
        for record in (first, other, again):
            store.add_evaluation(record)
        assert store.evaluations() == [again, other]
        assert store.evaluations(rows=False) == [replace(again, rows=()), other]
        assert [store.evaluation(step, "held_out") for step in (4, 0, 3)] == [other, again, None]

    def test_warnings(self, store: Store) -> None:
        begins = WarningRecord(1, "length", "begins", "caf\udce9 grows", {"start": 0.1 + 0.2})
        other = WarningRecord(1, "accuracy", "begins", "falls")
        store.commit_step(
            StepRecord(0, 0, 1, "f", (0,), 1e-5, 0.0), [group(0)], {}, [begins, other]
        )
        assert store.warnings() == [other, begins]
        assert store.warnings("length") == [begins]
        assert b"grows" in store.deterministic_dump()
        ends = WarningRecord(2, "length", "ends", "no longer so")
        store.set_warning(2, "length", ends)
        assert store.warnings("length") == [begins, ends]
        store.set_warning(1, "length", None)
        assert store.warnings() == [other, ends]

    def test_the_dump_knows_no_time(self, tmp_path: Path) -> None:
        def dump(name: str, late: float, reward: float) -> bytes:
            with Store.create(tmp_path / name) as store:
                store.set_meta({"created_at": late})
                metrics = {"reward": reward, "time/step": late, "perf/sampling_tokens": late}
                store.commit_step(StepRecord(0, 0, 1, "f", (0,), 1e-5, late), [group(0)], metrics)
                return store.deterministic_dump()

        first = dump("a.db", 1.0, 0.5)
        assert first == dump("b.db", 2.0, 0.5) != dump("c.db", 1.0, 0.5 + 1e-16 * 4)


class TestFormat:
    def test_a_newer_one_is_refused(self, store: Store) -> None:
        path = store.path
        store.close()
        alter(path, f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
        for readonly in (True, False):
            with pytest.raises(StoreError, match="upgrade Groupwise"):
                Store.open(path, readonly)

    def test_an_older_one_is_brought_up_to_date(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run.db"
        with Store.create(path) as store:
            fill(store, 1)
        migrations = (*schema.MIGRATIONS, "CREATE TABLE later (x INTEGER);")
        monkeypatch.setattr(database, "FORMAT", replace(database.FORMAT, migrations=migrations))
        before = path.read_bytes()
        for _ in range(2):
            with Store.open(path, readonly=True) as store:
                assert (store.last_step(), len(store.groups(0))) == (0, 2)
                assert store.rollouts(RolloutFilter(text="answer"))
                with pytest.raises(StoreError, match="readonly"):
                    store.set_meta({"state": "lost"})
        assert path.read_bytes() == before, "reading never writes into a run"
        Store.open(path).close()
        alter(path, "INSERT INTO later VALUES (1)")
        Store.open(path, readonly=True).close()

    @pytest.mark.parametrize("version", range(1, len(schema.MIGRATIONS)))
    def test_every_older_one_can_be_read_and_looks_like_the_newest(
        self, tmp_path: Path, version: int
    ) -> None:
        path = tmp_path / "run.db"
        make_old(
            path,
            version,
            "INSERT INTO steps (step, version_in, version_out, fingerprint_out, draws, learning_rate, finished_at)"
            " VALUES (0, 0, 1, 'f', '[0]', 0.1, 2.0);"
            "INSERT INTO evaluations (step, name, policy, metrics) VALUES (1, 'after', 'r@1', '{}');",
        )
        with Store.open(path, readonly=True) as store:
            assert store.steps() == [StepRecord(0, 0, 1, "f", (0,), 0.1, 2.0)]
            assert store.evaluations() == [EvaluationRecord(1, "after", "r@1", {})]
            assert (store.warnings(), store.completed_prompts(PromptFilter())) == ([], [])
        columns = "SELECT group_concat(name) FROM pragma_table_info(?)"
        tables = schema_tables(tmp_path / "new.db")
        old, new = (
            database.Database.open_for_reading(each) for each in (path, tmp_path / "new.db")
        )
        for table in tables:
            found, expected = (set(db.one(columns, (table,))[0].split(",")) for db in (old, new))
            assert found == expected, table
        old.close()
        new.close()

    def test_rows_of_an_older_writer_are_seen_without_copying(self, tmp_path: Path) -> None:
        path = tmp_path / "run.db"
        make_old(path, schema.TASKS_SINCE - 1)
        with (
            closing(sqlite3.connect(path)) as writer,
            Store.open(path, readonly=True) as store,
        ):
            for draw in range(3):
                writer.executescript(old_rollout(draw, '{"task": "sums"}'))
                assert len(store.rollouts(RolloutFilter())) == draw + 1
                for order in ("draw", "newest"):
                    found = store.rollouts(RolloutFilter(task="sums", order=order))
                    assert [view.task for view in found] == ["sums"] * (draw + 1)
                    assert store.rollouts(RolloutFilter(task="none", order=order)) == []
                assert store.tasks(5) == ["sums"]

    def test_rows_written_before_the_task_column_get_their_task(self, tmp_path: Path) -> None:
        path = tmp_path / "run.db"
        before = next(n for n, each in enumerate(schema.MIGRATIONS) if schema.FILL_TASKS in each)
        told = (*MIXTURE, {"task": math.nan})
        make_old(
            path, before, "".join(old_rollout(n, json.dumps(each)) for n, each in enumerate(told))
        )
        expected = ["sums", "grid", "x" * 200, "sums", None, None, None]
        assert [task_of(columns) for columns in told] == expected
        for readonly in (True, False):
            with Store.open(path, readonly) as store:
                assert [view.task for view in store.rollouts(RolloutFilter())] == expected
                assert store.tasks(9) == ["grid", "sums", "x" * 200]
                assert store.tasks(2) == ["grid", "sums"]
                for task, found in (("sums", [0, 3]), ("x" * 300, [2]), ("none", [])):
                    assert [v.group - 1 for v in store.rollouts(RolloutFilter(task=task))] == found


def make_old(path: Path, version: int, content: str = "") -> None:
    """A record of an earlier version, with what these statements put there."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            f"PRAGMA journal_mode = WAL;{''.join(schema.MIGRATIONS[:version])}{content}"
            f"PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA user_version = {version};"
        )


def old_rollout(draw: int, columns: str = "{}", prompt: str = "p") -> str:
    """Statements that write a group with a rollout, as all versions understand them."""
    return (
        "INSERT INTO groups (draw, position, example, prompt, prompt_text, columns, metrics)"
        f" VALUES ({draw}, 0, {draw}, '\"{prompt}\"', '{prompt}', '{columns}', '{{}}');"
        "INSERT INTO rollouts (draw, member, attempt, example, outcome, truncated, completion_tokens, completion, notes)"
        f" VALUES ({draw}, 0, 0, {draw}, 'failed', 0, 1, 'fig', '{{}}');"
    )


def schema_tables(path: Path) -> list[str]:
    """Those of a new record."""
    Store.create(path).close()
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE '%\\_index%' ESCAPE '\\'"
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute(query)]


def alter(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


@pytest.mark.parametrize(
    ("sources", "length"),
    [(("policy",), 3), (("policy", "environment", "policy"), 6), (("given",), 3), ((), 0)],
)
def test_the_length_of_a_rollout_is_what_the_policy_wrote(
    tmp_path: Path, sources: tuple[Any, ...], length: int
) -> None:
    """Also of a record that an earlier version has written, with all of its tokens."""
    path = tmp_path / "run.db"
    segments = tuple(Segment(source, (1, 2, 3)) for source in sources)
    with Store.create(path) as store:
        rollout = Rollout(0, 0, 0, (), segments, "text", "scored", None, 1.0)
        store.keep_unfinished([Group(0, Example(0, "?"), (rollout,))])
        [view] = store.rollouts(RolloutFilter())
        assert view.completion_tokens == length
    with sqlite3.connect(path) as record:
        record.execute("UPDATE rollouts SET completion_tokens = ?", (3 * len(sources),))
        record.executescript(
            "DROP INDEX rollouts_by_length; DROP INDEX rollouts_by_truncated; DROP INDEX parts_of_turns;"
            "ALTER TABLE rollouts DROP COLUMN teacher_prompt_ids; ALTER TABLE segments DROP COLUMN teacher_logprobs;"
            "ALTER TABLE segments DROP COLUMN teacher_top_ids; ALTER TABLE segments DROP COLUMN teacher_top_logprobs;"
            "PRAGMA user_version = 10;"
        )
    record.close()
    with Store.open(path) as store:
        [view] = store.rollouts(RolloutFilter(min_tokens=length, max_tokens=length))
        assert view.completion_tokens == length
