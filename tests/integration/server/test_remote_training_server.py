"""`groupwise rl`, `sft` and `eval` with `run.server`: the loop here, sampler and learner in the engine of a real server.

1. The run is the one that this machine would have made: record, weights and results are equal to the bit.
2. What dies (engine, server, loop) costs no more than the steps since the last checkpoint, and the run ends as it would have: by itself,
   but where the loop died.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import groupwise
from groupwise.api.client import TrainingClient
from groupwise.api.client.errors import RunActive
from groupwise.core.errors import GroupwiseError, RunError, UsageError
from groupwise.runs.store import Store
from tests.integration import toy_run
from tests.integration.server.server_process import Server, running
from tests.integration.sft_task import __file__ as LESSONS
from tests.integration.toy_run import what_must_be_equal
from tests.processes import wait_until

TOY = str(Path(__file__).parents[1] / "toy_task.py")
STEPS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("served") / "output", "parts_silence=60") as process:
        yield process


def config_of(folder: Path, server: Server | None = None, **more: Any) -> dict[str, Any]:
    settings = toy_run.config(folder, max_steps=STEPS, prompts_per_step=4)
    settings |= {
        "eval": {"max_prompts": 4},
        "run": {"name": "r", "dir": str(folder), "save_steps": 2},
    }
    for section, values in more.items():
        settings[section] = (
            values if values is None else {**(settings.get(section) or {}), **values}
        )
    if server is not None:
        settings["run"]["server"] = server.url
    return settings


def rl(folder: Path, server: Server | None = None, *, resume: bool = False, **more: Any) -> Path:
    return groupwise.rl(config_of(folder, server, **more), TOY, resume=resume).folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run on this machine that nothing happens to."""
    return what_must_be_equal(rl(tmp_path_factory.mktemp("whole")))


WAYS: dict[str, dict[str, Any]] = {
    "two processes, a step ahead": {
        "run": {"processes": 2},
        "training": {"max_off_policy_steps": 1},
        "algorithm": {"beta": 0.1},
    },
    "all weights": {"lora": None, "algorithm": {"beta": 0.1}},
}
SOAK = pytest.mark.soak(suite="server")


@pytest.mark.parametrize(
    "way", ["two processes, a step ahead", pytest.param("all weights", marks=SOAK)]
)
def test_the_run_is_that_of_this_machine(server: Server, tmp_path: Path, way: str) -> None:
    """From weights of this machine, which are sent there."""
    short: dict[str, Any] = {"training": {"max_steps": 1}, "lora": WAYS[way].get("lora", {})}
    first = rl(tmp_path / "first", **short, eval={"before_and_after": False})
    here, there = (
        groupwise.rl(config_of(tmp_path / name, at, **WAYS[way]), TOY, init_from=str(first)).folder
        for name, at in (("here", None), ("there", server))
    )
    expected, remote = what_must_be_equal(here), what_must_be_equal(there)
    assert remote["record"] == expected["record"]
    assert remote["files"].keys() == expected["files"].keys()
    differs = {
        name for name, digest in remote["files"].items() if expected["files"][name] != digest
    }
    assert {Path(name).name for name in differs} <= {"adapter_config.json", "config.json"}
    for path in (there / "final").glob("*config.json"):
        assert "parts" not in path.read_text(), "the server's own place for what was sent"


def test_supervised_runs_and_evaluations_too(server: Server, tmp_path: Path) -> None:
    lessons = {
        "model": {"name": "tiny"},
        "lora": {"r": 4, "alpha": 8},
        "training": {"max_steps": 4, "examples_per_step": 4, "learning_rate": 0.01},
    }
    outcomes: list[tuple[Any, Any]] = []
    for name, url in (("here", None), ("there", server.url)):
        run = {"name": "s", "dir": str(tmp_path / name), "server": url}
        folder = groupwise.sft({**lessons, "run": run}, LESSONS).folder
        at = None if url is None else server
        answered = groupwise.evaluate(
            config_of(tmp_path / name, at), TOY, policy=str(folder)
        ).summary
        del answered["results"]  # its place
        outcomes.append((what_must_be_equal(folder), answered))
    assert outcomes[0] == outcomes[1]


