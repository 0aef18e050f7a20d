"""What choosing examples buys: `python -m benchmarks.choosing_examples --store`.

A model of random weights learns to answer with two or three letters that its prompt calls for; only the whole answer earns anything,
and a third of the prompts calls for what nobody can say. Plain GRPO draws all of them alike. Beside it each way of choosing: the easy
pool (prompts that call for one letter), the replay buffer (prompts, completions), the curriculum, dynamic sampling, and a temperature
that falls. All schedules are scaled to the run; their values were chosen on four other seeds. Counted is what it takes until the
held-out reward is half of what can be had, in steps, and in completions that were sampled. Every way and plain GRPO share seeds, so
that differences are paired.

The numbers do not depend on the machine's speed or on what else runs. Ten seeds take some 15 minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.step import RESULTS

WORDS = {"x": "abc", "y": "bca", "z": "cab"}
CHARACTERS = "abcdefxyz0123456789:"
SEEN, UNSEEN = range(7), range(7, 10)
LENGTHS = (2, 3)
EASY_LENGTHS = (1,)
HOPELESS = "?!?!"
THRESHOLD = 0.5
"""Held-out reward at which a run has learnt; 1 can be had."""
STEPS = 200
EVAL_STEPS = 5
PROMPTS, MEMBERS = 8, 8

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "easy pool": {
        "data": {
            "easy_pool": {
                "dataset_name": "easy.jsonl",
                "schedule": [[0, 0.5], [15, 0.25], [30, 0.0]],
            }
        }
    },
    "easy pool, whole at first": {
        "data": {
            "easy_pool": {
                "dataset_name": "easy.jsonl",
                "schedule": [[0, 1.0], [10, 0.8], [20, 0.6], [30, 0.4], [45, 0.2], [60, 0.0]],
            }
        }
    },
    "replay of prompts": {"data": {"replay": {"warmup_entries": 4, "max_share": 0.25}}},
    "replay of completions": {
        "data": {
            "replay": {"warmup_entries": 4, "mode": "completions", "mix_exploit_ratio": 0.0},
        }
    },
    "curriculum": {"data": {"curriculum": {"revisit": 0.2, "memory": 0.8}}},
    "dynamic sampling": {"algorithm": {"dynamic_sampling": True, "max_resample_rounds": 3}},
    "temperature 1.5 to 1": {
        "sampler": {"temperature_schedule": {"start": 1.5, "end": 1.0, "steps": 60}}
    },
    "temperature 1 to 0.5": {
        "sampler": {"temperature_schedule": {"start": 1.0, "end": 0.5, "steps": 100}}
    },
}


class Letters:
    """`4y2:` is to be answered by the first two letters of y's word; the digits of held-out prompts never occur in training."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        """A third of them calls for what cannot be said."""
        can = rows(SEEN, LENGTHS)
        return [
            *can,
            *({**row, "prompt": f"{row['prompt'][:-1]}0:", "answer": HOPELESS} for row in can[::2]),
        ]

    def get_eval_dataset(self, config: Any) -> list[dict[str, str]]:
        return rows(UNSEEN, LENGTHS)

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [whole_answer]


def rows(digits: range, lengths: tuple[int, ...]) -> list[dict[str, str]]:
    """A prompt for each digit, word and length."""
    return [
        {"prompt": f"{digit}{key}{length}:", "answer": word[:length]}
        for digit in digits
        for key, word in WORDS.items()
        for length in lengths
    ]


def whole_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion begins with the answer."""
    return [float(text.startswith(gold)) for text, gold in zip(completions, answer, strict=True)]


def main() -> None:
    """Run, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="keep the results")
    given = parser.parse_args()
    jobs = [(way, seed) for seed in range(given.seeds) for way in given.ways]
    with ProcessPoolExecutor(given.processes) as pool:
        found = list(pool.map(partial(learn, given.steps, given.rate), *zip(*jobs, strict=True)))
    results = [
        {"way": way, "seed": seed, **run} for (way, seed), run in zip(jobs, found, strict=True)
    ]
    print(table(results, given.ways))
    if given.store:
        file = RESULTS / "choosing-examples.json"
        file.write_text(
            json.dumps({"steps": given.steps, "rate": given.rate, "runs": results}, indent=1) + "\n"
        )


