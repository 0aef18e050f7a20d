"""The examples that are clients, beside a real server: each model visibly learns what its client rewards.

1. The reward that an example prints at its end is near 1, and far above the first one.
2. Where another run is active, an example stops nobody's training: it ends, and says what to do; nobody at the address is told at once.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.client import TrainingClient
from groupwise.runs.store import Store
from tests.integration.server.server_process import Server, running
from tests.processes import TIMEOUT_S

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("examples") / "output") as found:
        yield found


@contextmanager
def begun(program: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is gone afterwards."""
    words = [sys.executable, str(EXAMPLES / program)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "GROUPWISE_URL": url}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def run(program: str, url: str) -> list[str]:
    """What it prints by the time that it has learnt."""
    with begun(program, url) as process:
        said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return said.splitlines()


def test_a_training_that_is_under_way_is_left_alone_and_nobody_there_is_told_at_once(
    server: Server,
) -> None:
    with TrainingClient(server.url) as client:
        theirs = client.start(replace=True, run_name="somebody-elses")
        with begun("06_alphabetical/client.py", server.url) as process:
            _, said = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, client.status().run_id) == (1, theirs.run_id)
        client.stop()
    assert ("Stop it first" in said, "Traceback" in said) == (True, False)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        nowhere = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with begun("06_alphabetical/client.py", nowhere) as process:
        assert process.stderr is not None
        assert f"{nowhere} does not answer" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in said


@pytest.mark.parametrize("example", ["06_alphabetical", "07_asterisk"])
def test_the_reward_rises(example: str, server: Server) -> None:
    last = run(f"{example}/client.py", server.url)[-1]
    found = re.fullmatch(r"reward (\d\.\d\d) \S+ (\d\.\d\d)", last)
    assert found, last
    assert (float(found[1]) < 0.3, float(found[2]) > 0.9) == (True, True), last


def test_an_agent_of_the_openai_client_learns(server: Server) -> None:
    rewards = [float(line.split()[-1]) for line in run("08_openai_agent/agent.py", server.url)]
    assert (rewards[0] < 0.2, rewards[-1] > 0.8) == (True, True), rewards


def test_an_agent_of_several_turns_learns_from_exactly_what_was_sampled(server: Server) -> None:
    lines = run("08_openai_agent/several_turns.py", server.url)
    rewards = [float(line.split()[-1]) for line in lines]
    assert (rewards[0] < 0.2, rewards[-1] > 0.6) == (True, True), rewards
    with TrainingClient(server.url) as client:
        name = client.status().run_id
    with Store.open(server.folder / f"runs/{name}/run.db", readonly=True) as store:
        groups = store.groups(0)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    continued = 0
    for rollout in rollouts:
        first, *between, second = rollout.segments
        assert [part.source for part in between] == ["environment"] * (second.prompt_ids is None)
        continued += second.prompt_ids is None  # else the template trimmed white space of the first
        for part in (first, second):  # the learner saw what the sampler saw
            assert part.learner_logprobs == pytest.approx(part.sampling_logprobs, abs=1e-4)
    assert continued
