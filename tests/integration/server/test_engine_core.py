"""The engine takes the very steps of `groupwise rl`, and takes them again after it was killed."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core.errors import UsageError
from groupwise.core.types import Group, LogitsProcessing, Row
from groupwise.engine.models import tokens
from groupwise.engine.sampler import json_schemas
from groupwise.engine.sampler.native.engine import NativeEngine
from groupwise.runs.folder import read_state
from groupwise.runs.records import WarningRecord
from groupwise.runs.store import Store
from groupwise.server.engine import core, hosted_parts
from groupwise.server.engine.core import EngineCore
from groupwise.server.engine.engine_protocol import (
    EngineLost,
    GroupSampleRequest,
    InvalidSampleRequest,
    OpenModels,
    OpenParts,
    OpenRun,
    Plan,
    StepDone,
    scored_group,
)
from groupwise.server.engine.hosted_parts import EngineParts
from groupwise.tasks.data.reward_hacking import Signals, StepSignals
from groupwise.tasks.openai.sampling import Sampling
from tests.integration import toy_run
from tests.integration.toy_run import STEPS, TOY

LONGEST_PROMPT = 16


def config(runs: Path, name: str) -> dict[str, Any]:
    settings = toy_run.config(runs)
    kept = {key: settings[key] for key in settings.keys() - {"rewards", "eval"}}
    return {**kept, "run": {**settings["run"], "name": name}}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `groupwise rl` to compare with."""
    runs = tmp_path_factory.mktemp("in_process")
    settings = {**config(runs, "toy"), "rewards": {"in_process": True}}
    return groupwise.rl(settings, TOY).folder


async def take(engine: EngineCore, step: int, like: Path) -> tuple[StepDone, list[Group]]:
    """Sample and take the step as it was taken in the other run. Returns its result, and the groups as they were sampled."""
    with Store.open(like / "run.db", readonly=True) as store:
        groups = store.groups(step)
    plan: list[Group] = []
    for group in groups:
        sampled = await engine.sample(GroupSampleRequest(group.draw, group.example.prompt))
        assert [r.completion_ids for r in sampled.group.rollouts] == [
            r.completion_ids for r in group.rollouts
        ]
        assert sampled.step == step
        plan.append(scored_group(sampled.group, [rollout.reward for rollout in group.rollouts]))
    done = await engine.step(Plan(step, tuple(plan)))
    assert done.metrics["time/step"] > done.metrics["time/sampling"] > 0
    assert done.record.draws == tuple(group.draw for group in groups)
    return done, plan


def fingerprints(folder: Path) -> list[str]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [record.fingerprint_out for record in store.steps()]


async def test_it_takes_the_steps_of_the_loop_bit_for_bit(in_process: Path, tmp_path: Path) -> None:
    order = OpenRun(config(tmp_path, "served"), LONGEST_PROMPT)
    engine = EngineCore()
    opened = await engine.open(order)
    assert (opened.run, opened.step, opened.manifests) == ("served", 0, ())
    taken = [await take(engine, step, in_process) for step in range(3)]
    await engine.close()  # as if it had been killed: the checkpoint is that of step 2

    engine = EngineCore()
    opened = await engine.open(replace(order, run="served"))
    assert (opened.step, [each.step for each in opened.manifests]) == (2, [0, 1, 2])
    assert opened.policy.fingerprint == fingerprints(in_process)[1]
    assert opened.inexact is None
    done = await engine.step(Plan(2, tuple(taken[2][1])))
    assert done.policy.fingerprint == taken[2][0].policy.fingerprint
    taken += [await take(engine, step, in_process) for step in range(3, STEPS)]
    assert [each.policy.fingerprint for each, _ in taken] == fingerprints(in_process)
    folder = Path(await engine.close_run(finished=True))
    await engine.close()
    assert (folder / "final" / "adapter_model.safetensors").read_bytes() == (
        in_process / "final" / "adapter_model.safetensors"
    ).read_bytes()


