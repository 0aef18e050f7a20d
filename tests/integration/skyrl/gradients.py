"""How much one update by some rows changes the log-probability of a token at a service: a process of its own, with the tinker package that
speaks with it. Prints a number for each set of rows of each loss, as JSON.

Updates are as large as their gradients (Adam with a large epsilon), so that the change is linear in them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from groupwise.algorithms.registry import make
from groupwise.core.types import LossSpec, OptimiserParams, Row
from groupwise.engine.backends.tinker.parts import TinkerLearner
from groupwise.engine.backends.tinker.service import Service
from groupwise.engine.models.config import LoraConfig, ModelConfig

PROMPT = (40, 41, 42, 43)
SHORT = Row(PROMPT, (50,), (1,), (-4.0,), 1.0, 1.0, reference_logprobs=(-4.0,))
LONG = Row(PROMPT, (50, *[60] * 11), (1, *[0] * 11), (-4.0,) * 12, 1.0, 1.0, reference_logprobs=(-4.0,) * 12)  # fmt: skip
OTHER = Row((44, 45), (51, 52), (1, 1), (-4.0, -4.0), 0.5, 1.0, reference_logprobs=(-4.0, -4.0))
SETS = {"short": [SHORT], "long": [LONG], "other": [OTHER], "both": [SHORT, OTHER]}
WIDE = {"epsilon": 0.999, "epsilon_high": 1e6}
"""No ratio is clipped: the sampling log-probabilities above are no model's."""
LOSSES = {
    "sft": LossSpec("sft"),
    "importance": LossSpec("given", {"surrogate": "ratio"}),
    "clip": make("dr_grpo", WIDE).loss_spec(),
    "kl": make("dr_grpo", {**WIDE, "beta": 0.5}).loss_spec(),
}
STEEP = 1e4
TOTALS = {"sft": 1.0, "policy": 1.0, "kl": 1.0}


async def change(service: Service, folder: Path, loss: LossSpec, rows: list[Row]) -> float:
    learner = TinkerLearner(service, LoraConfig(r=4), 7, "gradients", folder, {})
    if loss.name == "given":
        rows = [replace(row, credits=(row.advantage,) * len(row.mask)) for row in rows]
    ((before,),) = await learner.logprobs([SHORT])
    await learner.forward_backward(rows, loss, TOTALS)
    params = OptimiserParams(0.02 * STEEP, max_grad_norm=None, eps=STEEP, weight_decay=0.0)
    await learner.update(params)
    ((after,),) = await learner.logprobs([SHORT])
    return after - before


async def main(url: str, name: str, folder: Path) -> None:
    model = ModelConfig(name=name, backend="tinker", base_url=url, loss_reduction="mean")
    service = Service(model, "gradients")
    found = {
        loss: {rows: await change(service, folder, spec, SETS[rows]) for rows in SETS}
        for loss, spec in LOSSES.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
