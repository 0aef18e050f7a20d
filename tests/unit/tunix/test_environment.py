"""Where Tunix's environment is, and what is said where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.tunix import environment
from groupwise.tunix.environment import LOCK, MADE, VARIABLE, home, install, python


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

    def __call__(self, words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        self.words.append(words)
        if "-r" in words:
            self.environments.append(more["env"])
        failed = self.code if "-r" in words else 0
        return subprocess.CompletedProcess(words, failed, "", "no network, says pip")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    made = Pip()
    monkeypatch.setattr(environment.subprocess, "run", made)
    return made


@pytest.mark.parametrize(("machine", "kind"), [("tpu", "tpu"), ("gpu", "cuda"), ("cpu", "cpu")])
def test_without_one_it_is_said_how_to_make_it(
    machine: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "of_this_machine", lambda: machine)
    with pytest.raises(UsageError, match=f"groupwise fetch-tunix --accelerator {kind}") as error:
        python()
    assert str(home()) in str(error.value)


def test_one_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert python() == Path(sys.executable)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no such file"):
        python()


def test_it_is_made_with_what_the_device_needs(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/another")
    made = install("tpu", say=False)
    assert made == python()
    assert home() in made.parents
    assert pip.words[-1][-1] == "jax[tpu]"
    assert str(made) in pip.words[-1]
    assert all("PYTHONPATH" not in each for each in pip.environments)


def test_it_is_made_once(pip: Pip) -> None:
    made = install("cpu", say=False)
    count = len(pip.words)
    assert install("cpu", say=False) == made
    assert len(pip.words) == count


def test_one_of_another_version_is_made_anew_for_the_same_devices(pip: Pip) -> None:
    before = install("tpu", say=False)
    told = json.loads((home() / MADE).read_bytes())
    (home() / MADE).write_text(json.dumps({**told, "requirements": "before"}))
    with pytest.raises(UsageError, match=r"another version.*fetch-tunix --accelerator tpu"):
        python()
    assert install(say=False) == python() != before
    assert pip.words[-1][-1] == "jax[tpu]"
    assert sorted(each.name for each in home().iterdir()) == sorted(
        [LOCK, MADE, python().parent.parent.name]
    )


def test_where_nobody_says_it_is_for_this_machine(
    pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "of_this_machine", lambda: "gpu")
    install(say=False)
    assert pip.words[-1][-1] == "jax[cuda13]"


def test_one_that_was_cut_off_is_none(pip: Pip) -> None:
    pip.code = 1
    with pytest.raises(UsageError, match="no network, says pip"):
        install("cpu", say=False)
    with pytest.raises(UsageError, match="there is none"):
        python()


def test_one_that_cannot_be_made_anew_leaves_the_one_before(pip: Pip) -> None:
    before = install("cpu", say=False)
    pip.code = 1
    with pytest.raises(UsageError, match="no network"):
        install(anew=True, say=False)
    with pytest.raises(UsageError, match="no network"):
        install("tpu", say=False)
    assert python() == before
    assert before.is_file()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"requirements": '])
def test_what_cannot_be_read_counts_as_none(content: str, pip: Pip) -> None:
    install("cpu", say=False)
    (home() / MADE).write_text(content)
    with pytest.raises(UsageError, match="there is none"):
        python()
    assert install("cpu", say=False) == python()


def test_two_make_it_one_after_the_other(pip: Pip, caplog: pytest.LogCaptureFixture) -> None:
    """The second waits, and takes what the first has made."""
    with ThreadPoolExecutor(1) as other:
        with environment._alone():
            waits = other.submit(install, "cpu", say=False)
            while "waiting for it" not in caplog.text:
                assert not waits.done()
            assert not pip.words
        assert waits.result() == python()


@pytest.mark.parametrize(("machine", "word"), [("tpu", "TPU"), ("gpu", "GPU")])
def test_a_cpu_beside_something_faster_is_warned_of(
    machine: str, word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.warn_of_cpu("cpu")
    monkeypatch.setattr(environment, "of_this_machine", lambda: machine)
    environment.warn_of_cpu(machine)
    assert not caplog.text
    environment.warn_of_cpu("cpu")
    assert f"has a {word}, but JAX sees its CPU alone" in caplog.text
    caplog.clear()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    environment.warn_of_cpu("cpu")
    assert not caplog.text


@pytest.mark.parametrize(
    ("threads", "mesh", "told"),
    [
        (None, (1, 1), None),
        (1, (1, 1), "1"),
        (6, (1, 1), "6"),
        (6, (2, 1), "8"),
        (16, (1, 2), "16"),
    ],
)
def test_threads_are_those_of_xla(
    threads: int | None, mesh: tuple[int, int], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    monkeypatch.setattr(environment, "WorkerProcess", lambda python, given: given)
    given: Any = environment.start_worker(threads, mesh)
    assert given.get("NPROC") == told


@pytest.mark.parametrize("machine", ["gpu", "cpu"])
def test_sums_on_a_gpu_are_repeatable(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    monkeypatch.setattr(environment, "of_this_machine", lambda: machine)
    monkeypatch.setattr(environment, "WorkerProcess", lambda python, given: given)
    given: Any = environment.start_worker(None, (1, 1))
    assert ("--xla_gpu_deterministic_ops=true" in given["XLA_FLAGS"]) == (machine == "gpu")


def test_what_it_holds_is_pinned() -> None:
    lines = environment.REQUIREMENTS.read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all("==" in line for line in pinned)
    assert "google-tunix==0.1.7" in pinned
