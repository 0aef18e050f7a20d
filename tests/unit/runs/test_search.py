"""Every filter against a loop over all rollouts, for each way to query the record."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupwise.core.types import (
    Example,
    Group,
    Outcome,
    RewardPart,
    Rollout,
    SamplingParams,
    Segment,
)
from groupwise.runs import schema, text_index
from groupwise.runs.records import FailureKind, Order, RolloutFilter, RolloutView, StepRecord
from groupwise.runs.store import Store
from groupwise.runs.text_index import terms_of, trigram_query

PROMPTS = ("Sort kiwi", "東京都は?", "say \\boxed{1}", "Ⓐ or ⓑ")
TEXTS = (
    "kiwi and fig", "x += 1", "私は東京都に住む", "ผมสวัสดีครับ 학교에서", "** >= 🎉🎉 == \x00", "Ⓑ+ⓐ", "", "a\ud83db +=",
    "第3905步: kiwi 第7", "第39步 x1=7;",
)  # fmt: skip
WORDS = (
    "kiwi", "fig kiwi", '"kiwi and"', "+=", "=", "==", "🎉", "🎉🎉", "京都", "東京 都", "住", "สวัส", "학교 สวัสดี", "ⓑ+Ⓐ", "ⓐ",
    "第3905步", "第39", "第39步", "步 kiwi", "05步", '"步 x"', "?", '"x += 1"', '" += "', "東京 kiwi", "は?", "nowhere", "都市",
    "\\boxed{1}", '"**"', "\x00", "  ", "x1=7;", "=7", '"x += 1"', "+=1",
)  # fmt: skip
"""To be looked for."""


def step(number: int, draws: tuple[int, ...]) -> StepRecord:
    return StepRecord(number, number, number + 1, "f", draws, 1e-5, 0.0)


def one_of(dice: random.Random, draw: int, member: int) -> Rollout:
    parts = [RewardPart("right", dice.choice((0.0, 0.5, 1.0)))] if dice.random() < 0.7 else []
    parts += [RewardPart("turns", dice.random(), 1.0, turn) for turn in range(dice.randrange(3))]
    failed = dice.random() < 0.2
    reason = dice.choice(("stop", "length"))
    segment = Segment("policy", (1,) * dice.randrange(5), None, 0, "f", SamplingParams(4), 0, reason)  # fmt: skip
    asked = (draw, member, 0, (), (segment,), dice.choice(TEXTS))
    if failed:
        return Rollout(*asked, dice.choice(("failed", "timed_out")), "why")
    reward = dice.choice((0.0, 0.25, 0.5, 1.0, float("nan")))
    return Rollout(*asked, "scored", None, reward, tuple(parts))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rollouts in records of this format and of earlier ones, and in one without a full-text index."""
    folder = tmp_path_factory.mktemp("records")
    dice = random.Random(3)
    path = folder / "run.db"
    with Store.create(path) as store:
        for number in range(6):
            draws = range(number * 4, number * 4 + 4)
            groups = [
                Group(
                    draw,
                    Example(draw % 5, dice.choice(PROMPTS), {"task": dice.choice(("sums", "grid"))} if draw % 3 else {}),
                    tuple(one_of(dice, draw, member) for member in range(4)),
                )
                for draw in draws
            ]  # fmt: skip
            store.commit_step(step(number, tuple(draws)), groups, {})
    found = {"now": path}
    for version in (schema.TASKS_SINCE - 1, schema.LENGTHS_SINCE - 1):
        found[f"format {version}"] = as_before(path, folder / f"{version}.db", version)
    found["without an index"] = folder / "plain.db"
    copied(path, found["without an index"]).close()
    with sqlite3.connect(found["without an index"]) as plain:
        plain.execute("UPDATE meta SET value = '\"stale\"' WHERE key = 'text_index'")
    plain.close()
    return found


def copied(path: Path, to: Path) -> sqlite3.Connection:
    source, copy = sqlite3.connect(path), sqlite3.connect(to)
    source.backup(copy)
    source.close()
    return copy