def learn(steps: int, rate: float, way: str, seed: int) -> dict[str, Any]:
    """One run: after how many steps, and sampled completions, it had learnt (None: it never did)."""
    import groupwise
    from groupwise.runs.store import Store

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        (folder / "easy.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(SEEN, EASY_LENGTHS))
        )
        result = groupwise.rl(config(folder, steps, rate, way, seed), Letters())
        assert result.folder
        with Store.open(result.folder / "run.db", readonly=True) as store:
            evaluations = {e.step: e.metrics["reward"] for e in store.evaluations()}
            rewards = [value for _, value in store.metrics(["reward"])["reward"]]
            sampled = [
                sum(len(g.rollouts) for g in store.groups(step) if g.again is None)
                for step in range(steps)
            ]
    reached = next(
        (step for step, reward in sorted(evaluations.items()) if reward >= THRESHOLD), None
    )
    return {
        "steps": reached,
        "completions": None if reached is None else sum(sampled[:reached]),
        "last": fmean(evaluations[step] for step in sorted(evaluations)[-3:]),
        "held_out": [evaluations[step] for step in sorted(evaluations)],
        "reward": fmean(rewards[-20:]),
        "sampled": sum(sampled),
    }


def config(folder: Path, steps: int, rate: float, way: str, seed: int) -> dict[str, Any]:
    """Full fine-tuning of the small model; everything equal but the way."""
    made = small_run(
        folder,
        sampler={"max_completion_length": 3, "max_num_seqs": 64},
        algorithm={"type": "dapo", "dynamic_sampling": False, "soft_punish_cache": 0},
        training={
            "max_steps": steps,
            "prompts_per_step": PROMPTS,
            "num_generations": MEMBERS,
            "learning_rate": rate,
            "seed": seed,
        },
    )
    for section, keys in WAYS[way].items():
        made[section] = {**made.get(section, {}), **json.loads(json.dumps(keys))}
    pool = made.get("data", {}).get("easy_pool")
    if pool:
        pool["dataset_name"] = str(folder / pool["dataset_name"])
    return made


def small_run(
    folder: Path, *, sampler: dict[str, Any], algorithm: dict[str, Any], training: dict[str, Any]
) -> dict[str, Any]:
    """A config that trains all weights of `folder/model` in one process, evaluated every `EVAL_STEPS` steps, without checkpoints."""
    return {
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "lora": None,
        "sampler": sampler,
        "algorithm": algorithm,
        "training": {"lr_scheduler_type": "constant", **training},
        "rewards": {"in_process": True, "time_limit": 600.0},
        "eval": {"eval_steps": EVAL_STEPS},
        "run": {
            "name": "run",
            "dir": str(folder / "runs"),
            "save_steps": 10_000,
            "threads": 1,
            "processes": 1,
        },
    }


def write_model(folder: Path) -> None:
    """A small vocabulary, and weights large enough that attention and logits are not flat."""
    import torch

    from groupwise.engine.models import tiny

    tiny.CHARACTERS = CHARACTERS
    made = tiny.tiny_model(hidden_size=32, layers=2, heads=4, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    made.save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)


def table(results: list[dict[str, Any]], ways: list[str]) -> str:
    """A line for each way; differences to plain GRPO are paired by seed, with 95 % bootstrap intervals."""
    lines = [
        "| way | learnt | steps | against plain | completions | against plain | held-out at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    by_way = {way: {r["seed"]: r for r in results if r["way"] == way} for way in ways}
    for way, runs in by_way.items():
        cells = [way, f"{sum(r['steps'] is not None for r in runs.values())} of {len(runs)}"]
        for key in ("steps", "completions"):
            values = {seed: counted(run, key) for seed, run in runs.items()}
            cells.append(f"{fmean(values.values()):.0f}")
            base = {seed: counted(run, key) for seed, run in by_way.get("plain", {}).items()}
            cells.append(difference(values, base) if way != "plain" and base else "")
        cells.append(f"{fmean(run['last'] for run in runs.values()):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def counted(run: Mapping[str, Any], key: str) -> float:
    """What it took; a run that never learnt counts as if it had at its end."""
    if run[key] is not None:
        return run[key]
    return run["sampled"] if key == "completions" else EVAL_STEPS * (len(run["held_out"]) - 1)


def difference(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    """The mean of the paired differences, with its 95 % interval of 10,000 resamples of the seeds."""
    pairs = [values[seed] - base[seed] for seed in values]
    chance = random.Random(0)
    means = sorted(fmean(chance.choices(pairs, k=len(pairs))) for _ in range(10_000))
    return f"{fmean(pairs):+.0f} [{means[250]:+.0f}, {means[9749]:+.0f}]"


if __name__ == "__main__":
    main()
