"""The real Tinker client over the small model, one action at a time, in a process of its own.

Reads one JSON object a line, {"do": the name of a function here, …its arguments}, and writes {"result": …}, or {"error": …}. Clients and
calls live from line to line, so that a test can do things to the server between two of them.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]

TEXT = [11, 12, 13, 14, 15, 16, 17, 18]
PROMPT = [21, 22, 23]
held: dict[str, Any] = {}


def methods() -> tuple[str, dict[str, list[str]]]:
    """The version, and the public methods of each kind of client."""
    kinds = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
    signatures = {
        kind.__name__: sorted(
            {
                name.removesuffix("_async")
                for name, value in inspect.getmembers(kind)
                if callable(value) and not name.startswith("_")
            }
        )
        for kind in kinds
    }
    return tinker.__version__, signatures


def connect(url: str, key: str) -> None:
    held["client"] = tinker.ServiceClient(base_url=url, api_key=key)


def create(rank: int = 4, seed: int = 1, unembed: bool = True, base: str = "tiny") -> str:
    held["training"] = (
        held["client"]
        .create_lora_training_client(base, rank=rank, seed=seed, train_unembed=unembed)
        .result()
    )
    return held["training"].get_info().model_id


def forward_backward(shift: int = 0) -> float:
    return _begun(shift).result().metrics["loss:sum"]


def optim_step(rate: float = 0.02) -> float:
    adam = types.AdamParams(learning_rate=rate)
    return held["training"].optim_step(adam).result().metrics["grad_norm"]


def policy_losses() -> dict[str, Any]:
    """The value of each loss on one rollout whose ratios are known, and of one of the client's own."""
    training, word = held["training"], TEXT[:2]
    teacher = _datum(PROMPT + word, weights=[0.0, 0.0, 2.0, 1.0])
    now = training.forward([teacher], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    data = [_rollout(word, [value - 1.0 for value in now[-2:]], 1.0)]  # the ratio is e
    losses = {
        name: training.forward_backward(data, name, config).result().metrics["loss:sum"]
        for name, config in {
            "importance_sampling": None,
            "ppo": None,
            "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
            "dro": {"beta": 0.5},
        }.items()
    }
    marks = [0.0] * (len(PROMPT) - 1) + [1.0] * len(word)
    inputs: dict[str, Any] = {**data[0].loss_fn_inputs, "sequence_ratio_mask": marks}
    marked = types.Datum(data[0].model_input, inputs)
    losses["gspo"] = training.forward_backward([marked], "gspo").result().metrics["loss:sum"]

    def squares(data: Any, logprobs: Any) -> Any:
        return sum((each**2).sum() for each in logprobs), {}

    custom = training.forward_backward_custom([teacher], squares).result().metrics["loss:sum"]
    return {"losses": losses, "now": now, "custom": custom}


def distil(steps: int) -> dict[str, Any]:
    """Learn the likeliest tokens of the base in place of each token of a text, as recipes of distillation do, and ask for them again."""
    import torch

    prompt = types.ModelInput.from_ints(TEXT)
    params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=1)
    teacher = held["client"].create_sampling_client(base_model="tiny")
    taught = teacher.sample(prompt, 1, params, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    top, drawn = taught.result().topk_prompt_logprobs, taught.result().sequences[0].topk_logprobs
    ids = torch.tensor([[token for token, _ in place] for place in top[1:]])
    weights = torch.tensor([[value for _, value in place] for place in top[1:]]).softmax(-1)
    sparse = torch.full((len(TEXT) - 1, 9), -1)
    sparse[2, :3] = ids[2]
    named = types.TensorData.from_torch_sparse(sparse, pad_value=-1)
    scored = teacher.sample(prompt, 1, params, target_prompt_logprobs=named).result()
    model_input = types.ModelInput.from_ints(TEXT[:-1])
    # The second is a prompt without credit whose targets are all 0, and then sparse.
    weights[:2] = 0.0
    padded: dict[str, Any] = {
        "target_tokens": torch.zeros_like(ids),
        "weights": torch.zeros_like(weights),
    }
    padded["target_tokens"][4], padded["weights"][4] = ids[4], weights[4]
    full: dict[str, Any] = {"target_tokens": ids, "weights": weights}
    data = [types.Datum(model_input, full), types.Datum(model_input, padded)]
    assert data[1].loss_fn_inputs["weights"].sparse_crow_indices is not None
    adam, losses, outputs = types.AdamParams(learning_rate=0.002), [], []
    for _ in range(steps):
        learning = held["training"].forward_backward(data, "cross_entropy").result()
        outputs = outputs or learning.loss_fn_outputs
        losses.append(learning.metrics["loss:sum"])
        held["training"].optim_step(adam).result()
    return {
        "first": top[0],
        "top": [[value for _, value in place] for place in top[1:]],
        "drawn": drawn,
        "named": scored.target_prompt_logprobs.to_torch()[2, :3].tolist(),
        "shapes": [output["logprobs"].shape for output in outputs],
        "logprobs": outputs[0]["logprobs"].to_torch().tolist(),
        "weights": weights.tolist(),
        "losses": losses,
    }


def begin(steps: int) -> None:
    """Have so many steps under way, each with a text of its own."""
    adam = types.AdamParams(learning_rate=0.02)
    held["calls"] = [(_begun(step), held["training"].optim_step(adam)) for step in range(steps)]


def losses() -> list[float]:
    """Of the steps under way, when they are done."""
    results = [(call.result(), update.result()) for call, update in held["calls"]]
    return [computed.metrics["loss:sum"] for computed, _ in results]


def logprobs() -> list[float]:
    """Of the first step, asked for once more."""
    return held["calls"][0][0].result().loss_fn_outputs[0]["logprobs"].data


def sampler() -> None:
    held["sampler"] = held["training"].save_weights_and_get_sampling_client().result()


def sample(seed: int) -> list[list[int]]:
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=seed)
    drawn = held["sampler"].sample(
        types.ModelInput.from_ints(PROMPT), num_samples=4, sampling_params=params
    )
    return [each.tokens for each in drawn.result().sequences]


