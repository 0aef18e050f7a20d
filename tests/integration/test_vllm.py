"""Whole runs whose completions a server draws that answers as vLLM does:

1. what it samples is what is trained: every step begins at a ratio of 1, the reward rises, and each version is served under its name;
2. a server that is started anew in the middle costs nothing; one that serves something else ends the run before it learns;
3. an interrupted run goes on; a policy is evaluated by the server as by this machine;
4. completions are weighed by what the learner makes of them, unless the config says otherwise; what does not go together is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.config import load_config
from groupwise.errors import ConfigError, EndpointError, PolicyMismatchError, UsageError
from groupwise.models.tiny import tiny_model, tiny_tokenizer
from groupwise.runs.store import Store
from tests.integration.running import STEPS, TOY, config
from tests.vllm_server import VllmServer, refusal

PROCESSED = "processed_logprobs"


@pytest.fixture
def server():
    torch.set_num_threads(1)
    with VllmServer(logprobs_mode=PROCESSED) as running:
        yield running


def settings(runs: Path, *urls: str, **sampler: Any) -> dict[str, Any]:
    made = config(runs)
    made["model"]["dtype"] = "float32"
    made["sampler"] = {
        "engine": "vllm",
        "url": urls[0] if len(urls) == 1 else [*urls],
        "max_completion_length": 6,
        "logprob_tolerance": 0.001,
        **sampler,
    }
    return made


def curve(folder: Path, name: str) -> list[float]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [value for _, value in store.metrics([name])[name]]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_the_server_samples_is_what_is_trained(tmp_path, server, temperature):
    made = settings(tmp_path, server.url, temperature=temperature, min_completion_length=2)
    folder = groupwise.rl(made, TOY).folder
    assert folder
    assert curve(folder, "sampling/ratio_mean") == pytest.approx([1.0] * STEPS, abs=1e-4)
    assert max(curve(folder, "sampling/logprob_gap")) < 1e-4
    assert max(map(abs, curve(folder, "grad_norm"))) > 0
    names = [body["lora_name"] for body in server.bodies("/load_lora_adapter")]
    assert [name.split("-")[2] for name in names] == [f"v{n}" for n in range(STEPS + 1)]
    assert server.adapters == [], "forgotten at the end"
    with Store.open(folder / "run.db", readonly=True) as store:
        groups = [group for step in range(STEPS) for group in store.groups(step)]
    drawn = [segment for group in groups for each in group.rollouts for segment in each.segments]
    assert len({segment.fingerprint for segment in drawn}) == STEPS
    assert {f"groupwise-toy-v{each.policy_version}-{each.fingerprint}" for each in drawn} <= {*names}  # fmt: skip


def test_the_reward_rises(tmp_path):
    """Of a model whose weights are large enough for an adapter to change what it says within seconds."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0 if parameter.dim() == 2 else 1.0)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with VllmServer(logprobs_mode=PROCESSED, folder=folder, name="sharp") as server:
        made = settings(tmp_path, server.url, served_model="sharp")
        made["model"]["name"] = str(folder)
        made["lora"] = {"r": 8, "alpha": 16}
        made["training"] |= {
            "max_steps": 30,
            "prompts_per_step": 4,
            "num_generations": 8,
            "learning_rate": 0.05,
        }
        made["eval"] = {"before_and_after": False}
        trained = groupwise.rl(made, TOY).folder
    assert trained
    rewards = curve(trained, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert max(curve(trained, "sampling/logprob_gap")) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.soak(suite="engine"))])
def test_several_learners_train_as_one_does(tmp_path, server, lag):
    """What the server answers is checked with the first one's model; no other one is asked."""
    folders = []
    for learners in (1, 2):
        made = settings(tmp_path / f"{learners}", server.url)
        made["training"] |= {"lag": lag, "lr_scheduler_type": "constant"}
        made |= {"scale": {"learners": learners}, "eval": {"before_and_after": True}}
        made["run"]["threads"] = 2
        folders.append(groupwise.rl(made, TOY).folder)
    one, two = folders
    for name in ("reward", "loss", "grad_norm", "sampling/ratio_mean"):
        assert curve(two, name) == pytest.approx(curve(one, name), rel=1e-3, abs=1e-4), name
    assert server.adapters == []


def test_with_a_lag_the_earlier_version_is_served(tmp_path, server):
    made = settings(tmp_path, server.url)
    made["training"]["lag"] = 1
    assert groupwise.rl(made, TOY).exit_code == 0


