"""Long things in pages: examples that were asked very often, texts of a megabyte, rollouts of very many tokens.

1. The page of an example has whole groups, and pages for all of them.
2. Of a long text a list has beginning and end; the rollout's own page has more, and programs all of it.
3. Tokens come in pages that read as one text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from groupwise.core.types import Example, Group, Rollout, Segment
from groupwise.dashboard.runs import rollouts
from groupwise.dashboard.runs.tokens import tokenizer_of
from groupwise.runs.records import RolloutFilter, StepRecord, WarningRecord
from groupwise.runs.store import Store
from tests.unit.dashboard.dashboard_client import asking, json_of
from tests.web_runs import write_run


def commit(store: Store, step: int, *groups: Group) -> None:
    draws = tuple(each.draw for each in groups)
    record = StepRecord(step, step, step + 1, "w", draws, 0.1, 0.0)
    warning = WarningRecord(step + 1, "length", "begins", f"at {step}")
    store.commit_step(record, groups, {}, [warning])


def answer(draw: int, member: int, text: str = "", ids: tuple[int, ...] = ()) -> Rollout:
    segment = Segment("policy", ids, tuple(-0.5 for _ in ids), finish_reason="stop")
    return Rollout(
        draw, member, 0, (), (segment,), text, "scored", reward=float(member), advantage=0.1
    )


async def test_an_example_has_all_of_its_groups_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "often", 0)
    with Store.open(run / "run.db") as store:
        for step in range(45):
            members = tuple(answer(step, member) for member in range(16))
            commit(store, step, Group(step, Example(0, "p"), members))
    seen: list[dict[str, Any]] = []
    for page in (1, 2, 3):
        found = await json_of(tmp_path, f"/runs/often/examples/0?page={page}")
        assert (found["all"], found["pages"]) == (45, 3)
        assert found["steps"] == [*range(1, 46)]
        seen += found["groups"]
    assert [each["step"] for each in seen] == [*range(45, 0, -1)]
    assert {(each["mean"], each["best"], len(each["members"])) for each in seen} == {
        (7.5, 15.0, 16)
    }
    async with asking(tmp_path) as found:
        beyond = await found.get("/runs/often/examples/0?page=4")
        assert (beyond.status_code, "do not reach page 4" in beyond.text) == (404, True)
        assert 'rel="next"' in (await found.get("/runs/often/examples/0?page=2")).text
    overview = await json_of(tmp_path, "/runs/often")
    assert [each["step"] for each in overview["warnings"]] == [*range(26, 46)]
    assert overview["all_warnings"] == 45


@pytest.mark.parametrize(("odd", "count"), [("é", 50_000), ("\ud83d", 10_000)])
async def test_long_texts_are_cut_in_lists(tmp_path: Path, odd: str, count: int) -> None:
    prompt, text = "begin " + odd * count + " end", "first " + odd * 5 * count + " last"
    run = write_run(tmp_path / "long", 0)
    with Store.open(run / "run.db") as store:
        commit(store, 0, Group(0, Example(0, prompt), tuple(answer(0, n, text) for n in range(2))))
    for page in ("rollouts", "groups/1", "examples/0"):
        async with asking(tmp_path) as found:
            shown = (await found.get(f"/runs/long/{page}")).text
        for part in ("begin", "end", "first", "last", "more characters"):
            assert part in shown, page
        assert len(shown) < 450_000
    async with asking(tmp_path) as found:
        whole = (await found.get("/runs/long/rollouts/1?format=json")).json()
        exported = (await found.get("/runs/long/rollouts.jsonl")).content
    assert len(whole["rollout"]["completion"]) >= len(text)
    assert exported.count(b"first") == 2
    assert len(exported) > 2 * (len(text) + len(prompt))
    with Store.open(run / "run.db", readonly=True) as store:
        [view, _] = store.rollouts(RolloutFilter())
        assert (view.prompt, view.completion) == (prompt, text)


async def test_tokens_come_in_pages_that_read_as_one_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "TOKENS", 7)
    run = write_run(tmp_path / "tokens", 0)
    with_letters_and_bytes(run)
    euro = tuple(26 + each for each in "€".encode())
    ids = (*range(6), *euro, *range(9))
    rollout = answer(0, 0, ids=ids)
    with Store.open(run / "run.db") as store:
        [drawn_twice] = rollout.segments
        new_row = replace(drawn_twice, prompt_ids=(2, 3))
        segments = (drawn_twice, Segment("environment", (1, 2)), new_row)
        both = Rollout(0, 0, 0, (), segments, "", "scored", reward=0.0)
        commit(store, 0, Group(0, Example(0, "p"), (both,)))
    read, drawn = "", 0
    rows: list[tuple[int, str]] = []
    for page in range(1, 7):
        found = await json_of(tmp_path, f"/runs/tokens/rollouts/1?page={page}")
        assert (found["pages"], found["tokens"]["all"], found["finish"]) == (6, 38, "stop")
        tokens = [each for segment in found["segments"] for each in segment["tokens"]]
        assert len(tokens) == (7 if page < 6 else 3)
        assert found["tokens"]["first"] == drawn + 1
        rows += [(each["row"], each["prompt"]) for each in found["segments"] if each["row"]]
        drawn += len(tokens)
        read += "".join(each["text"] for each in tokens)
    text = "abcdef€abcdefghi"
    assert (read, drawn, rows) == (f"{text}bc{text}", 38, [(2, "cd")])
    async with asking(tmp_path) as found:
        assert (await found.get("/runs/tokens/rollouts/1?page=7")).status_code == 404
        assert "Row 2 starts here" in (await found.get("/runs/tokens/rollouts/1?page=3")).text
        assert "Tokens 8 to 14 of 38." in (await found.get("/runs/tokens/rollouts/1?page=2")).text


def test_a_tokenizer_that_makes_texts_longer_is_not_used(tmp_path: Path) -> None:
    with_letters_and_bytes(tmp_path)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    described = json.loads(file.read_bytes())
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    doubles = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60
    for steps, read in (([spaces], "a"), (doubles, "⟨0⟩")):
        decoder = {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}
        (tmp_path / read / "tokenizer").mkdir(parents=True)
        written = json.dumps(described | {"decoder": decoder})
        (tmp_path / read / "tokenizer" / "tokenizer.json").write_text(written)
        assert tokenizer_of(tmp_path / read).pieces([0]) == [read]


def with_letters_and_bytes(run: Path) -> None:
    """Give the run a tokenizer that has a token for each small letter, and one for each byte."""
    words = {chr(97 + n): n for n in range(26)} | {f"<0x{n:02X}>": 26 + n for n in range(256)}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    (run / "tokenizer").mkdir()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))


async def test_a_rollout_has_an_address_that_outlives_what_the_record_calls_it(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "one", 3)
    async with asking(tmp_path) as visit:

        async def said(of: Any) -> Any:
            return (await visit.get(f"/runs/one/rollouts/{of}?format=json")).json()

        listed = await visit.get("/runs/one/rollouts?format=json&order=draw")
        first = listed.json()["rollouts"][0]
        assert await said(first["id"]) == await said("1.1") == await said("1.1.0")
        assert (await said("1.1"))["before"] is None
        last = await said("6.4")
        assert (last["rollout"]["group"], last["rollout"]["rollout"]) == (6, 4)
        assert last["before"]["rollout"] == 3
        page = (await visit.get("/runs/one/rollouts", headers={"accept": "text/html"})).text
        assert 'href="/runs/one/rollouts/6.4"' in page
        for none in ("0.1", "1.0", "1.9", "1.1.1", "99.1", "1.", ".1", "a.b", "1.2.3.4", "9" * 20):
            assert (await visit.get(f"/runs/one/rollouts/{none}")).status_code == 404, none
        much = "9" * 20
        for query in (f"step={much}", f"example={much}", "low=nan", "high=inf", "page=4001"):
            refused = await visit.get(f"/runs/one/rollouts?{query}")
            assert refused.status_code == 400, query
