"""Groupwise and TRL learn the same task: `python -m benchmarks.equal_learning --store`.

The quickstart's task, model, adapter, learning rate and loss, in TRL's `GRPOTrainer` and in `groupwise.rl`, with several seeds, in
turns. The mean reward of each step is what is compared: against steps the two should agree within their spread, against seconds
Groupwise should be ahead by its speed. Draws both, and stores the curves with the name of the machine. About half an hour on two CPU
cores; `--learning-rate` tries others: where it is small, TRL's adapter hardly acts (`benchmarks.adapter_slope`). What is measured is
kept after every run, and runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import runpy
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.step import RESULTS, machine, slug
from benchmarks.trl_side import adapter, loaded
from groupwise.display.plot import Series, moving_mean, svg_curve
from groupwise.models.machine import prepare_process

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
TASK = ROOT / "examples" / "01_first_task" / "task.py"
IMAGES = ROOT / "docs" / "images"
WINDOW = 5
LAST = 10
"""Steps at the end whose mean reward says how far a run came."""

Curve = dict[str, list[float]]
"""Of one run: the mean `reward` and the `seconds` of each step."""


def main() -> None:
    """Run, print, draw, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--store", action="store_true", help="keep curves and pictures")
    given = parser.parse_args()
    described = machine()
    name = f"equal-learning-{given.learning_rate:g}-{slug(described)}"
    file = RESULTS / f"{name}.json" if given.store else Path(tempfile.mkdtemp()) / "curves.json"
    curves: dict[str, dict[str, Curve]] = (
        json.loads(file.read_text())["curves"] if file.exists() else {}
    )
    for seed in map(str, range(given.seeds)):
        for side, learn in SIDES.items():
            if seed in curves.setdefault(side, {}):
                continue
            curves[side][seed] = _apart(learn, int(seed), given.steps, given.learning_rate)
            file.write_text(json.dumps({"machine": described, "curves": curves}) + "\n")
            print(
                f"{side} seed {seed}: {fmean(curves[side][seed]['reward'][-LAST:]):.3f}", flush=True
            )
    show(curves)
    if given.store:
        draw(curves, f"equal-learning-{given.learning_rate:g}")


def show(curves: dict[str, dict[str, Curve]]) -> None:
    """How far both came, and how long they took."""
    for side, runs in curves.items():
        ends = [fmean(run["reward"][-LAST:]) for run in runs.values()]
        seconds = [sum(run["seconds"]) for run in runs.values()]
        spread = stdev(ends) if len(ends) > 1 else 0.0
        print(
            f"{side:<10} reward of the last {LAST} steps {fmean(ends):.3f} ± {spread:.3f}, {fmean(seconds):.0f} s"
        )


def draw(curves: dict[str, dict[str, Curve]], name: str) -> None:
    """The mean curves against steps and against seconds."""
    against = {"step": _steps, "seconds": _seconds}
    for label, places in against.items():
        series = [
            Series(
                side,
                tuple(zip(places(runs), moving_mean(_mean(runs, "reward"), WINDOW), strict=True)),
            )
            for side, runs in curves.items()
        ]
        title = f"Reward, mean of {len(next(iter(curves.values())))} seeds"
        (IMAGES / f"{name}-{label}.svg").write_text(svg_curve(series, title=title, x_label=label))


def _steps(runs: dict[str, Curve]) -> Sequence[float]:
    return range(1, len(_mean(runs, "reward")) + 1)


def _seconds(runs: dict[str, Curve]) -> Sequence[float]:
    return list(accumulate(_mean(runs, "seconds")))


def _mean(runs: dict[str, Curve], key: str) -> list[float]:
    return [fmean(values) for values in zip(*(run[key] for run in runs.values()), strict=True)]


def _apart(learn: Any, *arguments: Any) -> Curve:
    """The curve of a run in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, learn, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit("the run failed; see above") from None
    finally:
        process.join()


def _send(connection: Any, learn: Any, arguments: Sequence[Any]) -> None:
    connection.send(learn(*arguments))


def with_groupwise(seed: int, steps: int, learning_rate: float) -> Curve:
    """A run of `groupwise.rl`."""
    import groupwise
    from groupwise.runs.store import Store

    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"training.seed={seed}",
            f"training.max_steps={steps}",
            f"training.learning_rate={learning_rate}",
            "eval.before_and_after=false",
            f"run.dir={folder}",
        ]
        result = groupwise.rl(CONFIG, TASK, overrides=overrides)
        with Store.open(result.folder / "run.db", readonly=True) as record:
            found = record.metrics(["reward", "time/step"])
    return {
        "reward": [value for _, value in found["reward"]],
        "seconds": [value for _, value in found["time/step"]],
    }


def with_trl(seed: int, steps: int, learning_rate: float) -> Curve:
    """The same by TRL."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from groupwise.config import load_config

    prepare_process(os.cpu_count() or 1)
    config = load_config(CONFIG).config
    training = config.training
    task = runpy.run_path(str(TASK))
    model, tokenizer = loaded("bfloat16")
    functions, weights = zip(*task["get_reward_funcs"]({}, tokenizer), strict=True)
    curve: Curve = {"reward": [], "seconds": []}

    class Kept(TrainerCallback):
        """Keeps reward and seconds of each step."""

        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            curve["seconds"].append(time.perf_counter() - self.started)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" in logs:
                curve["reward"].append(logs["reward"])

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=training.num_generations,
            gradient_accumulation_steps=training.prompts_per_step,
            num_generations=training.num_generations,
            max_completion_length=config.sampler.max_completion_length,
            loss_type="dr_grpo",
            scale_rewards="none",
            reward_weights=list(weights),
            temperature=1.0,
            beta=0.0,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            max_grad_norm=training.max_grad_norm or 0.0,
            weight_decay=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=list(functions),
            args=settings,
            train_dataset=Dataset.from_list(task["get_rl_dataset"]({"task": {}})),
            processing_class=tokenizer,
            peft_config=adapter(),
            callbacks=[Kept()],
        )
        trainer.train()
    return curve


SIDES = {"groupwise": with_groupwise, "TRL": with_trl}


if __name__ == "__main__":
    main()