async def test_a_signal_is_in_the_result_of_its_step_and_no_second_warning_in_the_log(
    in_process: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begins = StepSignals({}, (WarningRecord(1, "length", "begins", "they grow", {}),))
    monkeypatch.setattr(Signals, "observe", lambda *_: begins)
    engine = EngineCore()
    await engine.open(OpenRun(config(tmp_path, "served"), LONGEST_PROMPT))
    done, _ = await take(engine, 0, in_process)
    await engine.close()
    (warning,) = done.warnings
    assert "signal length: they grow" in warning
    assert f"runs rollouts served --dir {tmp_path}" in warning
    assert [each.levelname for each in caplog.records if "they grow" in each.getMessage()] == [
        "INFO"
    ]


def frees_cache(monkeypatch: pytest.MonkeyPatch, module: Any, freed: Callable[[], None]) -> None:
    """As on a GPU whose memory is short: calls `freed` when keys and values are."""
    choose, free = module.training_layout, NativeEngine.free_cache

    def free_cache(engine: NativeEngine) -> None:
        freed()
        free(engine)

    monkeypatch.setattr(
        module, "training_layout", lambda *given: replace(choose(*given), frees_cache=True)
    )
    monkeypatch.setattr(NativeEngine, "free_cache", free_cache)


async def test_sampling_waits_while_a_step_uses_the_memory_of_the_kv_cache(
    in_process: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitting: list[bool] = []
    engine = EngineCore()
    frees_cache(monkeypatch, core, lambda: admitting.append(engine._loaded_run.run.gate.is_open))
    await engine.open(OpenRun(config(tmp_path, "served"), LONGEST_PROMPT))
    taken = [(await take(engine, step, in_process))[0].policy.fingerprint for step in range(2)]
    assert taken == fingerprints(in_process)[:2]
    assert admitting == [False, False]
    assert engine._loaded_run.run.gate.is_open
    await engine.close()


async def test_parts_of_a_loop_elsewhere_free_keys_and_values(tmp_path, monkeypatch) -> None:
    freed: list[int] = []
    frees_cache(monkeypatch, hosted_parts, lambda: freed.append(1))
    settings = config(tmp_path, "elsewhere")
    order = OpenParts("training", settings, "r", str(tmp_path), LONGEST_PROMPT)
    async with AsyncExitStack() as scope:
        parts = EngineParts(scope)
        opened = await parts.open(order)
        assert opened.layout["frees_cache"]
        await parts.logprobs([Row((5, 6), (7, 8), (1, 1), (-1.0, -1.0), 0.0, 1.0)], "policy")
    assert freed == [1]


@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
async def test_the_initial_weights_may_be_deleted_after_the_start(
    source: str, in_process: Path, tmp_path: Path
) -> None:
    place = tmp_path / source
    adapter = source == "adapter"
    shutil.copytree(in_process / ("final" if adapter else "checkpoints/step-4"), place)
    settings = config(tmp_path / "runs", "served")
    if adapter:
        settings["model"]["adapter"] = str(place)
    order = OpenRun(settings, LONGEST_PROMPT, start_from=None if adapter else str(place))
    engine = EngineCore()
    opened = await engine.open(order)
    assert opened.step == 0
    assert opened.policy.fingerprint == fingerprints(in_process)[-1 if adapter else 3]
    await engine.close()
    shutil.rmtree(place)
    engine = EngineCore()
    again = await engine.open(replace(order, start_from=None, run="served"))
    assert again.policy.fingerprint == opened.policy.fingerprint
    await engine.close()


async def test_a_failed_open_has_its_own_code_and_leaves_no_files(
    tmp_path: Path,
) -> None:
    engine = EngineCore()
    for changes, message in (
        ({"algorithm": {"type": "dapo"}}, "only the client can"),
        ({"training": {"prompts_per_step": 0}}, "prompts_per_step"),
        ({"model": {"name": "no-such-model"}}, "no-such-model"),
    ):
        with pytest.raises(UsageError, match=message):
            await engine.open(OpenRun({**config(tmp_path, "served"), **changes}, LONGEST_PROMPT))
    assert not (tmp_path / "served").exists()
    settings = {**config(tmp_path, "served"), "lora": None}
    await engine.open(OpenRun(settings, LONGEST_PROMPT))
    with pytest.raises(UsageError, match="all weights") as alone:
        await engine.models.open(OpenModels("tiny", str(tmp_path / "models"), 2, 64))
    assert alone.value.code == "full_fine_tuning"
    await engine.close_run(finished=False)
    await engine.close()
    assert read_state(tmp_path / "served") == "stopped"
    other = {**settings, "training": {**settings["training"], "seed": 4}}
    with pytest.raises(UsageError, match="seed") as differs:
        await EngineCore().open(OpenRun(other, LONGEST_PROMPT, run="served"))
    assert differs.value.code == "resume_mismatch"


async def test_a_group_is_sampled_by_one_policy(in_process: Path, tmp_path: Path) -> None:
    """New weights wait for completions that are under way, and those that come meanwhile for the weights."""
    settings = config(tmp_path, "served")
    settings["sampler"]["max_completion_length"] = 40
    engine = EngineCore()
    await engine.open(OpenRun(settings, LONGEST_PROMPT))
    with Store.open(in_process / "run.db", readonly=True) as store:
        groups = store.groups(0)
    drawn = [
        await engine.sample(GroupSampleRequest(each.draw, each.example.prompt)) for each in groups
    ]
    plan = [
        scored_group(one.group, [rollout.reward for rollout in group.rollouts])
        for one, group in zip(drawn, groups, strict=True)
    ]
    step = asyncio.create_task(engine.step(Plan(0, tuple(plan))))
    requests: list[asyncio.Task[Any]] = []
    while not step.done():
        if sum(not each.done() for each in requests) < 8:
            order = GroupSampleRequest(100 + len(requests), "write a")
            requests.append(asyncio.create_task(engine.sample(order)))
        await asyncio.sleep(0)
    await step
    for sampled in await asyncio.gather(*requests):
        segments = [r.segments[0] for r in sampled.group.rollouts]
        policies = {(s.policy_version, s.fingerprint) for s in segments}
        assert policies == {(sampled.version, sampled.fingerprint)}
    await engine.close()


async def test_the_first_schema_finds_the_vocabulary_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineCore()
    await engine.open(OpenRun(config(tmp_path, "served"), LONGEST_PROMPT))
    monkeypatch.setattr(json_schemas, "_vocabulary", lambda _: pytest.fail("requests wait for it"))
    sampling = Sampling(processing=LogitsProcessing(json_schema='{"type": "integer"}'))
    await engine.sample(GroupSampleRequest(0, "write a", sampling=sampling, trains=False))
    await engine.close()


async def test_a_long_prompt_is_tokenised_beside_the_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "LONG", len('["ab", {}]'))
    threads: dict[str, bool] = {}
    tokenise = core.first_ids

    def noted(tokenizer: Any, prompt: Any, *rest: Any) -> tuple[int, ...]:
        threads[str(prompt)] = threading.current_thread() is threading.main_thread()
        return tokenise(tokenizer, prompt, *rest)

    monkeypatch.setattr(core, "first_ids", noted)
    engine = EngineCore()
    opened = await engine.open(OpenRun(config(tmp_path, "served"), LONGEST_PROMPT))
    assert opened.longest_prompt_characters >= LONGEST_PROMPT
    long, short = await asyncio.gather(
        *(
            engine.sample(GroupSampleRequest(draw, prompt))
            for draw, prompt in enumerate(("abcde", "ab"))
        )
    )
    assert threads == {"abcde": False, "ab": True}
    assert len(long.group.rollouts[0].prompt_ids) > len(short.group.rollouts[0].prompt_ids)
    user = {"role": "user", "content": "ab"}
    long_text = "a" * opened.longest_prompt_characters
    tool = {"type": "function", "function": {"name": "f", "description": long_text}}
    function = {"name": "f", "arguments": {"a": long_text}}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    monkeypatch.setattr(tokens, "text_ids", lambda *_: pytest.fail("it was tokenised"))
    for messages, columns in (([user], {"tools": [tool]}), ([user, call, user], {})):
        with pytest.raises(InvalidSampleRequest, match="characters") as refused:
            await engine.sample(GroupSampleRequest(2, messages, columns=columns))
        assert refused.value.code == "prompt_too_long"
    await engine.close()
    with pytest.raises(EngineLost):
        await engine.sample(GroupSampleRequest(2, "ab"))
