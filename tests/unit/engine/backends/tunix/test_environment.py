"""The location of Tunix's environment, and the messages if it is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupwise.core import virtual_environments
from groupwise.core.errors import RunError, UsageError
from groupwise.engine.backends.tunix import environment
from groupwise.engine.backends.tunix.environment import LOCK, MADE, VARIABLE, home, install, python


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(environment, "of_this_machine", lambda: "cpu")


class Pip:
    """Installs nothing, or fails."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.words: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    def __call__(
        self, words: list[str], environment: dict[str, str], show: object
    ) -> tuple[int, str]:
        self.words.append(words)
        self.environments.append(environment)
        return self.code, "no network, says pip"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    made = Pip()
    monkeypatch.setattr(virtual_environments, "run_installer", made)
    return made


def test_a_missing_environment_is_reported_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine, kind in (("tpu", "tpu"), ("gpu", "cuda"), ("cpu", "cpu")):
        monkeypatch.setattr(environment, "of_this_machine", lambda machine=machine: machine)
        told = rf"groupwise fetch-tunix --accelerator {kind}"
        with pytest.raises(UsageError, match=told) as error:
            python()
        assert str(home()) in str(error.value)
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert python() == Path(sys.executable)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no such file"):
        python()


def test_it_is_made_once_with_what_the_device_needs_and_again_for_another_version(
    pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/another")
    made = install("tpu", say=False)
    assert made == python()
    assert home() in made.parents
    assert pip.words[-1][-1] == "jax[tpu]"
    assert str(made) in pip.words[-1]
    count = len(pip.words)
    assert (install("tpu", say=False), len(pip.words)) == (made, count)
    assert all("PYTHONPATH" not in each for each in pip.environments)

    told = json.loads((home() / MADE).read_bytes())
    (home() / MADE).write_text(json.dumps({**told, "requirements": "before"}))
    with pytest.raises(UsageError, match=r"another .*tunix --accelerator tpu"):
        python()
    assert install(say=False) == python() != made
    assert pip.words[-1][-1] == "jax[tpu]"
    assert {each.name for each in home().iterdir()} == {LOCK, MADE, python().parent.parent.name}


def test_a_failed_rebuild_leaves_the_previous_environment(pip: Pip) -> None:
    pip.code = 1
    with pytest.raises(UsageError, match="no network"):
        install("cpu", say=False)
    with pytest.raises(UsageError, match="there is none"):
        python()
    pip.code = 0
    before = install("cpu", say=False)
    pip.code = 1
    with pytest.raises(UsageError, match="no network"):
        install(anew=True, say=False)
    with pytest.raises(UsageError, match="no network"):
        install("tpu", say=False)
    assert python() == before
    assert before.is_file()
    pip.code = 0
    for content in ("", "[]", '{"requirements": '):
        (home() / MADE).write_text(content)
        with pytest.raises(UsageError, match="there is none"):
            python()
        assert install("cpu", say=False) == python()


def test_two_make_it_one_after_the_other(pip: Pip, caplog: pytest.LogCaptureFixture) -> None:
    """The second waits, and takes what the first has made."""
    with ThreadPoolExecutor(1) as other:
        with virtual_environments.exclusive(home()):
            waits = other.submit(install, "cpu", say=False)
            while "waiting for it" not in caplog.text:
                assert not waits.done()
            assert not pip.words
        assert waits.result() == python()


class Worker:
    """Answers what it was told to, or not at all."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.waited: list[float] = []

    def __call__(self, threads: int | None, mesh: tuple[int, int]) -> Worker:
        return self

    def begin(self, do: Any) -> Worker:
        return self

    def result(self, seconds: float) -> Any:
        self.waited.append(seconds)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"tunix": "0", "jax": "0", "platform": answer, "devices": 1, "device": answer}

    def last_output(self) -> str:
        return " Waiting for other hosts."

    def close(self) -> None:
        """It has no process."""


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    """Workers that answer so."""
    monkeypatch.setenv(VARIABLE, sys.executable)

    def make(*answers: Any) -> Worker:
        environment._look_once.cache_clear()
        worker = Worker(*answers)
        monkeypatch.setattr(environment, "start_worker", worker)
        return worker

    return make


def test_devices_that_do_not_open_are_reported_and_not_waited_for_for_ever(
    answering: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = answering(TimeoutError(), TimeoutError())
    with pytest.raises(UsageError, match=r"300 s.*other hosts\."):
        environment.query_worker()
    assert "devices after 20 s" in caplog.text
    assert sum(worker.waited) == environment.MAX_SECONDS
    answering(RunError("No module named 'jax'"))
    with pytest.raises(UsageError, match=r" --again .* module named 'jax'"):
        environment.query_worker()


def test_jax_is_told_to_open_what_the_environment_is_for(
    pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "WorkerProcess", lambda python, given: given)

    def told(
        name: str = "JAX_PLATFORMS", threads: int | None = None, mesh: tuple[int, int] = (1, 1)
    ) -> str | None:
        given: Any = environment.start_worker(threads, mesh)
        return given.get(name)

    install("tpu", say=False)
    assert told() == "tpu,cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert told() is None
    monkeypatch.delenv("JAX_PLATFORMS")
    install("cpu", say=False)
    assert told() is None
    asked = ((None, (1, 1)), (1, (1, 1)), (6, (2, 1)), (16, (1, 2)))
    assert [told("NPROC", *each) for each in asked] == [None, "1", "8", "16"]
    repeatable = "--xla_gpu_deterministic_ops=true"
    assert repeatable not in str(told("XLA_FLAGS"))
    (home() / MADE).unlink()
    monkeypatch.setenv(VARIABLE, sys.executable)
    monkeypatch.setattr(environment, "of_this_machine", lambda: "gpu")
    assert repeatable in str(told("XLA_FLAGS"))