def as_before(path: Path, to: Path, version: int) -> Path:
    """A record as an earlier version has left it, with its index of words alone."""
    with copied(path, to) as copy:
        copy.executescript(
            "DROP INDEX rollouts_by_length; DROP INDEX rollouts_by_truncated; DROP INDEX parts_of_turns;"
            "DROP TABLE completion_index; DROP TABLE prompt_index;"
            "CREATE VIRTUAL TABLE prompt_index USING fts5 (prompt, content='prompts', content_rowid='draw');"
            "CREATE VIRTUAL TABLE completion_index USING fts5 (completion, content='rollouts', content_rowid='id');"
            "INSERT INTO prompt_index (prompt_index) VALUES ('rebuild');"
            "INSERT INTO completion_index (completion_index) VALUES ('rebuild');"
        )
        if version < schema.TASKS_SINCE:
            copy.executescript(
                "DROP INDEX groups_by_task; DROP INDEX rollouts_by_task; DROP INDEX rollouts_by_task_and_reward;"
                "ALTER TABLE groups DROP COLUMN task; ALTER TABLE rollouts DROP COLUMN task;"
                "ALTER TABLE segments DROP COLUMN learner_logprobs;"
            )
        copy.execute("UPDATE meta SET value = '\"current\"' WHERE key = 'text_index'")
        copy.execute(f"PRAGMA user_version = {version}")
    copy.close()
    return to


@pytest.fixture(scope="module")
def stores(paths: dict[str, Path]) -> Iterator[dict[str, Store]]:
    found = {name: Store.open(path, readonly=True) for name, path in paths.items()}
    assert [name for name, store in found.items() if store._db.indexed] == ["now"]
    yield found
    for store in found.values():
        store.close()


@pytest.fixture(scope="module")
def everything(stores: dict[str, Store]) -> Callable[[], list[RolloutView]]:
    """Wrapped in a function, because Hypothesis warns if the repr of a test's argument is long."""
    found = stores["now"].rollouts(RolloutFilter(limit=1000))
    assert len(found) == 96
    return lambda: found


ORDERS: tuple[Order, ...] = ("draw", "newest")
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "step": st.integers(0, 6), "group": st.integers(0, 24), "example": st.integers(0, 5),
    "task": st.sampled_from(("sums", "grid", "none")),
    "outcome": st.sampled_from(("scored", "failed", ("failed", "timed_out"))),
    "part": st.sampled_from(("right", "turns", "none")),
    "min_reward": st.sampled_from((-1.0, 0.25, 0.9)),
    "max_reward": st.sampled_from((0.0, 0.5, 2.0)), "min_tokens": st.integers(0, 5),
    "max_tokens": st.integers(0, 5), "truncated": st.booleans(), "committed": st.booleans(),
}  # fmt: skip


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    asked=st.fixed_dictionaries({}, optional=OPTIONAL),
    order=st.sampled_from(("draw", "newest", "best", "worst")),
    common=st.sampled_from((1, 5, 30, 1000)),
    instructions=st.sampled_from((1, 500, 400_000)),
)
def test_a_page_is_what_going_through_all_would_find(
    stores: dict[str, Store],
    everything: Callable[[], list[RolloutView]],
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    order: Any,
    common: int,
    instructions: int,
) -> None:
    monkeypatch.setattr("groupwise.runs.search.INSTRUCTIONS", instructions)
    monkeypatch.setattr("groupwise.runs.search.FEW", 2 * common)
    monkeypatch.setattr("groupwise.runs.search.DEEP", instructions % 7)
    wanted = RolloutFilter(**asked, order=order, limit=1000)
    monkeypatch.setattr("groupwise.runs.search.COMMON", common)
    expected = [each for each in everything() if meets(each, wanted)]
    for name, store in stores.items():
        found = store.rollouts(wanted)
        assert sorted(each.id for each in found) == ids_of(expected, wanted), name
        assert found == in_order(found, wanted), name
        page = store.rollouts(replace(wanted, limit=3, offset=2))
        assert repr(page) == repr(found[2:5]), name  # one reward is NaN, which equals nothing


