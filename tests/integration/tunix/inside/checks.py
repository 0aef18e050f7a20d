"""Parts of the worker by themselves, run by the Python of Tunix's environment: a list of checks with their arguments, as JSON, to a list of
what they tell on stdout."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import divided
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

PACKAGE = Path(__file__).parents[4] / "groupwise"
runpy.run_path(str(PACKAGE / "engine/backends/tunix/worker/main.py"))["take_package"]()

from groupwise.algorithms.dapo import Dapo  # noqa: E402
from groupwise.core.types import GroupRequest, Row, SamplingParams  # noqa: E402
from groupwise.engine.backends.tunix.messages import Open  # noqa: E402 — there once the package is
from groupwise.engine.backends.tunix.worker import families, forward, head, sampler  # noqa: E402
from groupwise.engine.backends.tunix.worker.adapter import Adapted  # noqa: E402
from groupwise.engine.backends.tunix.worker.learner import _loss_inputs  # noqa: E402
from groupwise.engine.backends.tunix.worker.service import Service, _make_mesh  # noqa: E402

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
LAYERS = [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
RANK, ALPHA = 4, 8
NOT_MERGED = "--xla_disable_hlo_passes=cse_barrier_expander"
"""On a CPU XLA merges what is computed again with what was computed first, as it does for no other device."""


def slopes(folder: str, *steps: str) -> dict[str, dict[str, float]]:
    """Of the realised on the exact change of each output of a layer in bfloat16, when B makes its first step."""
    adapted = _adapted(folder)
    factors = adapted.init_factors(0)
    compute = jax.jit(lambda given: _recorded(adapted, given))
    return {
        weight: {step: _slope(compute, adapted, factors, weight, float(step)) for step in steps}
        for weight in adapted.layers
    }


def _described(folder: str) -> dict[str, Any]:
    """Of a small model, whose file says everything."""
    return json.loads((Path(folder) / "config.json").read_bytes())


def _adapted(folder: str) -> Adapted:
    """In bfloat16, on one device."""
    model, family = families.load(Path(folder), _described(folder), "bfloat16", _make_mesh((1, 1)))
    layers = [f"model.layers.0.{name}" for name in LAYERS]
    return Adapted(model, family, layers, RANK, ALPHA)


def _recorded(adapted: Adapted, factors: Any) -> dict[str, Any]:
    """Inputs and output of each weight, for random tokens."""
    seen: dict[str, Any] = {}
    model = adapted.with_factors(factors, adapted.base)
    head.detach_head(model)
    kinds = {type(each) for _, each in model.iter_modules() if hasattr(each, "w")} | {nnx.Linear}
    own = {kind: kind.__call__ for kind in kinds}

    def watched(self: Any, inputs: Any) -> Any:
        found = own[type(self)](self, inputs)
        seen[".".join(map(str, self.qwix_path)).removeprefix("layers.")] = (inputs, found)
        return found

    tokens = np.random.default_rng(0).integers(2, 100, (32, 48))
    mask = np.broadcast_to(np.tril(np.ones((48, 48), bool)), (32, 48, 48))
    positions = np.broadcast_to(np.arange(48), tokens.shape)
    for kind in kinds:
        kind.__call__ = watched
    try:
        model(tokens, positions, None, mask)
    finally:
        for kind in kinds:
            kind.__call__ = own[kind]
    return seen


def _slope(compute: Any, adapted: Adapted, factors: Any, weight: str, step: float) -> float:
    module, name = weight.rpartition(".")[0], f"{weight}.b"
    signs = jnp.sign(jax.random.normal(jax.random.key(99), factors[name].shape))
    after = {**factors, name: factors[name] + step * signs}
    (inputs, before), (_, moved) = compute(factors)[module], compute(after)[module]
    change = np.float64(after[name]) - np.float64(factors[name])
    exact = _added(adapted, weight, inputs, factors[f"{weight}.a"], change)
    realised = np.float64(moved) - np.float64(before)
    return float((realised * exact).sum() / (exact * exact).sum())


def _added(adapted: Adapted, weight: str, inputs: Any, down: Any, up: Any) -> Any:
    """In float64: inputs [rows, tokens, inputs…] by [inputs…, rank] by [rank, outputs…]; of fused layers they come first."""
    count = np.ndim(down) - 1
    low = np.tensordot(np.float64(inputs), np.float64(down), count)
    found = np.tensordot(low, up, 1) * ALPHA / RANK
    return np.moveaxis(found, 2, 0) if len(adapted.layers[weight]) > 1 else found


def logits(folder: str) -> dict[str, list[float]]:
    """Which share of the logits have no more digits than bfloat16: of the sampler's steps, and of the learner's pieces."""
    shares: dict[str, list[float]] = {"sampler": [], "learner": []}
    drawn, numbers = sampler._draw_tokens, head._piece_numbers

    def noting(kind: str, module: Any, name: str) -> None:
        own = getattr(module, name)

        def noted(logits: Any, *others: Any) -> Any:
            jax.debug.callback(
                lambda share: shares[kind].append(float(share)),
                (logits == logits.astype(jnp.bfloat16)).mean(),
            )
            return own(logits, *others)

        setattr(module, name, noted)

    noting("sampler", sampler, "_draw_tokens")
    noting("learner", head, "_piece_numbers")
    adapted = _adapted(folder)
    factors = adapted.init_factors(0)
    prompt = (5, 9, 7, 30)
    request = GroupRequest(0, prompt, (1, 2), SamplingParams(4, 1.0, ()))
    (first, _), *_ = sampler.Sampler(adapted, factors, 2, 24).generate([request])
    row = Row(prompt, first.token_ids, (1,) * 4, first.logprobs, 0.0, 1.0, 1.0, (0, 0))
    (batch,) = forward.cut([row], 24, 24, 1)
    model = adapted.with_factors(factors, adapted.base)
    jax.block_until_ready(jax.jit(forward.numbers)(model, batch.sequences(102)))
    jax.effects_barrier()
    sampler._draw_tokens, head._piece_numbers = drawn, numbers
    return shares


def draws() -> dict[str, int]:
    """Tokens without weight that are drawn, when numbers fall beside the ends of blocks of which most have none."""
    found = {"drawn": 0, "without weight": 0}
    generator = np.random.default_rng(0)
    search = jax.jit(sampler._search_cumulative)
    for _ in range(4):
        weights_SV = np.zeros((64, 1 << 18), np.float32)
        for row in weights_SV:
            places = generator.choice(len(row), 50, replace=False)
            row[places] = np.exp(-generator.exponential(4, 50))
            row[places[0]] = 1
        ends_SK = np.asarray(_ends_of_blocks(weights_SV))
        ends_S = ends_SK[np.arange(64), generator.integers(0, ends_SK.shape[1], 64)]
        uniforms_S = np.minimum(1, ends_S / ends_SK[:, -1] * np.float32(1 + 1.1e-7))
        tokens_S = np.asarray(search(weights_SV, uniforms_S.astype(np.float32)))
        found["drawn"] += 64
        found["without weight"] += int((weights_SV[np.arange(64), tokens_S] == 0).sum())
    return found


@jax.jit
def _ends_of_blocks(weights_SV: Any) -> Any:
    return weights_SV.reshape(len(weights_SV), -1, sampler.BLOCK).sum(-1).cumsum(-1)


def precision(folder: str) -> dict[str, bool]:
    """Whether products of float32 are asked for in full once a model of a format is open."""
    inputs, found = jnp.ones((2, 2)), dict[str, bool]()
    for dtype in ("float32", "bfloat16"):
        opened = Service()
        opened.do(_order(folder, dtype))
        found[dtype] = "HIGHEST" in jax.jit(jnp.dot).lower(inputs, inputs).as_text()
        opened._scope.close()
    return found


def _order(folder: str, dtype: str, mesh: tuple[int, int] = (1, 1), *, remat: bool = False) -> Open:
    """A model with an adapter on all of its layers, rows of 48 tokens, four together."""
    described = _described(folder)
    layers = [f"model.layers.{each}.{name}" for each in range(described["num_hidden_layers"]) for name in LAYERS]  # fmt: skip
    return Open(
        model=folder, text=described, dtype=dtype, mesh=mesh, remat=remat, layers=tuple(layers), rank=RANK, alpha=ALPHA, seed=0, start=None,
        described={}, run="r", publish_folder=folder, slots=1, key_length=48, max_tokens=192,
    )  # fmt: skip


def recomputed(folder: str, *numbers: int) -> dict[str, dict[str, float]]:
    """For numbers of devices how far gradients differ where layers are computed again, and from those of the first number; their norm, and
    the bytes of each way."""
    found: dict[str, dict[str, float]] = {}
    first: dict[str, Any] = {}
    for devices in numbers:
        (kept, held), (again, less) = (
            _gradient(_order(folder, "float32", (devices, 1), remat=remat))
            for remat in (False, True)
        )
        first = first or kept
        found[str(devices)] = {
            "difference": max(float(abs(again[name] - kept[name]).max()) for name in kept),
            "apart": max(float(abs(first[name] - kept[name]).max()) for name in kept),
            "norm": float(optax.global_norm(kept)),
            "kept": held,
            "again": less,
        }
    return found


def _gradient(order: Open) -> tuple[dict[str, Any], int]:
    """Of some rows by factors of which none is zero, and the bytes that computing it takes besides."""
    opened, loss = Service(), Dapo().loss_spec()
    opened.do(order)
    learner = opened.learner
    learner._factors = {name: value + 0.1 for name, value in learner._factors.items()}
    ids, length = tuple(range(2, 40)), 29
    rows = [Row(ids[:9], ids[9:], (1,) * length, (-3.0,) * length, each / 4, 1.0, 1.0, (each, 0)) for each in range(4)]  # fmt: skip
    (batch,) = learner._cut(rows)
    given = (
        learner._factors,
        learner.adapted.base,
        batch.sequences(learner._vocabulary),
        _loss_inputs(batch),
        {"policy": 0.25},
    )
    compiled = learner._gradient_of(loss).lower(*given).compile()
    _, gradient = compiled(*given)
    opened._scope.close()
    held = compiled.memory_analysis().temp_size_in_bytes
    return {name: np.asarray(value) for name, value in gradient.items()}, held


def shapes(folder: str) -> dict[str, Any]:
    """Loops that are compiled for turns with ever less room, and stop tokens of many numbers; and what is drawn in each."""
    adapted = _adapted(folder)
    served = sampler.Sampler(adapted, adapted.init_factors(0), 2, 64)
    drawn: list[Any] = []
    for room, stops in ((20, (200,)), (19, (200, 201)), (18, ()), (17, (200, 201, 202))):
        params = SamplingParams(room, 1.0, stops)
        ((first, _),) = served.generate([GroupRequest(0, tuple(range(2, 40)), (1, 2), params)])
        drawn.append(first.token_ids)
    fitting = GroupRequest(0, tuple(range(2, 49)), (1, 2), SamplingParams(17, 1.0, ()))
    ((first, _),) = served.generate([fitting])
    return {"compiled": served._loop._cache_size(), "drawn": drawn, "full": len(first.token_ids)}


CHECKS = {each.__name__: each for each in (slopes, logits, draws, precision, shapes, recomputed)}  # fmt: skip

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=2 {NOT_MERGED}"
    divided.divide()
    found = [CHECKS[name](*arguments) for name, *arguments in json.loads(sys.argv[1])]
    print(json.dumps(found))
