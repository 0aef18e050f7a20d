"""Groupwise and TRL learn the same task: `python -m benchmarks.equal_learning --store`.

The quickstart's task in `groupwise.rl` and in TRL's `GRPOTrainer`, with several seeds, in turns, each side alone on the machine. Both have
the same model, adapter, prompts in the same order, loss, optimiser and course of the learning rate: TRL's settings are made from
Groupwise's config. They differ in the random numbers, in arithmetic (TRL's adapter is added after rounding, see
`benchmarks.adapter_slope`), and in that Groupwise holds the ratio of learner and sampler within the clip, where TRL takes it for 1.

The mean reward of each step is what is compared: against steps the two should agree within the range of their seeds, against seconds
Groupwise should be ahead by its speed. In float32 the arithmetic is no difference either, and TRL takes half as long again. As it
stands, the whole takes about half an hour on two CPU cores. Runs are kept one by one, and `--minutes` ends it early: the same
command goes on with the runs that are missing.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.learning import CONFIG, TASK, Curve, Study, recorded, temporary, with_groupwise
from benchmarks.step import RESULTS, machine, quick_dtype, slug
from benchmarks.trl_side import loaded, settings
from groupwise.engine.models.machine import prepare_process
from groupwise.tasks.data.order import example_of_draw
from groupwise.training.config import load_config


def main() -> None:
    """Run, print, draw, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=quick_dtype())
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--store", action="store_true", help="keep curves and pictures")
    given = parser.parse_args()
    same = {
        "training.max_steps": given.steps,
        "training.prompts_per_step": given.prompts,
        "training.learning_rate": given.learning_rate,
        "training.lr_scheduler_type": "constant",
        "model.dtype": given.dtype,
    }
    overrides = tuple(f"{key}={value}" for key, value in same.items())
    name = f"equal-learning-{given.learning_rate:g}-{given.dtype}"
    study = Study.opened(same, RESULTS / f"{name}-{slug(machine())}.json" if given.store else None)
    sides = {"Groupwise": partial(ours, overrides), "TRL": partial(theirs, overrides)}
    study.run(sides, given.seeds, given.minutes)
    study.show()
    if len(study.curves) == len(sides):
        print(f"a step of Groupwise is {ratio(study):.2f} times as fast")
    if given.store:
        study.draw(name)


def ratio(study: Study) -> float:
    """Mean seconds of a step of TRL over those of Groupwise, of seeds that both have."""
    ours, theirs = study.curves["Groupwise"], study.curves["TRL"]
    both = ours.keys() & theirs.keys()
    seconds = [fmean(s for seed in both for s in runs[seed]["seconds"]) for runs in (theirs, ours)]
    return seconds[0] / seconds[1]


def ours(overrides: tuple[str, ...], seed: int) -> Curve:
    """A run of `groupwise.rl`."""
    more = (f"training.seed={seed}", "eval.before_and_after=false")
    with temporary() as folder:
        return recorded(with_groupwise([*overrides, *more], folder))


def theirs(overrides: tuple[str, ...], seed: int) -> Curve:
    """The same by TRL."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from groupwise.engine.models.lora_config import new_lora_config

    prepare_process(os.cpu_count() or 1)
    config = load_config(CONFIG, [*overrides, f"training.seed={seed}"]).config
    assert config.lora is not None
    task = runpy.run_path(str(TASK))
    model, tokenizer = loaded(config.model.dtype)
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

    with temporary() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=list(functions),
            args=settings(config, folder, reward_weights=list(weights), logging_steps=1),
            train_dataset=Dataset.from_list(drawn(task["get_rl_dataset"]({"task": {}}), config)),
            processing_class=tokenizer,
            peft_config=new_lora_config(config.lora).as_peft(),
            callbacks=[Kept()],
        )
        trainer.train()
    return curve


def drawn(rows: list[Any], config: Any) -> list[Any]:
    """The rows that the draws of a run of Groupwise get, in their order."""
    training = config.training
    draws = range(training.max_steps * training.prompts_per_step)
    return [
        rows[example_of_draw(draw, len(rows), training.seed, shuffle=config.data.shuffle)]
        for draw in draws
    ]


if __name__ == "__main__":
    main()
