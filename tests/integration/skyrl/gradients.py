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
SHORT = Row(PROMPT, (50,), (1,), (0.0,), 1.0, 1.0)
LONG = Row(PROMPT, (50, *[60] * 11), (1, *[0] * 11), (0.0,) * 12, 1.0, 1.0)
OTHER = Row((44, 45), (51, 52), (1, 1), (0.0, 0.0), 0.5, 1.0)
SETS = {"short": [SHORT], "long": [LONG], "other": [OTHER], "both": [SHORT, OTHER]}
LOSSES = {
    "sft": LossSpec("sft"),
    "ppo": make("dr_grpo", {}).loss_spec(),
    "ppo and kl": make("dr_grpo", {"beta": 0.5}).loss_spec(),
}
STEEP = 100.0
TOTALS = {"sft": 1.0, "policy": 1.0, "kl": 1.0}


async def change(service: Service, folder: Path, loss: LossSpec, rows: list[Row]) -> float:
    learner = TinkerLearner(service, LoraConfig(r=4), 7, "gradients", folder, {})
    ((before,),) = await learner.logprobs([SHORT])
    sampled = [
        replace(row, sampling_logprobs=now, reference_logprobs=tuple(x - 0.5 for x in now))
        for row, now in zip(rows, await learner.logprobs(rows), strict=True)
    ]
    await learner.forward_backward(sampled, loss, TOTALS)
    params = OptimiserParams(2e-5 * STEEP, max_grad_norm=None, eps=STEEP, weight_decay=0.0)
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
