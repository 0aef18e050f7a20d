"""Runs of the toy task with the tiny model, and what must be equal between two of them."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.runs.store import Store

TOY = str(Path(__file__).with_name("toy_task.py"))
STEPS = 5


def config(runs: Path, **training: Any) -> dict[str, Any]:
    """A run of a fraction of a second that checkpoints after steps 2 and 4, evaluates, and ends after an odd step."""
    return {
        "model": {"name": "tiny"},
        "lora": {"r": 4, "alpha": 8},
        "sampler": {"max_completion_length": 6, "slots": 8},
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
    """Record, checkpoints and final weights, without timings."""
    with Store.open(folder / "run.db", readonly=True) as store:
        record = store.deterministic_dump().decode()
    kept = [*folder.glob("checkpoints/step-*/*"), *folder.glob("final/*")]
    files = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in kept
        if path.name != "manifest.json"
    }
    return {"record": record, "files": files}


def in_child(work: Callable[[], None]) -> int:
    """Do `work` in a forked child; returns its exit status (17 where `die` was called)."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except BaseException:  # noqa: BLE001 — a child must never return into the tests
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def die(*_: object) -> None:
    """End this process at once, as kill -9 does: no handler, no finally, no flush."""
    os._exit(17)
