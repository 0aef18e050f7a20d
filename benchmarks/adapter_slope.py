"""How much of an adapter's change arrives: `python -m benchmarks.adapter_slope`.

An adapter is trained by ten updates at each learning rate. Then every adapted layer of the model gets its real inputs, with the adapter and
without, in several arithmetics over the same bfloat16 base, and the slope of the realised change on the exact one (float64) is taken: 1
where the adapter acts in full, 0 where rounding swallows it. `sampler` and `learner` are Groupwise's own products. `peft` is peft's own
layer, which TRL trains and samples with: its factors and the low-rank product are float32, but they are added to a base output that was
rounded already, and the sum is rounded again. `merged` has the adapter in the base weights. Prints the median over all layers with their
range; `--store` keeps both with the name of the machine. A few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from benchmarks.step import RESULTS, config_of, machine, random_prompt, slug
from benchmarks.work import Workload
from groupwise.algorithms.registry import make
from groupwise.core.types import OptimiserParams, Row
from groupwise.engine.learner.gradient_flow import native_computations, slope
from groupwise.engine.learner.torch_learner import TorchLearner
from groupwise.engine.learner.weights import TrainedAdapter
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.machine import prepare_process
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import native_model

RATES = (1e-6, 1e-5, 1e-4)
UPDATES = 10
WORK = Workload((60, 60), 4, 24)

Spread = dict[str, float]
"""The `median` over all layers, the `least` and the `most`."""


def main() -> None:
    """Train, measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    prepare_process(torch.get_num_threads())
    found: dict[str, dict[str, Spread]] = {}
    for rate in RATES:
        print(f"\nlearning rate {rate:g}")
        kinds = found[f"{rate:g}"] = {kind: spread(each) for kind, each in slopes(rate).items()}
        for kind, over in kinds.items():
            print(f"  {kind:<8} {over['median']:6.3f}  ({over['least']:.3f} … {over['most']:.3f})")
    if given.store:
        described = machine()
        file = RESULTS / f"adapter-slope-{slug(described)}.json"
        file.write_text(json.dumps({"machine": described, "slopes": found}, indent=2) + "\n")
        print(f"stored in {file}")


def spread(values: list[float]) -> Spread:
    """Over all layers."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def slopes(rate: float) -> dict[str, list[float]]:
    """The slope of every layer, by who computes it, after training at this rate."""
    config = config_of(WORK, "bfloat16")
    assert config.lora is not None
    model = load_model(config.model, "bfloat16")
    adapted = AdaptedModel(model, new_lora_config(config.lora))
    weights = TrainedAdapter(adapted, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        learner = TorchLearner(
            weights,
            run="slope",
            publish_folder=Path(folder),
            max_tokens_per_microbatch=4096,
            seed=0,
        )
        asyncio.run(_train(learner, rate))
    native = native_model(model)
    assert native is not None
    native.pack()
    inputs, factors = _inputs(adapted), adapted.low_rank("policy")
    kinds: dict[str, list[float]] = {"sampler": [], "learner": [], "peft": [], "merged": []}
    with torch.no_grad():
        for path, layer in adapted.layers.items():
            base = cast("nn.Linear", layer.get_base_layer())
            after = factors[path]
            before = replace(after, up_OR=torch.zeros_like(after.up_OR))
            ways = {
                **native_computations(native, path),
                "peft": partial(by_peft, base),
                "merged": partial(merged, base),
            }
            for kind, compute in ways.items():
                kinds[kind].append(slope(compute, inputs[path], before, after))
    return kinds


def by_peft(base: nn.Linear, x_NI: Tensor, factors: Factors) -> Tensor:
    """By peft's layer, with factors in float32, as `get_peft_model` makes them where nobody says otherwise; TRL 1.16 does not."""
    layer = PeftLinear(base, "policy", LoraConfig(), r=len(factors.down_RI))
    layer.scaling["policy"] = factors.scaling
    layer.lora_A["policy"].weight = nn.Parameter(factors.down_RI.float())
    layer.lora_B["policy"].weight = nn.Parameter(factors.up_OR.float())
    return layer(x_NI)


def merged(base: nn.Linear, x_NI: Tensor, factors: Factors) -> Tensor:
    """With the adapter in the base weights, rounded as they are."""
    change_OI = factors.scaling * factors.up_OR @ factors.down_RI
    return F.linear(x_NI, (base.weight.float() + change_OI).to(base.weight.dtype), base.bias)


async def _train(learner: TorchLearner, rate: float) -> None:
    loss = make("dr_grpo", {}).loss_spec()
    for number in range(UPDATES):
        rng = random.Random(number)
        rows = [
            Row(
                tuple(random_prompt(draw, length, number)),
                tuple(rng.randrange(10, 40_000) for _ in range(WORK.new_tokens)),
                (1,) * WORK.new_tokens,
                (-5.0,) * WORK.new_tokens,
                (-1.0) ** member,
                1.0,
            )
            for draw, length in enumerate(WORK.prompts)
            for member in range(WORK.members)
        ]
        rows = [
            replace(row, sampling_logprobs=found)
            for row, found in zip(rows, await learner.logprobs(rows), strict=True)
        ]
        await learner.forward_backward(rows, loss, {"policy": float(WORK.sampled)})
        await learner.update(OptimiserParams(learning_rate=rate))


def _inputs(adapted: AdaptedModel) -> dict[str, Tensor]:
    """What every adapted layer reads while the model reads a text."""
    found: dict[str, Tensor] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda _module, arguments, _output: found.update({path: arguments[0].flatten(0, 1)})

    hooks = [layer.register_forward_hook(keep(path)) for path, layer in adapted.layers.items()]
    with torch.no_grad(), adapted.using("policy") as model:
        model(input_ids=torch.tensor([random_prompt(0, 256, 0)]))
    for hook in hooks:
        hook.remove()
    return found


if __name__ == "__main__":
    main()
