"""How long a user waits for the first sampled token: `python -m benchmarks.start_up --store`.

From the command on, `groupwise rl` with the quickstart's config, and a script for TRL's `GRPOTrainer` with the same model, adapter,
prompts and settings (`benchmarks.trl_start`), in turns, each in a fresh process. Completions are one token long, and what is sampled
first is scored at once: the task's reward notes the time (`benchmarks/noting_task.py`). So everything is counted that comes before:
interpreter, imports, config, task, weights, workers, the first prompts, and on both sides the way from the token to the reward. TRL
samples the groups of a step one by one here, so that it need not wait for the last of them.

The first start of each side is not counted: files are not in the system's memory yet, and byte code and kernels may not be there. Byte
code is kept, whatever the environment says (`PYTHONDONTWRITEBYTECODE`): where it is not, every start of either side compiles half a
million lines of Python again, and that is measured instead. Prints seconds of both with their range, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.learning import CONFIG, ROOT, temporary
from benchmarks.step import RESULTS, machine, quick_dtype, slug, spread, times
from benchmarks.trl_side import in_words_of_trl
from groupwise.engine.models.tokenizer import resolve
from groupwise.training.config import load_config

TASK = Path(__file__).parent / "noting_task.py"
OVERRIDES = (
    "training.max_steps=1",
    "sampler.max_completion_length=1",
    "eval.before_and_after=false",
)

Command = Callable[[Path], list[str]]
"""The words that start a side; it writes into the given folder alone, and notes in its `note`."""


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    seconds = in_turns({"groupwise": ours, "trl": theirs}, given.repetitions)
    for side, each in seconds.items():
        print(f"{side:<10} {spread(each)} s")
    print(f"{'':<10} {times(seconds['groupwise'], seconds['trl'])} as fast")
    if given.store:
        described = machine()
        file = RESULTS / f"start-up-{slug(described)}.json"
        file.write_text(json.dumps({"machine": described, "seconds": seconds}, indent=2) + "\n")
        print(f"stored in {file}")


def in_turns(commands: Mapping[str, Command], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each command's starts, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for repetition in range(repetitions + 1):
        for name, command in commands.items():
            taken = until_first_reward(command)
            if repetition:
                seconds[name].append(taken)
    return seconds


def until_first_reward(command: Command) -> float:
    """Seconds from the start of a command until its reward is first called. Raises SystemExit where that never happens."""
    with temporary() as name:
        folder = Path(name)
        words, note = command(folder), folder / "note"
        begun = time.monotonic()
        ended = subprocess.run(
            words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        if ended.returncode or not note.exists():
            raise SystemExit(f"{shlex.join(words)}\nended before it sampled:\n{ended.stderr}")
        return float(note.read_text()) - begun


def environment() -> dict[str, str]:
    """This process's, with byte code kept."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def ours(folder: Path) -> list[str]:
    """The quickstart's command, in one short step."""
    files = ["--config", str(CONFIG), "--task-module", str(TASK)]
    places = [f"run.dir={folder / 'runs'}", f"task.note={folder / 'note'}"]
    return [sys.executable, "-m", "groupwise", "rl", *files, *OVERRIDES, *places]


def theirs(folder: Path) -> list[str]:
    """The same for TRL."""
    config = load_config(CONFIG, OVERRIDES).config
    assert config.lora is not None
    lora = {
        "r": config.lora.r,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": config.lora.dropout,
        "target_modules": config.lora.target_modules,
        "task_type": "CAUSAL_LM",
    }
    given = {
        "model": resolve(config.model).location,
        "dtype": quick_dtype(),
        "lora": lora,
        "settings": {**in_words_of_trl(config, str(folder)), "steps_per_generation": 1},
        "task": str(TASK),
        "note": str(folder / "note"),
    }
    return [sys.executable, "-m", "benchmarks.trl_start", json.dumps(given)]


if __name__ == "__main__":
    main()
