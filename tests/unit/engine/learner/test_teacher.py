"""A teacher in the learner's process:

1. the KL over the vocabulary and its gradient are those of autograd on the exact formula, whatever engine computes them, and however the
   work is cut up; a teacher with padding in its vocabulary is compared without it;
2. its log-probabilities are those of its model after its own prompt;
3. the divergence falls if it is followed, and rises with the sign flipped;
4. a moving average follows the policy by its rate, and a checkpoint restores it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.algorithms.registry import make
from groupwise.core.types import OptimiserParams, Row
from groupwise.engine.learner.engine import TransformersEngine
from groupwise.engine.learner.native.engine import NativeEngine
from groupwise.engine.learner.teacher import Teacher
from groupwise.engine.learner.teacher_weights import average_teacher, model_teacher
from groupwise.engine.learner.weights import TrainedAdapter, TrainedModel
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.native.weights import native_model
from groupwise.engine.models.tiny import tiny_model

FULL = make("distillation", {"form": "full_vocabulary"}).loss_spec()
TOTALS = {"policy": 40.0, "distillation": 40.0}
STEP = OptimiserParams(learning_rate=0.02, max_grad_norm=None)


def teacher_model() -> Any:
    """Another model with the same tokens, surer of them, and with two logits more."""
    model: Any = tiny_model(hidden_size=24, layers=1, seed=9)
    model.resize_token_embeddings(model.config.vocab_size + 2)
    with torch.no_grad():
        model.get_input_embeddings().weight[:-2].mul_(20)
    return model


def of_another_model(_: Any = None) -> Teacher:
    model = teacher_model()
    weights = TrainedModel(model)
    return Teacher(TransformersEngine(weights, packing=True, gradient_checkpointing=False))


def natively(_: Any = None) -> Teacher:
    model = teacher_model()
    native = native_model(model)
    assert native is not None
    weights = TrainedModel(model)
    return Teacher(NativeEngine(native, weights, packing=True, gradient_checkpointing=False))


def taught(make_rows) -> list[Row]:
    """Rows of which some have prompts of the teacher's own."""
    rows = [replace(row, advantage=0.0, scale=1.0) for row in make_rows(9)]
    return [
        replace(row, teacher_prompt_ids=(7, 8, *row.prompt_ids)) if index % 2 else row
        for index, row in enumerate(rows)
    ]


def logprobs(model: Any, row: Row) -> torch.Tensor:
    """Of all tokens at each place of the completion, at the row's temperature."""
    start = len(row.prompt_ids) - 1
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    logits = model(ids).logits[0, start:-1].float()
    return (logits[:, : tiny_model().config.vocab_size] / row.temperature).log_softmax(-1)


def expected_kl(policy: Any, teacher: Any, rows: list[Row]) -> torch.Tensor:
    total = torch.zeros(())
    for row in rows:
        own = logprobs(policy, row)
        with torch.no_grad():
            theirs = logprobs(teacher, row.as_seen_by_teacher)
        kl_T = (own.exp() * (own - theirs)).sum(-1)
        total = total + (kl_T * torch.tensor(row.mask)).sum()
    return total


@pytest.mark.parametrize("make_teacher", [of_another_model, natively])
@pytest.mark.parametrize("max_tokens", [4096, 30])
async def test_all_weights_get_the_exact_gradient(
    make_learner, make_rows, make_teacher, max_tokens
):
    rows = taught(make_rows)
    model = tiny_model(seed=4)
    wanted_kl = expected_kl(model.requires_grad_(True), teacher_model(), rows)
    (wanted_kl / 40).backward()
    learner = make_learner("full", make_teacher=make_teacher, max_tokens=max_tokens)
    sums = await learner.forward_backward(rows, FULL, TOTALS)
    assert sums["distillation_kl"] == pytest.approx(wanted_kl.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        found = learner._parameters[name].grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)


async def test_plain_matrices_and_modules_agree(make_learner, make_rows):
    gradients, rows = [], taught(make_rows)
    for kind in ("adapter", "modules"):
        learner = make_learner(kind, make_teacher=of_another_model)
        await learner.forward_backward(rows, FULL, TOTALS)
        gradients.append({name: p.grad for name, p in learner._parameters.items()})
    for name, found in gradients[0].items():
        torch.testing.assert_close(found, gradients[1][name], rtol=1e-4, atol=1e-6)


async def test_logprobs_are_those_after_the_teachers_prompt(make_learner, make_rows):
    rows = taught(make_rows)
    learner = make_learner("adapter", make_teacher=of_another_model)
    found = await learner.logprobs(rows, "teacher")
    model = teacher_model().eval()
    for row, values in zip(rows, found, strict=True):
        start = len(row.as_seen_by_teacher.prompt_ids) - 1
        ids = torch.tensor([[*row.as_seen_by_teacher.prompt_ids, *row.completion_ids]])
        logits = model(ids).logits[0, start:-1] / row.temperature
        own = logits.log_softmax(-1).gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(values), own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [True, False])
def test_dropout_with_which_an_adapter_was_trained_does_not_slow_a_teacher(
    tmp_path, caplog, average
):
    dropping = AdaptedModel(tiny_model(), new_lora_config(LoraConfig(r=2, alpha=2, dropout=0.1)))
    trained = TrainedAdapter(dropping, seed=1)
    trained.save(tmp_path)
    if average:
        teacher = average_teacher(trained, 0.1, "float32", packing=True)
    else:
        config = ModelConfig(name="tiny", adapter=str(tmp_path))
        teacher = model_teacher(config, "float32", "cpu", packing=True)
    assert isinstance(teacher.engine, NativeEngine)
    assert "dropout" not in caplog.text


@pytest.mark.parametrize(("sign", "falls"), [(1, True), (-1, False)])
async def test_divergence_falls_unless_the_sign_is_flipped(make_learner, make_rows, sign, falls):
    rows = taught(make_rows)
    learner = make_learner("full", make_teacher=of_another_model)
    divergences: list[float] = []
    for _ in range(4):
        totals = {name: sign * value for name, value in TOTALS.items()}
        sums = await learner.forward_backward(rows, FULL, totals)
        divergences.append(sums["distillation_kl"])
        await learner.update(STEP)
    assert divergences == sorted(divergences, reverse=falls)
    assert abs(divergences[-1] / divergences[0] - 1) > 0.02


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_moving_average_follows_and_is_restored(make_learner, make_rows, tmp_path, kind):
    def learner_of(path_rate: float) -> Any:
        learner = make_learner(kind)
        learner._teacher = average_teacher(learner._weights, path_rate, "float32", packing=True)
        return learner

    rows = taught(make_rows)
    learner = learner_of(0.25)
    start = {name: p.detach().clone() for name, p in learner._parameters.items()}
    policy_before = await learner.logprobs(rows)
    loss = make("grpo", {}).loss_spec()
    learning = [replace(row, advantage=1.0) for row in rows]
    await learner.forward_backward(learning, loss, {"policy": 40.0})
    await learner.update(STEP)
    average = learner._teacher.average._average
    for name, parameter in learner._parameters.items():
        wanted = start[name] + 0.25 * (parameter.detach() - start[name])
        torch.testing.assert_close(average[name].detach(), wanted)
    teacher_logprobs = await learner.logprobs(rows, "teacher")
    assert teacher_logprobs != policy_before

    await learner.save(str(tmp_path))
    restored = learner_of(0.25)
    restored.load(str(tmp_path))
    assert await restored.logprobs(rows, "teacher") == teacher_logprobs
