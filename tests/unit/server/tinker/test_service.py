"""Lists of sessions and training runs: they outlive their sessions and the server's process."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from groupwise.server.ledger.file import APPLICATION_ID, MIGRATIONS
from groupwise.server.ledger.training_runs import training_runs
from groupwise.server.ledger.writer import Ledger
from tests.unit.server.tinker.test_checkpoints import Saving, end
from tests.unit.server.tinker.test_routes import Asking


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncGenerator[Asking]:
    asking = Asking(tmp_path)
    await asking.service.open()
    yield asking
    await end(asking)


async def test_runs_and_sessions_stay_listed_when_they_have_ended(
    asking: Asking, tmp_path: Path
) -> None:
    described = {"display_name": "nightly", "user_metadata": {"team": "a"}}
    opened = await asking.post("create_session", tags=[], sdk_version="0", **described)
    session = opened["session_id"]
    lora = {"lora_config": {"rank": 4}, "user_metadata": {"seed": "1"}}
    what = {"session_id": session, "model_seq_id": 0, "base_model": "letters"}
    await asking.result(await asking.post("create_model", **what, **lora))
    saving = Saving(asking, f"{session}:train:0")
    await saving.save("one")
    await saving.save("two")
    await saving.save("two", "save_weights_for_sampler")
    sampler = await saving.sampler(f"tinker://{saving.model}/weights/one")
    other = await asking.model()

    run = (await asking.http.get(f"training_runs/{saving.model}?access_scope=owned")).json()
    assert (run["base_model"], run["lora_rank"], run["is_lora"]) == ("letters", 4, True)
    assert run["user_metadata"] == {"seed": "1"}
    newest = [run[name]["checkpoint_id"] for name in ("last_checkpoint", "last_sampler_checkpoint")]
    assert newest == ["weights/two", "sampler_weights/two"]
    of_session = {
        "training_run_ids": [saving.model],
        "sampler_ids": [sampler],
        **described,
    }
    assert (await asking.http.get(f"sessions/{session}")).json() == of_session
    await asking.post(f"sessions/{session}/finish")
    await end(asking)

    again = Asking(tmp_path)
    await again.service.open()
    listed = (await again.http.get("training_runs?limit=1&offset=1")).json()
    assert listed["training_runs"] == [run]
    assert listed["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    ended = (await again.http.get(f"sessions/{session}?access_scope=accessible")).json()
    assert ended == {**of_session, "sampler_ids": []}
    sessions = (await again.http.get("sessions")).json()["sessions"]
    assert sessions == [other.partition(":")[0], session]
    for missing in ("training_runs/s:train:9", "sessions/s"):
        assert (await again.http.get(missing)).status_code == 404
    for wrong in ("training_runs?project_id=p", "sessions?access_scope=mine", "sessions/s?a=b"):
        assert (await again.http.get(wrong)).status_code == 400
    await end(again)


async def test_a_request_is_remembered_as_the_last_one(asking: Asking) -> None:
    model = await asking.model()
    address = f"training_runs/{model}"
    before = (await asking.http.get(address)).json()["last_request_time"]
    await asking.result(await asking.step(model, 1))
    assert (await asking.http.get(address)).json()["last_request_time"] > before


async def test_sessions_of_an_earlier_version_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "server.db"
    number = next(n for n, m in enumerate(MIGRATIONS) if "TABLE session_history" in m)
    with sqlite3.connect(path) as connection:
        connection.executescript("".join(MIGRATIONS[:number]))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("INSERT INTO verb_sessions (id) VALUES ('s-1')")
        spec = '{"base": "tiny", "rank": 4}'
        connection.execute(
            "INSERT INTO verb_models (id, session, spec) VALUES ('s-1:train:0', 's-1', ?)", (spec,)
        )
    connection.close()
    ledger = Ledger.open(path)
    rows, total = await ledger.do(training_runs, 5, 0)
    assert (total, rows[0].id, rows[0].spec["rank"]) == (1, "s-1:train:0", 4)
    await ledger.close()
