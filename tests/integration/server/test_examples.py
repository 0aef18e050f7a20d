"""The examples that are clients, with a real server: each model visibly learns what its client rewards.

1. The reward that an example prints at its end is near 1, and far above the first one.
2. Where another run is active, an example stops nobody's training: it ends, and says what to do; nobody at the address is told at once.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import sub
from pathlib import Path
from statistics import fmean
from typing import Any

import openai
import pytest

from groupwise.api.client import TrainingClient
from groupwise.runs.store import Store
from tests.integration.server.server_process import Server, running
from tests.processes import TIMEOUT_S, wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("examples") / "output") as process:
        yield process


@contextmanager
def begun(program: str, url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is gone afterwards."""
    words = [sys.executable, str(EXAMPLES / program), *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "GROUPWISE_URL": url}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def run(program: str, url: str, *options: str) -> list[str]:
    """What it prints by the time that it has learnt."""
    with begun(program, url, *options) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return output.splitlines()


def test_a_running_training_is_left_alone_and_a_missing_server_is_reported_at_once(
    server: Server,
) -> None:
    with TrainingClient(server.url) as client:
        theirs = client.start(replace=True, run_name="somebody-elses")
        with begun("06_alphabetical/client.py", server.url) as process:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, client.status().run_id) == (1, theirs.run_id)
        client.stop()
    assert ("Stop it first" in errors, "Traceback" in errors) == (True, False)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        nowhere = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with begun("06_alphabetical/client.py", nowhere) as process:
        assert process.stderr is not None
        assert f"Nothing listens at {nowhere}" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in errors


@pytest.mark.parametrize("example", ["06_alphabetical", "07_asterisk"])
def test_the_reward_rises(example: str, server: Server) -> None:
    last = run(f"{example}/client.py", server.url)[-1]
    rewards = re.fullmatch(r"reward (\d\.\d\d) \S+ (\d\.\d\d)", last)
    assert rewards, last
    assert (float(rewards[1]) < 0.3, float(rewards[2]) > 0.9) == (True, True), last


def test_an_agent_of_the_openai_client_learns(server: Server) -> None:
    first, *lines = run("08_openai_agent/agent.py", server.url)
    assert first.startswith("run openai-agent")
    rewards = [float(line.split()[-1]) for line in lines]
    assert (rewards[0] < 0.2, rewards[-1] > 0.8) == (True, True), rewards


def test_the_agent_with_a_tool_asks_before_and_after_its_steps(server: Server) -> None:
    lines = run("08_openai_agent/tool_agent.py", server.url, "--model", "tiny", "--steps", "2")
    assert [line.split()[0] for line in lines] == ["held-out", "step", "step", "held-out"]


@pytest.mark.timeout(300)  # a real model is loaded
def test_an_agent_with_a_tool_is_trained_on_exactly_what_was_sampled(server: Server) -> None:
    """With more conversations in its messages than the example has, so that half of the attempts call the tool from the first step on."""
    example = runpy.run_path(str(EXAMPLES / "08_openai_agent/tool_agent.py"))
    example["DEMONSTRATED"] += example["TRAINING"][:2]
    agent: Any = example["agent"]

    def attempt(number: int) -> None:
        metadata = {"trajectory": str(number), "group": "soap"}
        agent(client, "soap", store=True, metadata=metadata)
        training.reward_trajectory(str(number), float(number))

    with (
        TrainingClient(server.url) as training,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        ThreadPoolExecutor(8) as threads,
    ):
        run_id = training.start(
            model_id="smollm2-135m-instruct",
            max_steps=1,
            staleness=0,
            max_prompt_length=1024,
            max_completion_length=40,
        ).run_id
        list(threads.map(attempt, range(8)))
        wait_until(lambda: training.status().phase == "finished", "the step")
    with Store.open(server.folder / f"runs/{run_id}/run.db", readonly=True) as store:
        [group] = store.groups(0)
    rows_with_results = 0
    for rollout in group.rollouts:
        rows_with_results += any(part.source == "environment" for part in rollout.segments)
        for part in rollout.segments:
            if part.source == "policy":  # the learner saw what the sampler saw
                assert part.learner_logprobs is not None
                assert part.sampling_logprobs is not None
                gaps = map(sub, part.learner_logprobs, part.sampling_logprobs)
                assert fmean(map(abs, gaps)) < 0.05  # both compute in bfloat16
    assert rows_with_results, "the messages show how to call the tool"
