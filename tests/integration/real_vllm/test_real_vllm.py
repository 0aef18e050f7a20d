"""Runs with the real vLLM: `make test-vllm`. `make soak SUITE=vllm` tests more, and also the oldest release.

1. It draws what it is asked for, under the adapter that was loaded, with the log-probabilities of the learner.
2. A run that is killed goes on by the same server.
3. One of two servers is lost and comes back; a run's own server is killed, and is named with its error if it cannot start; a policy is
   evaluated; all weights are trained.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoModelForCausalLM

import groupwise
from benchmarks.learning import step_values
from groupwise.core.errors import UsageError
from groupwise.core.types import GroupRequest, LogitsProcessing, Row, SamplingParams
from groupwise.engine.models.tiny import tiny_tokenizer
from groupwise.training.callbacks.base import Callback
from tests.integration.real_vllm.real_server import (
    ENVIRONMENT,
    NAME,
    PYTHON,
    RealServer,
    write_model,
)
from tests.integration.toy_run import STEPS, TOY, begun_in_child, config
from tests.processes import all_gone, wait_until
from tests.vllm_pair import disturb, learner_of, server_sampler

TOLERANCE = 0.01
"""Nats between sampler and learner; about 1e-5 are seen in float32."""
LONG = tuple(range(10, 90)) * 2

pytestmark = [
    pytest.mark.timeout(540),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SOAK = pytest.mark.soak(suite="vllm")
NEWEST = pytest.mark.parametrize("python", [PYTHON], indirect=True, ids=["newest"])


def settings(runs: Path, model: Path, **sampler: Any) -> dict[str, Any]:
    made = config(runs)
    made["model"] = {"name": str(model), "dtype": "float32"}
    made["sampler"] = {
        "engine": "vllm", "max_completion_length": 6, "logprob_tolerance": TOLERANCE, **sampler
    }  # fmt: skip
    return made


def check_whole(run: Path) -> None:
    assert len(step_values(run, "reward")) == STEPS
    assert max(step_values(run, "sampling/logprob_gap")) < TOLERANCE
    assert max(step_values(run, "grad_norm")) > 0


@pytest.mark.parametrize("seeded", [True, pytest.param(False, marks=SOAK)])
async def test_it_draws_what_it_is_asked_for_under_the_adapter(server, tmp_path, seeded):
    """Many long prompts at once, too, which a server without a GPU must not divide."""
    base = AutoModelForCausalLM.from_pretrained(server.model)
    learner = learner_of(tmp_path / "published" / "run", base.eval())
    sampler = server_sampler(
        [server.url], learner, base=NAME, key_length=256, tolerance=TOLERANCE, seeded=seeded
    )
    await sampler.serve_base()
    before = (await sampler.prompt_logprobs(LONG, 0)).logprobs
    for version in range(2):
        disturb(learner, 0.02)
        await sampler.load(await learner.publish(version))
    after = (await sampler.prompt_logprobs(LONG, 0)).logprobs
    row = Row(LONG[:1], LONG[1:], (1,) * 159, (0.0,) * 159, 0.0, 1.0)
    (expected,) = await learner.logprobs([row])
    assert after == pytest.approx(expected, abs=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 10 * TOLERANCE

    tokenizer: Any = tiny_tokenizer()
    end = tokenizer.eos_token_id
    for params in (
        SamplingParams(16, stop_token_ids=(end,)),
        SamplingParams(16, 0.0, (end,), min_tokens=8),
        SamplingParams(16, 0.5, (end,), stop=("e",)),
        SamplingParams(16, 1.0, (end,), top_k=5, top_p=0.9),
        SamplingParams(40, 1.0, (end,), processing=LogitsProcessing(json_schema='{"enum": [1]}')),
    ):
        request = GroupRequest(0, LONG[:20], (1, 1 << 63, 3), params)
        found = await sampler.generate(request)
        assert [(each.seed, each.policy_version) for each in found] == [
            (seed, 1) for seed in request.seeds
        ]
        assert all(len(each.token_ids) >= params.min_tokens for each in found)
        if params.temperature == 1.0 and params.processing is None:
            assert len({each.token_ids for each in found}) == 3
    many = [
        GroupRequest(0, LONG[start:], tuple(range(start, start + 8)), SamplingParams(8))
        for start in range(64)
    ]
    drawn = await asyncio.gather(*map(sampler.generate, many))
    rows = [
        Row(each.prompt_ids, one.token_ids, (1,) * 8, one.logprobs, 0.0, 1.0)
        for each, group in zip(many[:4], drawn, strict=False)
        for one in group
    ]
    for row, logprobs in zip(rows, await learner.logprobs(rows), strict=True):
        assert row.sampling_logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    assert server.counter("vllm:prefix_cache_hits_total") > 0, "a group's prompt is read once"
    sampler.close()
    assert server.models() == [NAME]


def test_a_run_that_is_killed_continues(server: RealServer, tmp_path: Path) -> None:
    given = settings(tmp_path, server.model, url=server.url, served_model=NAME)
    run = begun_in_child(lambda: groupwise.rl(given, TOY))
    wait_until((tmp_path / "toy/checkpoints/step-2").exists, "a checkpoint")
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    assert len(server.models()) > 1, "what it left"
    assert groupwise.rl(given, TOY, resume=True).exit_code == 0
    check_whole(tmp_path / "toy")
    assert server.models() == [NAME]


class Loses(Callback):
    """Ends a server after the first step, and begins it again after the second."""

    server: RealServer
    steps = 0

    async def on_step_end(self, *_: Any, **__: Any) -> None:
        # In the main thread: what another thread starts would end with it.
        self.steps += 1
        if self.steps == 1:
            self.server.end()
        elif self.steps == 2:
            self.server.begin()


@SOAK
def test_one_of_two_servers_is_lost_and_comes_back(server, tmp_path, monkeypatch):
    other = RealServer(server.python, server.model, tmp_path)
    other.begin()
    try:
        other.wait()
        monkeypatch.setattr(Loses, "server", other, raising=False)
        given = settings(tmp_path, server.model, url=[server.url, other.url], served_model=NAME)
        given["callbacks"] = [f"{__name__}:Loses"]
        assert groupwise.rl(given, TOY).exit_code == 0
        check_whole(tmp_path / "toy")
        other.wait()
    finally:
        other.end()


class Kills(Callback):
    """The server of the run, once."""

    killed: list[int]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self.killed:
            self.killed += own_servers()
            os.kill(self.killed[0], signal.SIGKILL)


def own_servers() -> list[int]:
    """Servers that a run in this process has started; each listens on a Unix socket."""
    children = [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, line in words.items() if b"--uds=" in line]


@SOAK
def test_the_server_of_a_run_is_killed_and_begun_again(python, model, tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Kills, "killed", [], raising=False)
    given = settings(tmp_path, model, vllm_python=str(python))
    given["callbacks"] = [f"{__name__}:Kills"]
    assert groupwise.rl(given, TOY).exit_code == 0
    check_whole(tmp_path / "toy")
    assert len(Kills.killed) == 1
    assert own_servers() == []
    assert all_gone(Kills.killed)


@SOAK
@NEWEST
def test_all_weights_are_trained_with_a_server_of_the_run(python, tmp_path, monkeypatch):
    """The output head has weights of its own: of tied ones vLLM 0.32 keeps an old copy on a CPU."""
    model = tmp_path / "model"
    write_model(model, tie_word_embeddings=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    given = {**settings(tmp_path, model, vllm_python=str(python)), "lora": None}
    given["training"]["learning_rate"] = 1e-3
    assert groupwise.rl(given, TOY).exit_code == 0
    check_whole(tmp_path / "toy")
    assert own_servers() == []


@SOAK
@NEWEST
def test_all_weights_are_trained_with_a_server_elsewhere(python, tmp_path):
    """It reads files, and gets them again after it was started anew."""
    model = tmp_path / "model"
    write_model(model, tie_word_embeddings=False)
    server = RealServer(python, model, tmp_path, whole=True)
    server.begin()
    try:
        server.wait()
        given = {**settings(tmp_path, model, url=server.url, served_model=NAME), "lora": None}
        given["training"]["learning_rate"] = 1e-3
        assert groupwise.rl(given, TOY).exit_code == 0
        check_whole(tmp_path / "toy")
        version = httpx2.get(f"{server.url}/weight_info").json()["weight_version"]
        assert version.startswith("groupwise-toy-v")
        server.end()
        server.begin()
        server.wait()
        policy = str(tmp_path / "toy")
        assert groupwise.evaluate(given, TOY, policy=policy).rows
    finally:
        server.end()


@SOAK
@NEWEST
def test_a_server_that_cannot_start_is_named_with_its_first_error(python, model, tmp_path):
    given = settings(tmp_path, model, vllm_python=str(python), gpu_memory_utilization=1.0)
    with pytest.raises(UsageError, match=r"ValueError: .*gpu-memory-utilization"):
        groupwise.rl(given, TOY)


@SOAK
def test_a_policy_is_evaluated_as_here(server, tmp_path):
    given = settings(tmp_path, server.model, url=server.url, served_model=NAME)
    given["eval"] = {"temperature": 0.0, "max_prompts": 8}
    there = groupwise.evaluate(given, TOY, policy="base").rows
    given["sampler"] = {"max_completion_length": 6, "max_num_seqs": 8}
    assert there == groupwise.evaluate(given, TOY, policy="base").rows
    assert server.models() == [NAME]
