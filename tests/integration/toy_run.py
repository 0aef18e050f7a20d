"""Runs of the toy task with the tiny model, and what must be equal between two of them."""

from __future__ import annotations

import hashlib
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import groupwise
from groupwise.core import atomic_files
from groupwise.core.errors import RunNotFoundError
from groupwise.runs.find import newest_unfinished
from groupwise.runs.store import Store

TOY = str(Path(__file__).with_name("toy_task.py"))
STEPS = 5


def config(runs: Path, **training: Any) -> dict[str, Any]:
    """A run of a fraction of a second that checkpoints after steps 2 and 4, evaluates, and ends after an odd step."""
    return {
        "model": {"name": "tiny"},
        "lora": {"r": 4, "alpha": 8},
        "sampler": {"max_completion_length": 6, "max_num_seqs": 8},
        "training": {
            "max_steps": STEPS,
            "prompts_per_step": 2,
            "num_generations": 4,
            "learning_rate": 0.01,
            "seed": 3,
            **training,
        },
        "rewards": {"in_process": True},
        "eval": {"eval_steps": 3, "max_prompts": 3},
        "run": {"name": "toy", "dir": str(runs), "save_steps": 2, "threads": 1},
    }


def what_must_be_equal(folder: Path) -> dict[str, Any]:
    """Record, checkpoints and final weights, without timings (which the segments of the record in checkpoints have, too) and model card.

    The card shows the config, of which equal runs may have different ones; so do checkpoints, which carry it.
    """
    with Store.open(folder / "run.db", readonly=True) as store:
        record = store.deterministic_dump().decode()
    kept = [*folder.glob("checkpoints/step-*/**/*"), *folder.glob("final/*")]
    files = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in kept
        if path.is_file()
        and path.name not in ("manifest.json", "record.db", "README.md")
        and "/run/" not in path.relative_to(folder).as_posix()
    }
    return {"record": record, "files": files}


def ratios_of(folder: Path) -> list[float]:
    """The learner's log-probability of every token that taught, less the sampler's, in the order of the record."""
    with Store.open(folder / "run.db", readonly=True) as store:
        segments = [
            segment
            for record in store.steps()
            for group in store.groups(record.step)
            for rollout in group.rollouts
            for segment in rollout.segments
            if segment.learner_logprobs is not None
        ]
    return [
        learnt - sampled
        for segment in segments
        for learnt, sampled in zip(
            segment.learner_logprobs or (), segment.sampling_logprobs or (), strict=True
        )
    ]


def go_on(
    settings: dict[str, Any], task: str = TOY, command: Callable[..., Any] = groupwise.rl
) -> None:
    """Recover as a user would after a crash: resume; start again if there is no run yet; do nothing if the run is finished."""
    name, runs = settings["run"]["name"], Path(settings["run"]["dir"])
    try:
        newest_unfinished(name, runs)
    except RunNotFoundError as error:
        if "finished" not in str(error):
            command(settings, task)
        return
    assert command(settings, task, resume=True).exit_code == 0


def crash_at(number: int, work: Callable[[], object]) -> int:
    """Do `work` in a forked child that exits with status 17 at durable write `number` (from 0); returns its exit status."""
    left = iter(range(number))

    def count(name: str) -> None:
        if next(left, None) is None:
            die()

    def counted() -> None:
        atomic_files.on_write = count
        work()

    return in_child(counted)


def in_child(work: Callable[[], None]) -> int:
    """Do `work` in a forked child; returns its exit status (17 where `die` was called)."""
    return os.waitstatus_to_exitcode(os.waitpid(begun_in_child(work), 0)[1])


def begun_in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked child and return its pid; the caller waits for it."""
    # A time limit that ran out between the two halves of a fork would leave the lock of `logging` held.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    child = os.fork()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if child:
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 — a child must never return into the tests
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def die(*_: object) -> None:
    """End this process at once, as kill -9 does: no handler, no finally, no flush."""
    os._exit(17)
