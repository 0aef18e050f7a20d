"""Distillation, in whole runs of the tiny model:

1. a larger model teaches it: the divergence falls; a replay and a resume give the same bits;
2. an endpoint of vLLM or SGLang teaches it, by its most probable tokens or by the sampled ones; the record has its numbers, so that a
   replay needs no endpoint;
3. the policy itself teaches it, reading more: from a template, from the task, and as a moving average that a resume restores;
4. other tokens, a prompt that cannot be written, and a policy that would learn from itself are refused before a model is loaded;
5. an endpoint that does not answer ends the run, or costs rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import groupwise
from groupwise.core.errors import ConfigError, EndpointError, UsageError
from groupwise.core.types import Example, Rollout
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.runs.store import Store
from groupwise.training.review.replay import replay
from tests.fake_sglang_server import SglangServer
from tests.fake_vllm_server import VllmServer, refusal
from tests.integration.toy_run import TOY, config, what_must_be_equal

PROMPT = "{prompt} letters of {wanted}"
FULL = {"type": "distillation", "form": "full_vocabulary"}
TOP_K = {"type": "distillation", "form": "top_k", "top_k": 4}
SAMPLED = {"type": "distillation"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model with the tiny model's tokens, which knows what it wants."""
    folder = tmp_path_factory.mktemp("teacher")
    model: Any = tiny_model(hidden_size=24, layers=1, seed=9)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[VllmServer, SglangServer])
def server(request: pytest.FixtureRequest, teacher: Path) -> Iterator[VllmServer]:
    with request.param(folder=teacher) as found:
        yield found


def settings(
    runs: Path, algorithm: dict[str, Any], teacher: dict[str, Any] | None, **training: Any
) -> Any:
    return {
        **config(runs, **{"max_steps": 3, "lr_scheduler_type": "constant", **training}),
        "algorithm": algorithm,
        "teacher": teacher,
        "eval": {"before_and_after": False},
    }


def trained(runs: Path, *sections: Any, task: Any = TOY, **training: Any) -> Path:
    assert groupwise.rl(settings(runs, *sections, **training), task).exit_code == 0
    return runs / "toy"


def rollouts(folder: Path) -> list[Rollout]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [
            rollout
            for record in store.steps()
            for group in store.groups(record.step)
            for rollout in group.rollouts
        ]


def divergences(folder: Path) -> list[float]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [value for _, value in store.metrics(["distillation/kl"])["distillation/kl"]]


def replays_exactly(folder: Path) -> bool:
    return replay("toy", runs_dir=folder.parent).exact


def endpoint(server: VllmServer, **more: Any) -> dict[str, Any]:
    engine = "sglang" if isinstance(server, SglangServer) else "vllm"
    return {"type": "endpoint", "engine": engine, "url": server.url, "name": "tiny", **more}


def test_a_larger_model_teaches(teacher: Path, tmp_path: Path) -> None:
    steps = settings(tmp_path, FULL, {"name": str(teacher)}, learning_rate=0.02, max_steps=8)
    assert groupwise.rl({**steps, "lora": None}, TOY).exit_code == 0
    folder = tmp_path / "toy"
    kl = divergences(folder)
    assert kl[-1] < 0.8 * kl[0]
    assert replays_exactly(folder)


@pytest.mark.parametrize("algorithm", [SAMPLED, TOP_K])
def test_an_endpoint_teaches(
    server: VllmServer, teacher: Path, tmp_path: Path, algorithm: Any
) -> None:
    folder = trained(tmp_path / "asked", algorithm, endpoint(server, prompt=PROMPT))
    for rollout in rollouts(folder):
        (segment,) = rollout.segments
        assert segment.teacher_logprobs is not None
        best = [len(pairs) for pairs in segment.teacher_top]
        assert best == [4] * len(segment.token_ids if "top_k" in algorithm else ())
        assert segment.learner_logprobs is not None
        assert len(segment.learner_logprobs) == len(segment.token_ids)
    asked = len(server.asked)
    assert replays_exactly(folder)
    assert len(server.asked) == asked
    if algorithm == SAMPLED:
        alike = {"name": str(teacher), "dtype": "float32"}
        here = trained(tmp_path / "here", SAMPLED, {**alike, "prompt": PROMPT})
        assert divergences(here) == pytest.approx(divergences(folder), rel=1e-3)


@pytest.mark.parametrize(
    ("weights", "algorithm"), [("current", SAMPLED), ("start", SAMPLED), ("ema", FULL)]
)
def test_the_policy_teaches_itself_and_continues_after_a_resume(
    tmp_path: Path, algorithm: Any, weights: str
) -> None:
    sections = algorithm, {"type": "self", "weights": weights, "prompt": PROMPT}
    whole = trained(tmp_path / "whole", *sections)
    ids = tiny_tokenizer()("letters of abcdefghijklm")["input_ids"]
    assert all(rollout.teacher_prompt_ids[-len(ids) :] == (*ids,) for rollout in rollouts(whole))
    cut = tmp_path / "cut"
    trained(cut, *sections, max_steps=2)
    longer = settings(cut, *sections)
    assert groupwise.rl(longer, TOY, resume_from="toy@2").exit_code == 0
    assert what_must_be_equal(cut / "toy") == what_must_be_equal(whole)
    assert replays_exactly(whole)


