"""A step of the backend tunix beside one of Tunix's own `GRPOLearner` and one of the backend torch: `python -m benchmarks.against_tunix`.

The work is W1 (four prompts × eight completions of exactly 48 tokens by SmolLM2-135M-Instruct, LoRA of rank 16, float32, no KL), the
same for all, one after the other on the same machine. A figure is the median of the steps after the first ones, which compile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.step import RESULTS, machine, slug
from benchmarks.work import ALPHA, LEARNING_RATE, MODEL, RANK, W1, prompts
from groupwise.engine.backends.tunix.environment import python
from groupwise.engine.backends.tunix.process import own_environment
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.load import model_folder, read_model_config
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.notebook.record import Record
from groupwise.training.loops.rl_start import rl

WARM_UP = 3
SEED = 7


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "work": W1.described}
    sides = {"tunix backend": ours, "GRPOLearner": theirs, "torch backend": by_torch}
    for name, side in sides.items():
        seconds = side(given.steps)
        found[name] = {"first": seconds[0], "median": median(seconds[WARM_UP:]), "all": seconds}
        print(f"{name:14} first {seconds[0]:6.1f} s   then {found[name]['median']:6.2f} s")
    own = found["tunix backend"]["median"]
    found["faster than GRPOLearner"] = found["GRPOLearner"]["median"] / own
    print(f"the backend tunix is {found['faster than GRPOLearner']:.2f} times as fast")
    if given.store:
        file = RESULTS / f"against-tunix-{slug(found['machine'])}.json"
        file.write_text(json.dumps(found, indent=1) + "\n")


def texts(steps: int) -> list[list[str]]:
    """The prompts of each step."""
    tokenizer = load_tokenizer(ModelConfig(name=MODEL))
    return [list(prompts(W1, tokenizer, step)) for step in range(steps)]


class Letters:
    """The same prompts and rewards as in `tunix_side`."""

    def __init__(self, steps: int) -> None:
        self.rows = [{"prompt": text} for each in texts(steps) for text in each]

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        """The rows."""
        return self.rows

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        """One."""
        return [letters]


def letters(completions: list[str], **columns: Any) -> list[float]:
    """How often a letter stands there."""
    return [float(text.count("e")) for text in completions]


def ours(steps: int) -> list[float]:
    """A run of the backend tunix."""
    return run(steps, {"backend": "tunix"}, {})


def by_torch(steps: int) -> list[float]:
    """The same run with torch."""
    return run(steps, {}, {})


def run(steps: int, model: dict[str, Any], more: dict[str, Any]) -> list[float]:
    """Seconds of each step, its evaluation, checkpoint and record left out."""
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {
            "model": {"name": MODEL, "dtype": "float32", **model},
            "lora": {"r": RANK, "alpha": ALPHA},
            "sampler": {"max_completion_length": 48, "min_completion_length": 48},
            "algorithm": {"type": "grpo"},
            "training": {
                "max_steps": steps,
                "prompts_per_step": 4,
                "num_generations": 8,
                "learning_rate": LEARNING_RATE,
                "seed": SEED,
            },
            "data": {"shuffle": False},
            "signals": None,
            "run": {"dir": folder, "name": "r", "save_steps": 1000, **more},
        }
        result = rl(values, Letters(steps))
        return [seconds for _, seconds in Record(result.folder).metrics("time/step")["time/step"]]


def theirs(steps: int) -> list[float]:
    """Tunix's own learner, in its environment."""
    model = ModelConfig(name=MODEL)
    described = read_model_config(model)
    work = {
        "model": str(model_folder(model)),
        "shape": {
            "num_layers": described.num_hidden_layers,
            "vocab_size": described.vocab_size,
            "embed_dim": described.hidden_size,
            "hidden_dim": described.intermediate_size,
            "num_heads": described.num_attention_heads,
            "head_dim": described.hidden_size // described.num_attention_heads,
            "num_kv_heads": described.num_key_value_heads,
            "rope_theta": 100_000,
            "norm_eps": described.rms_norm_eps,
            "weight_tying": True,
        },
        "rank": RANK,
        "alpha": ALPHA,
        "learning_rate": LEARNING_RATE,
        "groups": 4,
        "members": 8,
        "new_tokens": 48,
        "longest": 128,
        "never": described.vocab_size - 1,
        "prompts": texts(steps),
    }
    side = Path(__file__).with_name("tunix_side.py")
    done = subprocess.run(
        [str(python()), "-P", "-s", str(side), json.dumps(work)],
        capture_output=True,
        text=True,
        check=False,
        env=own_environment(),
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


if __name__ == "__main__":
    main()
