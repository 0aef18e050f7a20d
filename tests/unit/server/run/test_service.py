"""What clients can do, and the answers they get."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.training import (
    CompletionsRequest,
    RewardsOfOne,
    RewardsOfSeveral,
    StartRequest,
    StepRequest,
)
from groupwise.core import atomic_files
from tests import fake_engine
from tests.fake_engine import FakeEngine, Fault
from tests.unit.server.serving import ME, SETTINGS, Served, expect_refusal, letters, served


async def test_a_run_from_start_to_finish(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await expect_refusal("not_started", server.ask())
        assert await server.start(run_name="first") == "first"
        for step in range(5):
            answers = await server.round(step)
            statuses = {(each.status, each.step, each.model_version) for each in answers}
            assert statuses == {("trained", step, ("first", step + 1))}
            assert all(answer.metrics and "reward" in answer.metrics for answer in answers)
        status = await server.until(lambda seen: seen.phase == "finished")
        assert (status.step, status.counters.trained, status.counters.served) == (5, 10, 10)
        assert (status.completion_requests_served, status.reward_requests_served) == (10, 10)
        await expect_refusal("finished", server.ask())
        assert (tmp_path / "runs" / "first" / "final").is_dir()
        kinds = [event.kind for event in await server.service.events(0, 100)]
        saved = ["step", "step", "checkpoint"]
        assert kinds == ["started", *saved, *saved, "step", "checkpoint", "finished"]
        first, second = (
            StartRequest.model_validate({**SETTINGS, "run_name": name})
            for name in ("first", "second")
        )
        assert await server.service.finished_run(first) == "first"
        assert await server.service.finished_run(second) is None
        assert await server.start(run_name="first") == "first-2"


async def test_the_same_rewards_are_accepted_once_and_others_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        group = await server.ask()
        assert len(group.completions) == len(group.completion_tokens) == 4
        assert group.fingerprint == (await server.service.status()).fingerprint
        first = await server.reward(group, wait=True, timeout=0.01)
        assert (first.status, first.step) == ("accepted", None)
        assert (await server.reward(group)).status == "accepted"
        await expect_refusal("already_rewarded", server.reward(group, [9.0] * 4))
        await expect_refusal("invalid_request", server.reward(await server.ask(), [1.0]))
        status = await server.service.status()
        assert (status.counters.rewarded, status.counters.open) == (1, 1)


async def test_several_posts_are_accepted_all_or_none(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        group, other = await server.ask(), await server.ask()
        entries = [
            {"group_id": group.group_id, "rewards": letters(group)},
            {"group_id": "g-unknown", "rewards": letters(other)},
        ]
        request = RewardsOfSeveral.model_validate({"groups": entries})
        await expect_refusal("unknown_group", server.service.rewards(request, ME))
        assert (await server.service.status()).counters.open == 2


async def test_rewards_find_their_group_by_its_echo_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        group = await server.ask()

        async def post(prompt: Any = group.prompt, **more: Any) -> Any:
            body = {"prompt": prompt, "completions": group.completions, "rewards": letters(group)}
            request = RewardsOfOne.model_validate({**body, **more})
            return await server.service.rewards(request, ME)

        await expect_refusal("echo_mismatch", post("else", group_id=group.group_id))
        (answer,) = await post()
        assert answer.group_id == group.group_id
        assert await post() == [answer]
        await expect_refusal("unknown_group", post("never asked"))


async def test_a_held_group_waits_until_it_is_released_or_named(tmp_path: Path) -> None:
    async with served(tmp_path, completions_wait=5.0) as server:
        await server.start(staleness=1)
        held = await server.ask()
        assert (await server.reward(held, include="hold")).status == "held"
        one, two = await server.ask(), await server.ask()  # a held one takes no room
        await asyncio.gather(*(server.reward(each, wait=True) for each in (one, two)))
        assert (await server.service.status()).counters.held == 1
        assert (await server.reward(held, include="next")).status == "accepted"
        last = await server.ask()
        answers = await asyncio.gather(*(server.reward(each, wait=True) for each in (held, last)))
        assert {answer.step for answer in answers} == {1}


async def test_a_held_group_becomes_too_old(tmp_path: Path) -> None:
    async with served(tmp_path, completions_wait=5.0) as server:
        await server.start()
        held = await server.ask()
        await server.reward(held, include="hold")
        later = [await server.ask(), await server.ask()]
        await asyncio.gather(*(server.reward(each, wait=True) for each in later))
        await server.until(lambda seen: seen.counters.stale == 1)
        await expect_refusal("group_stale", server.reward(held, wait=True))


async def test_steps_by_hand_take_what_is_named_or_what_waits(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        run = await server.start(steps="manual", staleness=1)
        await expect_refusal("nothing_to_train", server.service.step(StepRequest(), ME))
        groups = [await server.ask() for _ in range(5)]
        await expect_refusal("manual_mode", server.reward(groups[0], wait=True))
        for group in groups[:4]:
            await server.reward(group)
        await server.reward(groups[4], include="hold")
        named = [groups[4].group_id, groups[0].group_id]
        answer = await server.service.step(StepRequest(group_ids=named, learning_rate=0.25), ME)
        assert (answer.status, answer.step, answer.group_ids) == ("trained", 0, named)
        assert answer.model_version == (run, 1)
        answer = await server.service.step(StepRequest(), ME)
        assert answer.group_ids == [group.group_id for group in groups[1:3]]
        await expect_refusal("group_in_use", server.service.step(StepRequest(group_ids=named), ME))
        await server.start(replace=True)
        await expect_refusal("auto_mode", server.service.step(StepRequest(), ME))
        held = await server.ask()
        await server.reward(held, include="hold")
        answer = await server.service.step(StepRequest(group_ids=[held.group_id]), ME)
        assert answer.status == "trained"


async def test_giving_up_a_group_frees_its_capacity_and_its_draw(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        group = await server.ask(draw=0)
        await server.ask(draw=1)
        await expect_refusal("draw_taken", server.ask(draw=1, prompt="other"))
        await expect_refusal("too_busy", server.ask())
        await server.service.give_up(group.group_id)
        await server.service.give_up(group.group_id)
        await expect_refusal("group_given_up", server.reward(group))
        again = await server.ask(draw=0)
        assert again.completions == group.completions
        await server.reward(again)
        await expect_refusal("group_in_use", server.service.give_up(again.group_id))


async def test_null_rewards_do_not_teach_and_stop_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        before = (await server.service.status()).fingerprint
        for step in range(4):
            groups = [await server.ask(draw=2 * step + n) for n in range(2)]
            await asyncio.gather(*(server.reward(g, [None] * 4, wait=True) for g in groups))
        status = await server.service.status()
        assert (status.step, status.fingerprint, status.phase) == (4, before, "running")


async def test_only_one_run_at_a_time_and_a_stopped_one_can_be_continued(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        run = await server.start()
        await server.round(0)
        await expect_refusal("run_active", server.start())
        second = await server.start(replace=True)
        assert second != run
        stopped = await server.service.stop()
        assert (stopped.run_id, stopped.step) == (second, 0)
        assert await server.service.stop() == stopped
        await expect_refusal("finished", server.ask())
        await expect_refusal("unknown_checkpoint", server.start(resume_from="nobody"))
        assert await server.start(resume_from=run) == run
        assert (await server.service.status()).step == 1
        answers = await server.round(1)
        assert {answer.step for answer in answers} == {1}


async def test_a_step_is_trained_in_the_order_of_its_draws(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        first, second = await server.ask(draw=0), await server.ask(draw=1)
        answers = [server.reward(second, wait=True), server.reward(first, wait=True)]
        await asyncio.gather(*map(asyncio.ensure_future, answers))
        (step,) = [e for e in await server.service.events(0, 100) if e.kind == "step"]
        assert step.data["group_ids"] == [first.group_id, second.group_id]


async def test_a_rewarded_group_takes_room_until_it_is_trained(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        await server.reward(await server.ask())
        second = await server.ask()
        await expect_refusal("too_busy", server.ask())
        await server.reward(second, wait=True)
        assert (await server.ask()).draw == 2


async def checkpoints_told(server: Served) -> list[tuple[int | None, str]]:
    """The steps and the address of each, as the events have them."""
    events = [e for e in await server.service.events(0, 100) if e.kind == "checkpoint"]
    assert all(event.message and event.data["address"] in event.message for event in events)
    return [(event.step, event.data["address"]) for event in events]


async def test_checkpoints_by_name_outlive_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "checkpoints" / f"{atomic_files.BUILDING}kept-1-1"

    def leave_unfinished(point: str) -> None:
        """As a server that is killed before the checkpoint has its name."""
        if point == "folder:kept:before":
            (building,) = unfinished.parent.iterdir()
            shutil.copytree(building, unfinished)

    monkeypatch.setattr(atomic_files, "on_write", leave_unfinished)
    async with served(tmp_path) as server:
        run = await server.start(save_total_limit=1)
        await server.round(0)
        assert await checkpoints_told(server) == []
        saved = await server.service.save_checkpoint("kept", ME)
        assert (saved.run_id, saved.step, saved.address) == (run, 1, "kept")
        assert await checkpoints_told(server) == [(1, f"{run}@1"), (1, "kept")]
        await expect_refusal("checkpoint_exists", server.service.save_checkpoint("kept", ME))
        await server.round(1)
        assert await checkpoints_told(server) == [(1, f"{run}@1"), (1, "kept"), (2, f"{run}@2")]
        listed = (await server.service.checkpoints()).checkpoints
        assert {each.address for each in listed} >= {"kept", f"{run}@2"}
        assert [each.name for each in listed if each.name] == ["kept"]
        await expect_refusal(
            "unknown_checkpoint", server.start(resume_from=f"{run}@7", replace=True)
        )
        again = await server.start(resume_from="kept", replace=True)
        assert again != run
        assert unfinished.is_dir()
    async with served(tmp_path):
        assert not unfinished.exists()


@pytest.mark.parametrize(("source", "old", "new", "size"), [
    ("run", {"training_batch_size": 2}, {"groups_per_step": 3}, 3),
    ("kept", {"groups_per_step": 2}, {"gradient_accumulation_steps": 3}, 3),
    ("automatic", {"training_batch_size": 2}, {"groups_per_step": None}, 2),
    ("run", {"training_batch_size": 2}, {"gradient_accumulation_steps": 2}, 4),
])  # fmt: skip
async def test_a_setting_that_is_given_again_replaces_what_said_the_same(
    source: str, old: dict[str, int], new: dict[str, int], size: int, tmp_path: Path
) -> None:
    plain = {key: value for key, value in SETTINGS.items() if key != "groups_per_step"}
    async with served(tmp_path) as server:
        first = await server.service.start(StartRequest.model_validate({**plain, **old}), ME)
        await server.service.save_checkpoint("kept", ME)
        await server.service.stop()
        names = {"run": first.run_id, "automatic": f"{first.run_id}@0"}
        request = StartRequest.model_validate({"resume_from": names.get(source, source), **new})
        assert (await server.service.start(request, ME)).groups_per_step == size


async def test_settings_that_cannot_be_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("model_not_allowed", {"model_id": "/etc"}),
        ("model_not_allowed", {"model_id": "../secret"}),
        ("invalid_request", {"algorithm": "no_such"}),
        ("settings_conflict", {"num_completions_per_prompt": 1}),
    ]
    broken = Fault("open", "raise", message="there is no room for the model")
    async with served(tmp_path, [broken]) as server:
        for code, settings in wrong:
            await expect_refusal(code, server.start(**settings))
        await expect_refusal("not_started", server.service.tokenizer())
        await expect_refusal("not_started", server.service.open_version(None))
        assert (await server.service.stop()).run_id is None
        assert not (tmp_path / "runs").exists()
        refusal = await expect_refusal("engine_failed", server.start())
        assert "no room for" in refusal.detail
        assert (await server.service.status()).phase == "idle"


async def test_refused_completion_requests_name_the_field(tmp_path: Path) -> None:
    too_long, fields = "a" * 600, {"prompt": "a"}
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": too_long}, "prompt_too_long", "prompt"),
        ({"prompts": ["a", too_long]}, "prompt_too_long", "prompts.1"),
        ({**fields, "prompt_tokens": [1, 2]}, "tokenizer_mismatch", "prompt_tokens"),
        ({**fields, "tokenizer_hash": "another"}, "tokenizer_mismatch", "tokenizer_hash"),
        ({**fields, "max_completion_length": 7}, "invalid_request", "max_completion_length"),
        ({**fields, "min_completion_length": 7}, "invalid_request", "min_completion_length"),
    ]
    async with served(tmp_path) as server:
        await server.start()
        for body, code, field in wrong:
            completing = server.service.completions(CompletionsRequest.model_validate(body), ME)
            refusal = await expect_refusal(code, completing)
            assert [error.field for error in refusal.errors] == [field]


async def test_a_run_that_has_all_its_steps_is_continued_only_for_more(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        run = await server.start(max_steps=1)
        await server.round(0)
        await server.until(lambda status: status.phase == "finished")
        refusal = await expect_refusal(
            "settings_conflict", server.start(resume_from=run, max_steps=1)
        )
        assert refusal.errors[0].field == "max_steps"
        await expect_refusal("finished", server.ask())
        assert await server.start(resume_from=run, max_steps=2) == run
        await server.round(1)


async def test_the_log_has_the_seconds_of_the_step_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    durations = iter((85.0, 23.0, 24.0))
    learn = fake_engine._learn  # pyright: ignore[reportPrivateUsage]

    async def learn_slowly(*arguments: Any) -> tuple[dict[str, float], bool]:
        metrics, changed = await learn(*arguments)
        return {**metrics, "time/step": next(durations)}, changed

    monkeypatch.setattr(fake_engine, "_learn", learn_slowly)
    async with served(tmp_path) as server:
        await server.start()
        for step in range(3):
            await server.round(step)
    lines = [message for message in caplog.messages if "reward" in message]
    assert [line.split()[-2] for line in lines] == ["85.0", "23.0", "24.0"]


async def test_a_run_is_known_after_the_server_was_killed_and_its_folder_moved(
    tmp_path: Path,
) -> None:
    server = Served(tmp_path / "here")
    await server.service.begin()
    run = await server.start()
    await server.round(0)
    group, tokenizer = await server.ask(), await server.service.tokenizer()
    await server.kill()
    (tmp_path / "here").rename(tmp_path / "there")
    async with served(tmp_path / "there") as server:  # its engine is about to be begun
        assert (await server.reward(group)).model_version == (run, 1)
        await server.until(lambda seen: seen.phase == "running")
        stopped = await server.service.stop()
    async with served(tmp_path / "there") as server:
        assert await server.service.tokenizer() == tokenizer
        assert await server.service.stop() == stopped
        assert await server.start(resume_from=run) == run
        assert (await server.service.status()).step == 1
    assert not (tmp_path / "here").exists()


class OnceUnable(Served):
    """The second engine that it begins cannot open a run."""

    async def _engine(self) -> FakeEngine:
        self._faults = (Fault("open", "raise"),) if len(self.engines) == 1 else ()
        return await super()._engine()


async def test_a_start_that_fails_leaves_the_run_that_it_was_to_replace(tmp_path: Path) -> None:
    server = OnceUnable(tmp_path)
    await server.service.begin()
    first = await server.start(run_name="first")
    await server.round(0)
    group = await server.ask(draw=2)
    starting = asyncio.create_task(server.start(run_name="second", replace=True))
    await server.until(lambda seen: seen.phase == "stopping")
    assert (await expect_refusal("engine_recovering", server.ask(draw=3))).kind.retry
    assert (await server.reward(group)).status == "accepted"
    await expect_refusal("engine_failed", starting)
    status = await server.until(lambda seen: seen.phase == "running")
    assert (status.run_id, status.step) == (first, 1)
    assert (await server.reward(await server.ask(draw=3), wait=True)).status == "trained"
    kinds = {event.kind for event in await server.service.events(0, 100)}
    assert not kinds & {"stopped", "failed"}
    second = await server.start(run_name="second", replace=True)
    event_kinds = [(each.kind, each.run_id) for each in await server.service.events(0, 100)]
    assert event_kinds[-2:] == [("stopped", first), ("started", second)]
    assert (await server.service.status()).run_id == second
    await server.service.shut_down(5)
    await server.ledger.close()


async def test_a_request_that_waits_for_a_step_is_answered_if_the_run_is_replaced(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        await server.start(run_name="first")
        waiting = asyncio.create_task(server.reward(await server.ask(), wait=True, timeout=60))
        await server.until(lambda seen: seen.counters.rewarded == 1)
        await server.start(run_name="second", replace=True)
        assert (await asyncio.wait_for(waiting, 5)).status == "accepted"


async def test_the_engine_never_receives_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.start()
        messages = [{"role": "user", "content": "a" * (4 << 20)}]
        calls = [{"function": {"name": "f", "arguments": "{}"}}] * 100_000
        called = [{"role": "assistant", "content": None, "tool_calls": calls}]
        for prompt in ("a" * (4 << 20), messages, called):
            request = CompletionsRequest.model_validate({"prompt": prompt})
            await expect_refusal("prompt_too_long", server.service.completions(request, ME))
        assert server.engines[0].calls["sample"] == 0
