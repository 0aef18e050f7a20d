"""What an exact adapter buys: `python -m benchmarks.exactness --store`.

The quickstart's task at a small, constant learning rate, with the adapter added before the base output is rounded to bfloat16 (`exact`), as
Groupwise does, and after it (`rounded`), as peft does. Nothing else differs: both arms are Groupwise with transformers' modules on
both sides, and in the second one the layer of the adapter is replaced, for sampling, learning and evaluating alike. So each arm learns
and is judged with what it can do. The arms of a seed run at the same time, with one thread each.

Beside the reward of each step and that of held-out prompts, the change itself is measured: by how much the training moved the
log-probabilities of right held-out answers in the arm's own arithmetic, over what the same adapter does in float32 (`share`), and how
far the latter is (`moved`). The one says what rounding swallows, the other how far the weights went. Six minutes for each seed on two
CPU cores; runs are kept as in `benchmarks.equal_learning`. What counts is the sum of all learning rates: with 1e-5 or less it takes
100 steps and more until the reward rises (`--learning-rate 1e-5 --steps 160`).
"""

from __future__ import annotations

import argparse
import asyncio
import runpy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.learning import (
    CONFIG,
    TASK,
    Curve,
    Study,
    recorded,
    spread,
    temporary,
    with_groupwise,
)
from benchmarks.step import RESULTS, machine, slug
from groupwise.core.types import Row
from groupwise.engine.learner.gradient_flow import slope_of
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.config import Dtype
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.lora_layers import ExactLoraLinear
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.engine.models.tokens import prompt_ids
from groupwise.engine.sampler.weights import ServedAdapter
from groupwise.training.config import load_config

ARMS = ("exact", "rounded")


def main() -> None:
    """Run, print, draw, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each step")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--held-out", type=int, default=128, help="prompts of the evaluations")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--store", action="store_true", help="keep curves and pictures")
    given = parser.parse_args()
    same = {
        "training.max_steps": given.steps,
        "training.prompts_per_step": given.prompts,
        "training.learning_rate": given.learning_rate,
        "training.lr_scheduler_type": "constant",
        "eval.max_prompts": given.held_out,
        "model.dtype": "bfloat16",
    }
    overrides = tuple(f"{key}={value}" for key, value in same.items())
    name = f"exactness-{given.learning_rate:g}"
    study = Study.opened(same, RESULTS / f"{name}-{slug(machine())}.json" if given.store else None)
    arms = {arm: partial(learn, overrides, arm) for arm in ARMS}
    study.run(arms, given.seeds, given.minutes, together=True)
    study.show()
    for arm, runs in study.curves.items():
        kept = ("before", "after", "share", "moved")
        found = {name: spread([run[name][0] for run in runs.values()]) for name in kept}
        print(
            f"{arm:<10} held-out reward {found['before']} → {found['after']}   "
            f"share of the change that acts {found['share']}, of a change of {found['moved']}"
        )
    if given.store:
        study.draw(name)


def learn(overrides: tuple[str, ...], arm: str, seed: int) -> Curve:
    """A run of one arm: its curve, and what came of it."""
    compute_by_modules()
    if arm == "rounded":
        ExactLoraLinear.forward = rounded
    more = (f"training.seed={seed}", "run.processes=1", "run.threads=1")
    with temporary() as folder:
        result = with_groupwise([*overrides, *more], folder)
        assert result.before is not None
        assert result.after is not None
        adapter = result.folder / "final"
        realised, exact = (change(overrides, adapter, dtype) for dtype in ("bfloat16", "float32"))
        return {
            **recorded(result),
            "before": [fmean(result.before.rewards.values())],
            "after": [fmean(result.after.rewards.values())],
            "share": [slope_of(realised, exact)],
            "moved": [float(exact.abs().mean())],
        }


def compute_by_modules() -> None:
    """From now on, sampler and learner of this process compute by transformers' modules."""

    kinds: tuple[Any, ...] = (TrainedAdapter, ServedAdapter)
    for weights in kinds:
        weights.native = lambda self: None  # as where the architecture has no native form


def rounded(self: ExactLoraLinear, x: Tensor) -> Tensor:
    """As peft's layer: the low-rank product in float32, added to an output that is rounded already, and rounded again."""
    base = self.get_base_layer()(x)
    name = self.switch.active
    if name is None:
        return base
    down, up = self.factors(name)
    low = F.linear(F.linear(x.to(down.dtype), down), up)
    return (base + low * self.scaling[name]).to(base.dtype)


def change(overrides: Sequence[str], adapter: Path, dtype: Dtype) -> Tensor:
    """By how much an adapter moves the log-probability of each token of the right held-out answers, computed in this format."""
    config = load_config(CONFIG, [*overrides, f"model.dtype={dtype}"]).config
    assert config.lora is not None
    held_out = runpy.run_path(str(TASK))["get_eval_dataset"]({})[: config.eval.max_prompts]
    tokenizer = load_tokenizer(config.model)
    rows = [
        _row(prompt_ids(tokenizer, each["prompt"]), tokenizer(each["answer"])["input_ids"])
        for each in held_out
    ]
    adapted = AdaptedModel(load_model(config.model, dtype, "cpu"), new_lora_config(config.lora))
    weights = TrainedAdapter(adapted, seed=0)
    weights.read(adapter)
    torch.set_num_threads(1)
    with temporary() as folder:
        learner = TorchLearner(
            weights,
            run="change",
            publish_folder=Path(folder),
            max_tokens_per_microbatch=2048,
            seed=0,
            native=False,
        )
        after = asyncio.run(learner.logprobs(rows))
        before = asyncio.run(learner.logprobs(rows, "reference"))
    return _in_a_row(after) - _in_a_row(before)


def _in_a_row(logprobs: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([each for row in logprobs for each in row], dtype=torch.float64)


def _row(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    nothing = (0.0,) * len(answer)
    return Row(tuple(prompt), tuple(answer), (1,) * len(answer), nothing, 0.0, 1.0)


if __name__ == "__main__":
    main()
