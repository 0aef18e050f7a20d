"""Against a real vLLM, started as `docs/how-to/vllm.md` says: `GROUPWISE_VLLM_URL=http://127.0.0.1:8000 make gpu`.

`GROUPWISE_VLLM_MODEL` names its model (and what it calls it), SmolLM2-135M-Instruct where it is not set; its context must hold 256 tokens,
and it must see this machine's files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.core.types import GroupRequest, SamplingParams
from groupwise.runs.store import Store
from groupwise.training import build, placement
from groupwise.training.config import load_config

URL = os.environ.get("GROUPWISE_VLLM_URL")
MODEL = os.environ.get("GROUPWISE_VLLM_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
TASK = "examples/01_first_task/task.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(URL is None, reason="GROUPWISE_VLLM_URL does not say where a vLLM answers"),
]


def settings(runs: Path, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"name": MODEL},
        "lora": {"r": 16},
        "sampler": {"engine": "vllm", "url": URL, "max_completion_length": 32},
        "training": {
            "max_steps": 3, "prompts_per_step": 4, "num_generations": 8, "learning_rate": 1e-3,
        },
        "data": {"max_prompt_length": 128},
        "eval": {"before_and_after": False},
        "run": {"name": "live", "dir": str(runs)},
        **sections,
    }  # fmt: skip


async def test_it_draws_what_it_is_asked_for(tmp_path):
    """Loading probes it: this fails for other weights, an adapter that does not act, or raw log-probabilities."""
    config = load_config(settings(tmp_path)).config
    layout = placement.choose_layout(config, 128)
    parts = await build.start_training(config, layout, "live", tmp_path / "published")
    try:
        for version in range(2):
            await parts.sampler.load(await parts.learner.publish(version))
        prompt = tuple(range(100, 110))
        for params in (
            SamplingParams(16, stop_token_ids=parts.stop_token_ids),
            SamplingParams(16, 0.0, parts.stop_token_ids, min_tokens=8),
            SamplingParams(16, 0.5, parts.stop_token_ids, stop=("e",)),
            SamplingParams(16, 1.0, parts.stop_token_ids, top_k=5, top_p=0.9),
        ):
            found = await parts.sampler.generate(GroupRequest(0, prompt, (1, 1 << 63, 3), params))
            assert [each.seed for each in found] == [1, 1 << 63, 3]
            assert all(len(each.token_ids) >= params.min_tokens for each in found)
        assert {each.policy_version for each in found} == {1}
    finally:
        parts.close()


def test_a_run_learns_from_what_it_draws(tmp_path):
    folder = groupwise.rl(settings(tmp_path), TASK).folder
    assert folder
    with Store.open(folder / "run.db", readonly=True) as store:
        gaps = [
            value for _, value in store.metrics(["sampling/logprob_gap"])["sampling/logprob_gap"]
        ]
    assert len(gaps) == 3
    assert max(gaps) < 0.1