def test_a_server_that_is_started_anew_costs_nothing(tmp_path, server):
    whole = groupwise.rl(settings(tmp_path / "whole", server.url), TOY).folder
    asked = len(server.bodies("/completions"))
    with VllmServer(logprobs_mode=PROCESSED) as fickle:

        async def forgets(path, body):
            if path == "/completions" and len(fickle.bodies("/completions")) == asked // 2:
                fickle.forget()
            return

        fickle.interfere = forgets
        again = groupwise.rl(settings(tmp_path / "again", fickle.url), TOY).folder
    assert whole
    assert again
    assert len(fickle.bodies("/load_lora_adapter")) == STEPS + 2
    assert curve(again, "reward") == curve(whole, "reward")
    assert curve(again, "loss") == curve(whole, "loss")


def test_two_servers_draw_what_one_draws(tmp_path, server):
    whole = groupwise.rl(settings(tmp_path / "one", server.url), TOY).folder
    with VllmServer(logprobs_mode=PROCESSED) as other:
        both = settings(tmp_path / "two", server.url, other.url)
        shared = groupwise.rl(both, TOY).folder
        assert other.bodies("/completions")
    assert whole
    assert shared
    assert curve(shared, "loss") == curve(whole, "loss")


def test_a_run_goes_on_after_its_server_was_lost(tmp_path, server):
    async def fails(path, body):
        fourth = path == "/load_lora_adapter" and "-v3-" in body["lora_name"]
        return refusal(500, "CUDA error") if fourth else None

    made = settings(tmp_path, server.url)
    server.interfere = fails
    with pytest.raises(UsageError, match=r"could not load the adapter .*CUDA error"):
        groupwise.rl(made, TOY)
    server.interfere = None
    server.end()
    server.begin()
    result = groupwise.rl(made, TOY, resume=True)
    assert result.exit_code == 0
    assert result.folder
    assert len(curve(result.folder, "reward")) == STEPS


@pytest.mark.parametrize("learners", [1, 2])
def test_another_base_ends_the_run_before_it_learns(tmp_path, learners):
    with VllmServer(logprobs_mode=PROCESSED, seed=1) as other:
        made = {**settings(tmp_path, other.url), "scale": {"learners": learners}}
        made["run"]["threads"] = learners
        with pytest.raises(PolicyMismatchError, match="serves other weights"):
            groupwise.rl(made, TOY)
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert store.last_step() is None


def test_a_strange_answer_ends_the_run(tmp_path, server):
    def spoilt(answer):
        if len(server.bodies("/completions")) > 20:
            answer["choices"] = []
        return answer

    server.spoil = spoilt
    with pytest.raises(EndpointError, match="answered 0 choices, where one was asked for"):
        groupwise.rl(settings(tmp_path, server.url), TOY)


def test_a_policy_is_evaluated_by_the_server_as_here(tmp_path, server):
    made = settings(tmp_path, server.url)
    groupwise.rl(made, TOY)
    alone = {"max_completion_length": 6, "slots": 8}
    for policy in ("toy", "base"):
        several = {"scale": {"learners": 2}, "run": {**made["run"], "threads": 2}}
        there = groupwise.evaluate({**made, **several}, TOY, policy=policy)
        here = groupwise.evaluate({**made, "sampler": alone}, TOY, policy=policy)
        assert there.rows == here.rows
    assert server.adapters == []


# --- the config


def test_completions_of_a_server_are_weighed_unless_the_config_says_otherwise(tmp_path):
    given = settings(tmp_path, "http://x")
    assert load_config(given).config.algorithm.knobs["importance_sampling_correction"] == "token_truncate"  # fmt: skip
    given["algorithm"] = {"importance_sampling_correction": "none"}
    assert load_config(given).config.algorithm.knobs["importance_sampling_correction"] == "none"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sampler.url=null"], "engine is vllm, but url does not say where"),
        (["sampler.url=[http://x, http://x]"], "url has an address twice"),
        (["sampler.slots=16"], "slots is 16, which has no effect with the engine vllm"),
        (["sampler.enforce_eager=true"], "enforce_eager is true, which has no effect"),
        (["sampler.adapter_folder_there=/x"], "no effect without adapter_folder"),
        (["sampler.engine=torch"], "url has no effect with the engine torch"),
        (["lora=null"], "sampler.engine is vllm, but lora is null: servers take adapters"),
        (["run.processes=2", "run.threads=2"], "run.processes is 2: one process learns"),
        (["run.server=http://y"], "run.server is http://y: that server samples itself"),
        (["model.backend=tunix"], "model.backend is tunix: it samples itself"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, words, told):
    with pytest.raises(ConfigError, match=told):
        load_config(settings(tmp_path, "http://x"), words)