def test_a_killed_engine_or_server_costs_only_the_steps_since_the_checkpoint(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: dict[str, Any]
) -> None:
    """First the engine, before a checkpoint was saved, and then the server."""

    def kill() -> None:
        until_step(tmp_path / "r", 1)
        engine = server.engine()
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        until_step(tmp_path / "r", 3)
        server.kill()
        server.begin()

    killing = threading.Thread(target=kill)
    killing.start()
    run_folder = rl(tmp_path, server)
    killing.join()
    assert what_must_be_equal(run_folder) == whole
    assert "goes on by itself" in caplog.text


def test_a_loop_that_is_killed_continues_at_once(
    server: Server, tmp_path: Path, whole: dict[str, Any]
) -> None:
    broken = tmp_path / "broken"
    words = [f"run.dir={broken}", "run.name=r", f"run.server={server.url}"]
    code = """
import os, signal, sys
from pathlib import Path
import groupwise
from groupwise.runs.store import Store
from tests.integration.server.test_remote_training_server import TOY, config_of

commit = Store.commit_step

def commit_and_die(store, record, *more, **named):
    commit(store, record, *more, **named)
    if record.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Store.commit_step = commit_and_die
groupwise.rl(config_of(Path(".")), TOY, overrides=sys.argv[1:])
"""
    loop = subprocess.run([sys.executable, "-c", code, *words], check=False)
    assert loop.returncode == -signal.SIGKILL
    assert what_must_be_equal(rl(broken, server, resume=True)) == whole


def until_step(run: Path, step: int) -> None:
    """Wait until so many steps are committed."""

    def is_there() -> bool:
        with (
            contextlib.suppress(GroupwiseError, OSError),  # it has not begun
            Store.open(run / "run.db", readonly=True) as store,
        ):
            return len(list(store.steps())) >= step
        return False

    wait_until(is_there, f"step {step} of {run}")


def test_one_loop_at_a_time_has_the_model_until_it_is_taken_away(
    server: Server, tmp_path: Path
) -> None:
    refused: list[BaseException] = []
    owners: list[str | None] = []
    with TrainingClient(server.url) as client:
        client.start(model_id="tiny", replace=True)
        with pytest.raises(UsageError, match=r"run_active.*POST /stop"):
            rl(tmp_path / "refused", server)
        client.stop()

        def meanwhile(completions: list[str], **_: Any) -> list[float]:
            """While the first loop looks at its first rewards."""
            if not refused:
                owners.append(client.status().loop_elsewhere)
                for ask in (
                    lambda: client.start(model_id="tiny"),
                    lambda: rl(tmp_path / "second", server),
                ):
                    with pytest.raises(GroupwiseError) as raised:
                        ask()
                    refused.append(raised.value)
                match = re.search(r"DELETE (/parts/[\w-]+)", str(refused[-1]))
                assert match
                httpx2.delete(f"{server.url}{match[1]}").raise_for_status()
            return [0.0] * len(completions)

        settings = config_of(tmp_path / "first", server, eval={"before_and_after": False})
        with pytest.raises(RunError, match=r"parts_taken.*closed"):
            groupwise.rl(settings, Task(meanwhile))
    assert [type(error) for error in refused] == [RunActive, UsageError]
    assert (owners[0] or "").startswith("r (")
    assert not (tmp_path / "refused").exists()
    assert not (tmp_path / "second" / "r").exists()


class Task:
    """The toy task with other rewards."""

    def __init__(self, reward: Callable[..., list[float]]) -> None:
        self._reward = reward

    def get_rl_dataset(self, config: Any) -> Any:
        return [{"prompt": f"write {letter}:"} for letter in "abcdefgh"]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> Any:
        return [self._reward]
