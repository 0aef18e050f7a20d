"""Checkpoints evaluated by other processes: how many at once, what is recorded, what is repeated and what is not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.runs import checkpoints
from groupwise.runs.folder import RunFolder
from groupwise.training.callbacks import benchmark_on_checkpoint as module
from groupwise.training.callbacks.base import ControlRequests, RunEnd, RunHandle
from groupwise.training.callbacks.benchmark_on_checkpoint import BenchmarkOnCheckpoint
from tests.processes import all_gone, wait_until
from tests.unit.training.callbacks.fake_run import CONFIG

WRITES = "import json, sys; json.dump({'metrics': {'right': 0.5, 'n': 3}}, open(sys.argv[1], 'w'))"
HANGS = "import sys, time; open(sys.argv[1] + '.begun', 'w').close(); time.sleep(1000)"
ROOT = Path(__file__).resolve().parents[4]
PYTHON = (sys.executable,)
SERVE = (*PYTHON, str(ROOT / "tests/suite_server.py"), "{policy}", "{port}")
LIGHTEVAL = (*PYTHON, str(ROOT / "tests/fake_lighteval.py"))
CONFIG_OF_RUN = {
    "model": {"name": "tiny", "revision": None}, "algorithm": {"type": "grpo"}, "data": {}, "run": {},
}  # fmt: skip


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, "{output}")


class Session:
    """A run in its folder, told to a callback as the loop would."""

    def __init__(self, folder: RunFolder, callback: BenchmarkOnCheckpoint, step: int = 0) -> None:
        self.folder, self.callback = folder, callback
        self.said: list[str] = []
        tokenizer = SimpleNamespace(save_pretrained=lambda into: None)
        self.run = SimpleNamespace(
            config=SimpleNamespace(model_dump=lambda mode: CONFIG),
            folder=folder,
            step=step,
            say=self.said.append,
            tokenizer=tokenizer,
            interruption=SimpleNamespace(received_signal=None),
        )
        self.asked = ControlRequests()
        self.handle = RunHandle(self.run, self.asked, "benchmark")  # type: ignore[arg-type]
        callback.on_run_begin(self.handle)

    def save(self, step: int, weights: bytes = b"w") -> None:
        def fill(into: Path) -> None:
            (into / "adapter_config.json").write_text("{}")
            (into / "adapter_model.safetensors").write_bytes(weights + str(step).encode())

        self.run.step = step
        made = checkpoints.save(self.folder.checkpoints, step, fill)
        self.callback.on_save(self.handle, made.path)

    def end(self, state: Any = "finished") -> None:
        self.callback.on_run_end(self.handle, RunEnd(state, {}))

    def found(self) -> list[tuple[int, str, str, dict[str, float]]]:
        records = self.folder.store.evaluations()
        return [(r.step, r.name, r.policy, dict(r.metrics)) for r in records]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[RunFolder]:
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.01)
    with RunFolder.create(tmp_path, "r", CONFIG_OF_RUN, {"task": "t"}) as made:
        yield made


def results(folder: RunFolder) -> list[str]:
    return sorted(file.name for file in folder.results.iterdir())


def test_each_checkpoint_is_evaluated_and_recorded(folder):
    session = Session(folder, BenchmarkOnCheckpoint("mine", command(WRITES)))
    session.save(2)
    shutil.rmtree(folder.checkpoints / "step-2")  # pruned while it waits, or is evaluated
    session.save(4)
    session.end()
    assert session.found() == [
        (2, "mine", "r@2", {"right": 0.5, "n": 3.0}),
        (4, "mine", "r@4", {"right": 0.5, "n": 3.0}),
    ]
    assert results(folder) == ["mine-step-2.json", "mine-step-4.json"]
    assert json.loads((folder.results / "mine-step-2.json").read_bytes())["step"] == 2
    assert not list((folder.path / "benchmarks/mine").iterdir())
    found = [told for told in session.said if not told.startswith("waiting for mine: ")]
    assert found == ["mine of step-2: right 0.5, n 3", "mine of step-4: right 0.5, n 3"]


def test_benchmarks_run_in_parallel_up_to_a_limit_without_delaying_the_run(folder):
    callback = BenchmarkOnCheckpoint(command=command(HANGS), max_processes=2)
    session = Session(folder, callback)
    for step in (1, 2, 3):
        session.save(step)
    places = [folder.path / f"benchmarks/benchmark/step-{step}" for step in (1, 2, 3)]
    wait_until(lambda: all(list(place.glob("*.begun")) for place in places[:2]))
    processes = [each.group.process for each in callback._processes]
    callback.on_step_end(session.handle, {})
    assert [each.step for each in callback._processes] == [1, 2]
    assert not list(places[2].glob("result-*"))
    session.end("interrupted")
    assert all(process.poll() is not None for process in processes)
    assert session.said == ["benchmark of step-1, step-2, step-3 is done when the run goes on"]
    again = Session(folder, BenchmarkOnCheckpoint(command=command(WRITES)), step=3)
    again.end()
    assert [found[0] for found in again.found()] == [1, 2, 3]


def test_a_result_that_a_dead_process_had_written_is_taken(folder):
    first = Session(folder, BenchmarkOnCheckpoint(command=command(HANGS)))
    first.save(2)
    first.end("failed")
    place = folder.path / "benchmarks/benchmark/step-2"
    weights = json.loads((place / "weights.json").read_bytes())
    found = {"metrics": {"right": 1.0}, "step": 2, "weights": weights}
    (folder.results / "benchmark-step-2.json").write_text(json.dumps(found))
    again = Session(folder, BenchmarkOnCheckpoint(command=command("raise SystemExit(1)")), step=2)
    again.end()
    assert again.found() == [(2, "benchmark", "r@2", {"right": 1.0})]
    assert not place.exists()


def test_steps_that_are_done_again_are_given_up(folder):
    callback = BenchmarkOnCheckpoint(command=command(HANGS))
    session = Session(folder, callback)
    for step in (2, 4):
        session.save(step)
    session.end("interrupted")
    again = Session(folder, BenchmarkOnCheckpoint(command=command(WRITES)), step=2)
    again.end()
    assert [found[0] for found in again.found()] == [2]


@pytest.mark.parametrize(("code", "reason"), [
    ("import sys; print('no GPU'); sys.exit(3)", "exit code 3"), ("pass", "wrote no JSON"),
    ("import sys; open(sys.argv[1], 'w').write('{\"a\": \"b\"}')", "has no numbers"),
    ("import sys; open(sys.argv[1], 'w').write('[1]')", "has no numbers"),
])  # fmt: skip
def test_a_failure_is_reported_with_the_log_and_the_run_continues(folder, caplog, code, reason):
    session = Session(folder, BenchmarkOnCheckpoint(command=command(code)))
    session.save(2)
    session.end()
    assert session.found() == []
    assert reason in caplog.text
    place = folder.path / "benchmarks/benchmark/step-2"
    assert f"what it said is in {place / 'log.txt'}" in caplog.text
    assert ("no GPU" in (place / "log.txt").read_text()) == ("no GPU" in code)
    assert not (place / "files").exists()


@pytest.mark.parametrize(("given", "told"), [
    ({}, "give either `command`"), ({"command": ("x",)}, "does not contain {output}"),
    ({"command": ("x", "{output}"), "overrides": ("a=b",)}, "belong to `config`"),
    ({"suites": ("math_500",)}, "give `serve`, a list of words"),
    ({"suites": ("maths",), "serve": SERVE}, "no suite 'maths'.*There are math_500, aime24"),
    ({"suites": ("lcb",), "serve": SERVE[:-1]}, "does not contain {port}"),
    ({"suites": ("lcb",), "serve": (*PYTHON, "{port}")}, "neither {policy} nor {merged}"),
    ({"suites": ("lcb",), "serve": SERVE, "command": ("x",)}, "give either `command`"),
    ({"suites": ("lcb",), "endpoint": "http://x"}, "not the checkpoints of this run"),
    ({"config": "c.yaml", "serve": SERVE}, "belong to `suites`"), ({"config": "c.yaml", "label": "a/b"}, "it names a folder"),
    ({"config": "c.yaml", "label": "step-12"}, "evaluations of its own"),
])  # fmt: skip
def test_conflicting_arguments_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        BenchmarkOnCheckpoint(**given)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
def test_the_server_of_a_checkpoint_ends_with_the_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_LIGHTEVAL", "aime24=hang")
    callback = BenchmarkOnCheckpoint(suites=("aime24",), serve=SERVE, program=LIGHTEVAL)
    session = Session(folder, callback)
    session.save(2)
    wait_until(lambda: bool(callback._processes) and any(folder.path.rglob("hanging.json")))
    (hanging,) = folder.path.rglob("hanging.json")
    begun = [*json.loads(hanging.read_text()), *json.loads(Path("server.json").read_text())]
    session.end("failed")
    assert all_gone(begun)
    assert (folder.path / "benchmarks/benchmark/step-2/files").is_dir()  # for when it goes on
