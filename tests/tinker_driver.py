"""The real Tinker client, in a process of its own: it starts threads and leaves connections open, which no other test should meet.

Reads one JSON object a line, {"do": the name of a function here, "url": a server, "key": its key}, and writes what the function returned as
{"result": ...}, or {"error": the class, "message": ...}. `Driver` in `tests/integration/test_tinker_client.py` is the other end.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, cast

os.environ["TINKER_TELEMETRY"] = "0"

import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]

BASE = "letters"
PROMPT = [3, 1, 4]
WORD = [7, 0]
ADAM = types.AdamParams(learning_rate=0.5)


def sft(client: Any) -> dict[str, Any]:
    """Ten steps, every call in flight before the first answer is asked for."""
    training = client.create_lora_training_client(BASE, rank=4, seed=1).result()
    calls = []
    for _ in range(10):
        calls.append(training.forward_backward([teacher()], "cross_entropy"))
        calls.append(training.optim_step(ADAM))
    answers = [call.result() for call in calls]
    losses = [answer.metrics["loss:sum"] for answer in answers[::2]]
    logprobs = answers[0].loss_fn_outputs[0]["logprobs"]
    again = [call.result().metrics for call in calls[:2]]
    return {
        "losses": losses,
        "first": logprobs.data,
        "shape": logprobs.shape,
        "norms": [answer.metrics["grad_norm"] for answer in answers[1::2]],
        "again": again == [answer.metrics for answer in answers[:2]],
    }


def grpo(client: Any) -> dict[str, Any]:
    """Sample, centre the rewards within a group, importance_sampling, and so on; the reward is the share of one letter."""
    training = client.create_lora_training_client(BASE, rank=4).result()
    rewards_of_steps = []
    for step in range(12):
        sampling = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step)
        prompt = types.ModelInput.from_ints(PROMPT)
        drawn = sampling.sample(prompt, num_samples=16, sampling_params=params).result()
        rewards = [each.tokens.count(5) / len(each.tokens) for each in drawn.sequences]
        mean = sum(rewards) / len(rewards)
        rewards_of_steps.append(mean)
        data = [
            rollout(each.tokens, each.logprobs, reward - mean)
            for each, reward in zip(drawn.sequences, rewards, strict=True)
        ]
        learning = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=1.0)).result()
        learning.result()
    return {"rewards": rewards_of_steps}


def policy_losses(client: Any) -> dict[str, Any]:
    """The value of each loss on one rollout whose ratios are known."""
    training = client.create_lora_training_client(BASE, rank=4).result()
    now = training.forward([teacher()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    data = [rollout(WORD, [value - 1.0 for value in now.data[-2:]], 1.0)]  # the ratio is e
    found = {
        name: training.forward_backward(data, name, config).result().metrics["loss:sum"]
        for name, config in {
            "importance_sampling": None,
            "ppo": None,
            "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        }.items()
    }
    return {"losses": found, "now": now.data[-2:]}


def custom(client: Any) -> dict[str, Any]:
    """A loss of the client's own: its gradient comes as a weight for each token."""
    training = client.create_lora_training_client(BASE, rank=4).result()

    def squares(data: Any, logprobs: Any) -> Any:
        return sum((each**2).sum() for each in logprobs), {}

    metrics = training.forward_backward_custom([teacher()], squares).result().metrics
    return {"loss": metrics["loss:sum"]}


def states(client: Any) -> dict[str, Any]:
    """Saved, trained further, and loaded again in three ways."""
    training = client.create_lora_training_client(BASE, rank=4).result()

    def loss(of: Any) -> float:
        return of.forward([teacher()], "cross_entropy").result().metrics["loss:sum"]

    def step() -> None:
        training.forward_backward([teacher()], "cross_entropy").result()
        training.optim_step(ADAM).result()

    step()
    path = training.save_state("one").result().path
    sampler_path = training.save_weights_for_sampler("one").result().path
    saved = loss(training)
    step()
    moved = loss(training)
    training.load_state(path).result()
    back = loss(training)
    fresh = client.create_training_client_from_state_with_optimizer(path).result()
    sampling = client.create_sampling_client(model_path=sampler_path).result()
    whole = types.ModelInput.from_ints(PROMPT + WORD)
    return {
        "path": path,
        "sampler_path": sampler_path,
        "saved": saved,
        "moved": moved,
        "back": back,
        "fresh": loss(fresh),
        "rank": fresh.get_info().lora_rank,
        "base": sampling.get_base_model(),
        "prompt_logprobs": sampling.compute_logprobs(whole).result(),
        "last": sampling.compute_logprobs(whole, prompt_logprobs_last_n=1).result(),
        "taken": refused(lambda: training.save_state("one").result()),
        "absent": refused(lambda: training.load_state(path + "x").result()),
        "for_samplers": refused(lambda: training.load_state(sampler_path).result()),
    }


def refusals(client: Any) -> dict[str, Any]:
    """What is refused, each at once and by name; the training goes on after each."""
    training = client.create_lora_training_client(BASE, rank=4).result()
    sampling = client.create_sampling_client(base_model=BASE).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=2)
    soft = types.Datum(
        model_input=prompt,
        loss_fn_inputs=cast("Any", {"target_tokens": [[1, 2]] * 3, "weights": [[0.5] * 2] * 3}),
    )
    found = {
        "loss": refused(lambda: training.forward_backward([teacher()], "dro").result()),
        "soft": refused(lambda: training.forward_backward([soft], "cross_entropy").result()),
        "external": refused(lambda: training.save_weights_external("x").result()),
        "ttl": refused(lambda: training.save_state("t", ttl_seconds=3600).result()),
        "muon": refused(
            lambda: training.optim_step(types.DimuonParams(learning_rate=0.1)).result()
        ),
        "path": refused(lambda: training.load_state("tinker://nothing").result()),
        "base": refused(lambda: client.create_lora_training_client("gpt-17").result()),
        "topk": refused(
            lambda: sampling.sample(prompt, 1, params, topk_prompt_logprobs=2).result()
        ),
        "runs": refused(lambda: client.create_rest_client().list_training_runs().result()),
        "session": refused(lambda: client.create_rest_client().get_session("s").result()),
    }
    found["after"] = training.optim_step(ADAM).result().metrics
    return found


def wrong_key(client: Any) -> dict[str, Any]:
    return {"error": refused(lambda: client.create_lora_training_client(BASE).result())}


def teacher() -> Any:
    """The prompt does not teach; of the word, the first letter counts twice."""
    return datum(PROMPT + WORD, weights=[0.0, 0.0, 2.0, 1.0])


def rollout(tokens: list[int], logprobs: list[float], advantage: float) -> Any:
    before = [0.0] * (len(PROMPT) - 1)
    return datum(
        PROMPT + tokens,
        logprobs=before + logprobs,
        advantages=before + [advantage] * len(tokens),
    )


def datum(tokens: list[int], **inputs: list[float]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs=cast(
            "Any", {"target_tokens": tokens[1:], **inputs}
        ),  # lists are made tensors
    )


def refused(call: Callable[[], Any]) -> str:
    try:
        return f"not refused: {call()}"
    except Exception as error:  # noqa: BLE001 — whatever the client makes of it is what is tested
        return f"{type(error).__name__}: {error}"


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the client prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            client = tinker.ServiceClient(base_url=asked["url"], api_key=asked["key"])
            answer = {"result": globals()[asked["do"]](client)}
            client.close("success").result()
        except Exception as error:  # noqa: BLE001 — told to the test, which fails
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
