"""What the comparison with Tunix's own learner measures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from groupwise.models.config import ModelConfig
from groupwise.models.load import described_text
from groupwise.tunix.environment import python
from groupwise.tunix.process import own_environment
from tests.tunix_models import model_of

SIDE = Path(__file__).parents[3] / "benchmarks" / "tunix_side.py"


@pytest.mark.soak(suite="tunix")
def test_it_tells_the_seconds_of_each_step() -> None:
    text = described_text(ModelConfig(name=str(model_of("llama"))))
    work = {
        "model": str(model_of("llama")),
        "shape": {
            "num_layers": text["num_hidden_layers"],
            "vocab_size": text["vocab_size"],
            "embed_dim": text["hidden_size"],
            "hidden_dim": text["intermediate_size"],
            "num_heads": text["num_attention_heads"],
            "head_dim": text["head_dim"],
            "num_kv_heads": text["num_key_value_heads"],
            "rope_theta": 5000,
            "norm_eps": text["rms_norm_eps"],
            "weight_tying": False,
        },
        "rank": 4,
        "alpha": 8,
        "learning_rate": 1e-4,
        "groups": 4,
        "members": 8,
        "new_tokens": 8,
        "longest": 32,
        "never": 5,
        "prompts": [[f"count to {number}" for number in range(4)]] * 3,
    }
    done = subprocess.run(
        [str(python()), "-P", "-s", str(SIDE), json.dumps(work)],
        capture_output=True,
        text=True,
        check=False,
        env=own_environment(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, *rest = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    assert len(rest) == 2
    assert max(rest) < first  # which compiles
