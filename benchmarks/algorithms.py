"""Every algorithm on one task, five seeds each: `python -m benchmarks.algorithms --store`.

A model of random weights learns to answer with the one or two letters that its prompt calls for; only the whole answer earns 1. All
algorithms have the same model, prompts, optimiser and learning rate, and their own defaults. Each step makes two passes over its rollouts
in two updates each, so that ratios leave 1 and clips act. What differs between seeds are the draws, which algorithms share.

One task says little about others: this one has short answers, one turn and one reward, so nothing is seen of what `dapo` does for long
answers, `gigpo` for many turns (with one turn it is twice the advantage of `grpo`), or `gdpo` for several rewards. Counted are the step at
which the held-out reward first is half of what can be had, and the reward at the end. An algorithm that does not learn here is shown too.

The numbers do not depend on the machine's speed or on what else runs. Runs are kept one by one, and the same command goes on with those
that are missing; `--draw` only makes table and picture again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.choosing_examples import SEEN, UNSEEN, rows, small_run, whole_answer, write_model
from benchmarks.learning import IMAGES
from benchmarks.step import RESULTS
from groupwise.algorithms.registry import ALGORITHMS
from groupwise.core.terminal.plot import Series, svg_curve

FILE = RESULTS / "algorithms.json"
LENGTHS = (1, 2)
THRESHOLD = 0.5
"""Held-out reward at which a run has learnt; 1 can be had."""
STEPS, EVAL_STEPS = 40, 4
PROMPTS, MEMBERS = 6, 8
RATE = 0.003

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in ALGORITHMS if name != "distillation"},  # it has a teacher
    "pass_at_k, leave_one_out": {"type": "pass_at_k", "baseline": "leave_one_out"},
    "grpo, top_entropy_quantile 0.2": {"type": "grpo", "top_entropy_quantile": 0.2},
    "grpo, entropy_advantage 0.4": {"type": "grpo", "entropy_advantage": 0.4},
    "grpo, IcePop": {
        "type": "grpo",
        "importance_sampling_correction": "token_mask",
        "importance_sampling_cap": 5.0,
        "importance_sampling_floor": 0.5,
    },
}
"""The section `algorithm` of each curve."""
PANELS = {
    "published": [name for name in ALGORITHMS if name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")],
    "newer": [name for name in ALGORITHMS if name not in ("distillation", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")],
    "knobs": ["grpo", *[name for name in VARIANTS if name.startswith("grpo, ")]],
}  # fmt: skip
"""The curves of each picture."""


class Letters:
    """`4y2:` is to be answered by the first two letters of y's word; the digits of held-out prompts never occur in training."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(SEEN, LENGTHS)

    def get_eval_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(UNSEEN, LENGTHS)

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [whole_answer]


def main() -> None:
    """Run, print, draw, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0, help="none is begun after these")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--store", action="store_true", help="keep results and pictures")
    parser.add_argument("--draw", action="store_true", help="make no run")
    given = parser.parse_args()
    settings = {"steps": STEPS, "rate": RATE, "prompts": PROMPTS, "members": MEMBERS}
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"settings": settings, "runs": {}}
    if stored["settings"] != settings:
        raise SystemExit(
            f"{FILE} has runs with {stored['settings']}, not {settings}; move it away."
        )
    runs: dict[str, dict[str, Any]] = stored["runs"]
    missing = [
        (name, seed)
        for seed in range(given.seeds)
        for name in given.only
        if str(seed) not in runs.get(name, {})
    ]
    begun = time.monotonic()
    with ProcessPoolExecutor(1) as pool:
        for name, seed in missing if not given.draw else ():
            if time.monotonic() - begun > 60 * given.minutes:
                print("no time is left for the other runs; the same command goes on with them")
                break
            run = pool.submit(partial(learn, VARIANTS[name], seed)).result()
            runs.setdefault(name, {})[str(seed)] = run
            print(f"{name} seed {seed}: held out {run['held_out'][-1]:.2f}", flush=True)
            if given.store:
                FILE.write_text(json.dumps({"settings": settings, "runs": runs}) + "\n")
    print(table(runs))
    if given.store or given.draw:
        draw(runs)


def learn(algorithm: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run: the rewards of its steps, and held-out rewards every `EVAL_STEPS` steps, from step 0."""
    import groupwise
    from groupwise.runs.store import Store

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        result = groupwise.rl(config(folder, algorithm, seed), Letters())
        assert result.folder
        with Store.open(result.folder / "run.db", readonly=True) as store:
            evaluations = {e.step: e.metrics["reward"] for e in store.evaluations()}
            metrics = store.metrics(["reward", "entropy"])
    return {
        "held_out": [round(evaluations[step], 4) for step in sorted(evaluations)],
        "reward": [round(value, 4) for _, value in metrics["reward"]],
        "entropy": [round(value, 4) for _, value in metrics["entropy"]],
    }


def config(folder: Path, algorithm: dict[str, Any], seed: int) -> dict[str, Any]:
    """Everything equal but the algorithm."""
    made = small_run(
        folder,
        sampler={"max_completion_length": 2, "max_num_seqs": 48},
        algorithm=algorithm,
        training={
            "max_steps": STEPS,
            "prompts_per_step": PROMPTS,
            "num_generations": MEMBERS,
            "num_iterations": 2,
            "minibatches": 2,
            "learning_rate": RATE,
            "seed": seed,
        },
    )
    return made | {"eval": {"eval_steps": EVAL_STEPS}}


def reached(held_out: Sequence[float]) -> int | None:
    """The step at which the held-out reward first is `THRESHOLD`."""
    places = [index for index, value in enumerate(held_out) if value >= THRESHOLD]
    return places[0] * EVAL_STEPS if places else None


def table(runs: dict[str, dict[str, Any]]) -> str:
    """A line for each algorithm; a run that never learnt counts as if it had at its end."""
    lines = [
        "| algorithm | learnt | steps until half | held-out reward at the end | entropy at the end, nats |",
        "|---|---|---|---|---|",
    ]
    for name, by_seed in runs.items():
        steps = [reached(run["held_out"]) for run in by_seed.values()]
        learnt = sum(step is not None for step in steps)
        cells = [
            f"`{name}`",
            f"{learnt} of {len(steps)}",
            _spread([STEPS if step is None else step for step in steps], 0),
            _spread([run["held_out"][-1] for run in by_seed.values()], 2),
            _spread([run["entropy"][-1] for run in by_seed.values()], 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(numbers: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    deviation = stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{fmean(numbers):.{digits}f} ± {deviation:.{digits}f}"


def draw(runs: dict[str, dict[str, Any]]) -> None:
    """Pictures of the held-out reward against steps, the mean of the seeds, in `docs/images`."""
    for panel, names in PANELS.items():
        series = [Series(name, tuple(_mean_curve(runs[name]))) for name in names if name in runs]
        picture = svg_curve(series, title="Held-out reward, mean of the seeds", x_label="step")
        (IMAGES / f"algorithms-{panel}.svg").write_text(picture)


def _mean_curve(by_seed: dict[str, Any]) -> list[tuple[float, float]]:
    curves = [run["held_out"] for run in by_seed.values()]
    return [
        (float(index * EVAL_STEPS), fmean(values))
        for index, values in enumerate(zip(*curves, strict=True))
    ]


if __name__ == "__main__":
    main()