def prompt_logprobs() -> list[float | None]:
    return held["sampler"].compute_logprobs(types.ModelInput.from_ints(TEXT)).result()


def save(name: str) -> str:
    return held["training"].save_state(name).result().path


def load(path: str, optimiser: bool) -> None:
    training = held["training"]
    (training.load_state_with_optimizer if optimiser else training.load_state)(path).result()


def create_from(path: str) -> None:
    client = held["client"]
    held["training"] = client.create_training_client_from_state_with_optimizer(path).result()


def rest(method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of the REST client; what it answers as JSON."""
    response = getattr(held["client"].create_rest_client(), method)(*arguments, **options).result()
    return None if response is None else response.model_dump(mode="json")


def save_for(name: str, ttl: int | None, kind: str = "state") -> str:
    """Save under a name, to expire after so many seconds."""
    training = held["training"]
    save = training.save_state if kind == "state" else training.save_weights_for_sampler
    return save(name, ttl_seconds=ttl).result().path


def sampler_of(path: str) -> None:
    held["sampler"] = held["client"].create_sampling_client(model_path=path)


def tokenizer(folder: str, base: str) -> list[list[int]]:
    """Of both clients, as they find it from this working folder: each encodes a word."""
    os.chdir(folder)
    sampling = held["client"].create_sampling_client(base_model=base)
    return [each.get_tokenizer().encode("word") for each in (held["training"], sampling)]


def bases() -> dict[str, int | None]:
    """The bases of the server, with the longest sample of each."""
    models = held["client"].get_server_capabilities().supported_models
    return {each.model_name: each.max_context_length for each in models}


def close() -> None:
    held.pop("client").close("success").result()


def _begun(shift: int) -> Any:
    tokens = [token + shift for token in TEXT]
    weights = [0.0, 2.0] + [1.0] * (len(TEXT) - 3)
    return held["training"].forward_backward([_datum(tokens, weights=weights)], "cross_entropy")


def _rollout(tokens: list[int], sampled: list[float], advantage: float) -> Any:
    before = [0.0] * (len(PROMPT) - 1)
    return _datum(
        PROMPT + tokens,
        logprobs=before + sampled,
        advantages=before + [advantage] * len(tokens),
    )


def _datum(tokens: list[int], **inputs: Any) -> Any:
    inputs_by_name: Any = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs_by_name
    )


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the client prints must not be read as an answer
    for line in sys.stdin:
        command = json.loads(line)
        try:
            do, arguments = globals()[command.pop("do")], command.pop("arguments", ())
            answer = {"result": do(*arguments, **command)}
        except Exception as error:  # noqa: BLE001 — told to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
