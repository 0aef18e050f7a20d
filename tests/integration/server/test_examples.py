"""The examples that are clients, beside a real server: each model visibly learns what its client rewards.

1. `in_order` and `asterisks` are 1 for what is wanted, and lower for anything else.
2. The reward that an example prints at its end is near 1, and far above the first one.
3. Where another run is active, an example stops nobody's training: it ends, and says what to do.
4. One that is interrupted stops its own run, so that it can be begun again; nobody at the address is told at once.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from groupwise.client import TrainingClient
from tests.integration.server.running import Server, running

EXAMPLES = Path(__file__).parents[3] / "examples"
CLIENTS = ("06_alphabetical", "07_asterisk")
LIMIT = 60.0
"""Seconds in which an example has learnt."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("examples") / "output") as found:
        yield found


def run(example: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example / "client.py")],
        env={**os.environ, "GROUPWISE_URL": url},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@contextmanager
def begun(program: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / program)],
        env={**os.environ, "GROUPWISE_URL": url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def names_of(example: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / example / "client.py"))


def test_letters_in_order_earn_1() -> None:
    in_order = names_of("06_alphabetical")["in_order"]
    wanted, backwards, digits, short = in_order(
        ["abcdefghijklmnop", "ponmlkjihgfedcba", "0123456789012345", "abc"]
    )
    assert (wanted, backwards, digits) == (1, 0, 0)
    assert 0 < short < 0.2


def test_asterisks_alone_earn_1() -> None:
    asterisks = names_of("07_asterisk")["asterisks"]
    assert asterisks(["*" * 16, "*" * 8, "a" * 16, ""]) == [1, 0.5, 0, 0]


@pytest.mark.parametrize("example", CLIENTS)
def test_the_reward_rises(example: str, server: Server) -> None:
    ended = run(example, server.url)
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"reward (\d\.\d\d) \S+ (\d\.\d\d)", ended.stdout.splitlines()[-1])
    assert found, ended.stdout
    first, last = float(found[1]), float(found[2])
    assert first < 0.3
    assert last > 0.9


@pytest.mark.parametrize("example", CLIENTS)
def test_a_training_that_is_under_way_is_left_alone(example: str, server: Server) -> None:
    with TrainingClient(server.url) as client:
        begun = client.start(replace=True, run_name="somebody-elses")
        ended = run(example, server.url)
        assert ended.returncode == 1
        assert "Stop it first" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert client.status().run_id == begun.run_id
        client.stop()


@pytest.mark.parametrize("program", ["06_alphabetical/client.py", "08_openai_agent/agent.py"])
def test_one_that_is_interrupted_can_be_begun_again(program: str, server: Server) -> None:
    with TrainingClient(server.url) as client:
        for _ in range(2):
            before = client.status().run_id
            with begun(program, server.url) as process:
                await_step(client, before)
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=LIMIT)
            assert process.returncode == 1
            assert "Stopped; what was learnt" in said
            assert "Traceback" not in said
            assert client.status().phase == "stopped"


def await_step(client: TrainingClient, before: str | None) -> None:
    """Of a run that comes after this one."""
    deadline = time.monotonic() + LIMIT
    while (status := client.status()).run_id == before or not status.step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nobody_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        nowhere = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with begun("06_alphabetical/client.py", nowhere) as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        assert f"{nowhere} does not answer" in told
        assert "Trying again for up to" in told
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT)
    assert "Traceback" not in said


def test_an_agent_of_the_openai_client_learns(server: Server) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "08_openai_agent" / "agent.py")],
        env={**os.environ, "GROUPWISE_URL": server.url},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rewards = [float(line.split()[-1]) for line in ended.stdout.splitlines()]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8