def meets(view: RolloutView, wanted: RolloutFilter) -> bool:
    outcomes = (wanted.outcome,) if isinstance(wanted.outcome, str) else wanted.outcome
    plain = (
        (wanted.step, view.step), (wanted.group, view.group), (wanted.example, view.example), (wanted.task, view.task),
        (wanted.truncated, view.truncated),
    )  # fmt: skip
    return (
        all(asked is None or asked == has for asked, has in plain)
        and (outcomes is None or view.outcome in outcomes)
        and (view.step is not None or not wanted.committed)
        and (wanted.min_tokens or 0) <= view.completion_tokens
        and (wanted.max_tokens is None or view.completion_tokens <= wanted.max_tokens)
    )


def values_of(view: RolloutView, wanted: RolloutFilter) -> list[float | None]:
    """What a range is about, of one rollout: of a part that it has several times, several."""
    if wanted.part is None:
        return [view.reward]
    return [part.value for part in view.parts if part.name == wanted.part]


def is_within(value: float | None, wanted: RolloutFilter) -> bool:
    ranged = (wanted.min_reward, wanted.max_reward) != (None, None)
    if not ranged and wanted.order in ("draw", "newest"):
        return True
    if value is None or value != value:
        return False
    least, most = wanted.min_reward, wanted.max_reward
    return (least is None or value >= least) and (most is None or value <= most)


def ids_of(expected: list[RolloutView], wanted: RolloutFilter) -> list[int]:
    """A rollout that has the part several times stands there once."""
    return [
        view.id
        for view in expected
        if any(is_within(value, wanted) for value in values_of(view, wanted))
    ]


def in_order(found: list[RolloutView], wanted: RolloutFilter) -> list[RolloutView]:

    def there(view: RolloutView) -> list[float]:
        return [
            value
            for value in values_of(view, wanted)
            if value is not None and is_within(value, wanted)
        ]

    keys: dict[str, Any] = {
        "draw": lambda view: (view.group, view.rollout, view.attempt),
        "newest": lambda view: -view.id,
        "best": lambda view: (-max(there(view)), -view.id),
        "worst": lambda view: (min(there(view)), view.id),
    }
    return sorted(found, key=keys[wanted.order])


@pytest.mark.parametrize(
    ("common", "near", "instructions"),
    [(1, 3, 900), (1000, 1, 1)],
)
def test_texts_are_found_by_the_index_as_without(
    stores: dict[str, Store],
    everything: Callable[[], list[RolloutView]],
    monkeypatch: pytest.MonkeyPatch,
    common: int,
    near: int,
    instructions: int,
) -> None:
    for name, value in (("INSTRUCTIONS", instructions), ("COMMON", common), ("NEAR", near)):
        monkeypatch.setattr(f"groupwise.runs.search.{name}", value)
    also: tuple[dict[str, Any], ...] = ({}, {"truncated": True}, {"task": "sums"})
    for number, words in enumerate(WORDS):
        said = [each for each in everything() if says(each, words)]
        assert bool(said) == (words not in ("nowhere", "都市", "東京 kiwi", "+=1"))
        for asked in (also[0], also[1 + number % 2]):
            wanted = RolloutFilter(text=words, order=ORDERS[number % 2], limit=1000, **asked)
            mine = [view.id for view in said if meets(view, wanted)]
            for name, store in stores.items():
                found = [view.id for view in store.rollouts(wanted)]
                assert sorted(found) == mine, (name, wanted)
                page = store.rollouts(replace(wanted, limit=2, offset=1))
                assert [view.id for view in page] == found[1:3], (name, wanted)
                assert [view.id for view, _ in store.every_rollout(wanted)] == found


def says(view: RolloutView, words: str) -> bool:
    """All in the one text, or all in the other, in small letters."""
    wanted = terms_of(words)
    return any(all(word in text.lower() for word in wanted) for text in (view.prompt, view.completion))  # fmt: skip


ALPHABET = st.one_of(
    st.sampled_from("第步東京สวั학ⓑ+=*\\{ 0739kx"), st.characters(exclude_categories=("Cs",))
)