class Hinting:
    """The toy task with a teacher's prompt of its own."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, str]]:
        return [{"prompt": f"write {letter}:", "hint": "small"} for letter in "abcd"]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        def constant(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
            log_extra("feedback", [f"too {len(text)}" for text in completions])
            return [float(index == 0) for index in range(len(completions))]

        return [constant]

    def teacher_prompt(self, example: dict[str, Any]) -> str:
        return f"{example['prompt']} {example['hint']}"


def prompts_of(folder: Path) -> list[str | None]:
    decode: Any = tiny_tokenizer().decode
    return [
        None if rollout.teacher_prompt_ids is None else decode(rollout.teacher_prompt_ids)
        for rollout in rollouts(folder)
    ]


def test_the_task_writes_the_teachers_prompt(tmp_path: Path) -> None:
    folder = trained(tmp_path, SAMPLED, {"type": "self"}, task=Hinting(), max_steps=1)
    assert {str(text)[-6:] for text in prompts_of(folder)} == {" small"}


def test_a_template_shows_feedback_and_what_another_member_did_well(tmp_path: Path) -> None:
    template = {"type": "self", "prompt": "{prompt} {demonstration} {feedback}"}
    folder = trained(tmp_path, SAMPLED, template, task=Hinting(), max_steps=1)
    all_rollouts, texts = rollouts(folder), prompts_of(folder)
    for rollout, text in zip(all_rollouts, texts, strict=True):
        if rollout.member == 0:  # nobody else did well
            assert text is None
        else:
            best = next(r for r in all_rollouts if (r.draw, r.member) == (rollout.draw, 0))
            assert text is not None
            assert text.endswith(f"too {len(rollout.completion)}")
            assert best.completion.strip() in text


def of_other_tokens(folder: Path) -> str:
    tiny_model().save_pretrained(folder)
    vocabulary = {**tiny_tokenizer().get_vocab(), "a": 7, "b": 8}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def test_an_unusable_teacher_is_refused_with_the_reason(tmp_path: Path) -> None:
    refused = {
        r"tokens differ \(.* here and .* there": {"name": of_other_tokens(tmp_path)},
        r"names \{solution\}.* It can name: .*wanted": {"type": "self", "prompt": "{solution}"},
        "know nothing more": {"type": "self"},
    }
    for reason, teacher in refused.items():
        with pytest.raises(UsageError, match=reason):
            groupwise.rl(settings(tmp_path, SAMPLED, teacher), TOY, dry_run=True)
    for algorithm, teacher, reason in (
        (FULL, {"type": "endpoint", "url": "http://127.0.0.1:1"}, "no endpoint gives"),
        (TOP_K, {"name": "tiny"}, "needs an endpoint of vLLM or SGLang"),
        ({"type": "grpo"}, {"name": "tiny"}, "learns from a"),
        (SAMPLED, None, "learns from a"),
        (SAMPLED, {"name": "tiny", "url": "http://127.0.0.1:1"}, "belongs to endpoint"),
    ):
        with pytest.raises(ConfigError, match=reason):
            groupwise.rl(settings(tmp_path, algorithm, teacher), TOY, dry_run=True)


def test_an_endpoint_with_other_tokens_is_refused(server: VllmServer, tmp_path: Path) -> None:
    async def interfere(path: str, body: Any) -> Any:
        if path != "/tokenize":
            return None
        from starlette.responses import JSONResponse

        return JSONResponse({"tokens": [1, 2, 3]})

    server.interfere = interfere
    try:
        with pytest.raises(UsageError, match="has other tokens than the policy"):
            trained(tmp_path, SAMPLED, endpoint(server))
    finally:
        server.interfere = None


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_an_endpoint_that_fails_ends_the_run_or_costs_rollouts(
    server: VllmServer, tmp_path: Path, on_failure: str
) -> None:
    async def interfere(path: str, body: Any) -> Any:
        texts = body.get("prompt") or body.get("input_ids") or [[]]
        fails = path in ("/completions", "/generate") and len(texts[0]) % 2
        return refusal(400, "no") if fails and len(server.asked) > 8 else None

    server.interfere = interfere
    asked = endpoint(server, on_failure=on_failure)
    try:
        if on_failure == "stop":
            with pytest.raises(EndpointError, match="no"):
                trained(tmp_path, SAMPLED, asked)
            return
        folder = trained(tmp_path, SAMPLED, asked)
    finally:
        server.interfere = None
    outcomes = {rollout.outcome: rollout.reason for rollout in rollouts(folder)}
    assert str(outcomes["failed"]).startswith("teacher: ")
    assert "scored" in outcomes


def test_templates_are_filled_in_the_last_user_message() -> None:
    from groupwise.tasks.rollouts.teacher_prompts import TeacherPrompts

    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q {answer}"},
    ]
    tokenizer: Any = tiny_tokenizer()
    prompts = TeacherPrompts(tokenizer, 100, template="{prompt}! {answer}")
    example = Example(0, messages, {"answer": "42"})
    prompts.check([example])
    text = tokenizer.decode(prompts._fitting_ids(example, prompts._prompt(example, {})))
    assert "q {answer}! 42" in text