@settings(max_examples=80, deadline=None)
@given(st.text(ALPHABET, max_size=30), st.data())
def test_the_index_finds_a_text_by_any_part_of_it(text: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(text)))
    part = text[first : data.draw(st.integers(first, len(text)))].lower()
    query = trigram_query([part])
    assert bool(query) == (len(part) >= 3)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as record:
        record.executescript("CREATE TABLE meta (key PRIMARY KEY, value); CREATE TABLE prompts (draw, prompt);"
                             "CREATE TABLE rollouts (id, completion);")  # fmt: skip
        record.execute("INSERT INTO rollouts VALUES (1, ?)", (text,))
        text_index.prepare(record)
        asked = "SELECT count(*) FROM completion_index WHERE completion_index MATCH ?"
        assert not query or part not in text.lower() or record.execute(asked, (query,)).fetchone() == (1,)  # fmt: skip


def test_words_are_found_within_words_of_every_script(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run.db") as store:
        rollout = Rollout(0, 0, 0, (), (), "私はkiwiが好き 第3905步", "scored", None, 1.0)
        store.keep_unfinished([Group(0, Example(0, "?"), (rollout,))])
        for words, found in (("kiwi", 1), ("390", 1), ("IWI 3905", 1), ("ki wi", 1), ('"ki wi"', 0)):  # fmt: skip
            assert len(store.rollouts(RolloutFilter(text=words))) == found, words


def test_an_index_of_another_coding_is_rebuilt_and_not_asked_before(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "run.db"
    with copied(paths["now"], path) as record:
        record.execute("UPDATE meta SET value = '\"current, signs 1\"' WHERE key = 'text_index'")
        record.execute("INSERT INTO completion_index (completion_index) VALUES ('delete-all')")
    record.close()
    with Store.open(path, readonly=True) as store:
        assert store.rollouts(RolloutFilter(text="+="))
    with Store.open(path) as store:
        assert store.rollouts(RolloutFilter(text="+="))
        assert store.rollouts(RolloutFilter(text="kiwi"))
    with Store.open(path, readonly=True) as store:
        assert store.rollouts(RolloutFilter(text="kiwi"))


def test_rewound_rollouts_are_removed_from_the_index(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Store.create(path) as store:
        for number, text in enumerate(TEXTS):
            rollout = Rollout(number, 0, 0, (), (), text, "scored", None, 1.0)
            group = Group(number, Example(0, "東京 ** Sort"), (rollout,))
            store.commit_step(step(number, (number,)), [group], {})
        store.rewind(1)
        assert [view.step for view in store.rollouts(RolloutFilter(text="東京"))] == [1]
        store.rewind(0)
    with sqlite3.connect(path) as record:
        for index in text_index.INDEX_SOURCES:
            record.execute(
                f"CREATE VIRTUAL TABLE temp.{index}_left USING fts5vocab(main, {index}, row)"
            )
            assert record.execute(f"SELECT term FROM temp.{index}_left").fetchall() == []
    record.close()


def failed(draw: int, member: int, reason: str | None, outcome: Outcome = "failed") -> Rollout:
    return Rollout(draw, member, 0, (), (), "", outcome, reason=reason)


def test_kinds_are_counted_the_most_frequent_first(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run.db") as store:
        for draw in range(8):
            members = [
                failed(draw, 0, f"no number in 'text {draw}'"),
                failed(draw, 1, f"after {draw / 7} s \ud800", "timed_out"),
                Rollout(draw, 2, 0, (), (), "", "scored", reward=1.0),
            ]
            members += [failed(draw, 3, None)] * (draw < 3) + [failed(draw, 4, "x" * 999)] * (
                not draw
            )
            store.keep_unfinished([Group(draw, Example(0, "?"), tuple(members))])
        found = store.failures()
        assert [(each.reason[:14], each.count) for each in found] == [
            *(("after … s \ufffd\ufffd\ufffd", 8), ("no number in …", 8)),
            *(("no reason give", 3), ("x" * 14, 1)),
        ]
        assert found[1].example == "no number in 'text 7'", "the newest"
        assert store.draw_of(found[1].rollout) == 7
        assert len(found[3].reason) == 300
        assert store.failures(limit=1) == found[:1]
        newest = store.failures(newest=3)
        assert sum(each.count for each in newest) == 3
        assert newest[0] == FailureKind(found[0].reason, 2, found[0].example, found[0].rollout)
