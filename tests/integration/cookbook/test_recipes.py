"""Recipes of the cookbook at more length; what passes becomes a table of the documentation (`conftest.py` writes it)."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.integration.cookbook.running import Program
from tests.integration.cookbook.workplace import MODEL
from tests.integration.server.server_process import Server

pytestmark = [pytest.mark.soak(suite="cookbook"), pytest.mark.timeout(3000)]

TO_RIGHT = ("group_size=8", "learning_rate=4e-3", "lora_rank=8", "max_tokens=12")
"""With these the model gets most answers right within eight steps of two questions."""
AGAIN = "behavior_if_log_dir_exists=resume"
ON_POLICY = 1e-3
"""Of log-probabilities that the sampler told from those that the learner finds, in the estimate of their divergence."""


def rises(values: list[float]) -> bool:
    quarter = max(1, len(values) // 4)
    return len(set(values)) > 1 and mean(values[-quarter:]) > mean(values[:quarter])


@pytest.fixture(scope="module")
def rl_loop(workplace: Path, server: Server) -> Program:
    """A whole run, whose last checkpoint is a teacher as well."""
    return Program(
        workplace, server.url, "rl_loop", "batch_size=2", "max_steps=10", *TO_RIGHT
    ).run()


@pytest.mark.recipe("sl_loop", "the loss falls; killed and begun again, it goes on where it was")
def test_sl_loop(workplace: Path, server: Server) -> None:
    options = ("batch_size=8", "learning_rate=1e-2", "lora_rank=8", "save_every=2", "max_steps=12")
    program = Program(workplace, server.url, "sl_loop", *options)
    with program.started():
        program.wait_for_step(4)
    steps = len(program.rows())
    start = program.checkpoints()[-1]["batch"]
    assert 4 <= start <= steps
    program.run()
    assert [int(step) for step in program.metric("step")[steps:]] == list(range(start, 12))
    losses = program.metric("train_mean_nll")
    assert losses[steps] < losses[0]
    assert losses[-1] < 0.3 * losses[0]
    assert program.checkpoints()[-1]["name"] == "final"


@pytest.mark.recipe("rl_loop", "the reward rises")
def test_rl_loop(rl_loop: Program) -> None:
    assert rises(rl_loop.metric("reward/total"))
    assert max(rl_loop.metric("reward/total")) > 0.6


@pytest.mark.recipe(
    "chat_sl.train",
    "the loss falls, here and on the test data; rolling checkpoints; the server is killed in the middle",
)
def test_chat_sl(workplace: Path, server: Server) -> None:
    options = ("batch_size=8", "learning_rate=1e-2", "lora_rank=8", "save_every=4", "eval_every=4")
    rolling = ("rolling_save_every=3", "max_steps=12", AGAIN)
    program = Program(workplace, server.url, "chat_sl.train", *options, *rolling)
    with program.started():
        program.wait_for_step(3)
        server.kill()
        server.begin()
        program.finish()
    losses = program.metric("train_mean_nll")
    assert len(losses) == 12
    assert losses[-1] < 0.3 * losses[0]
    tested = program.metric("test/nll")
    assert tested[-1] < tested[0]
    assert {"000004", "000008", "final"} <= {each["name"] for each in program.checkpoints()}
    assert "Error code: 4" not in program.output.read_text(), "rolling checkpoints are deleted"


@pytest.mark.recipe("sl_basic", "the loss falls")
def test_sl_basic(workplace: Path, server: Server) -> None:
    options = ("learning_rate=1e-2", "lora_rank=8", "max_steps=5", "eval_every=2")
    program = Program(workplace, server.url, "sl_basic", *options).run()
    losses = program.metric("train_mean_nll")
    assert len(losses) == 5
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.recipe("prompt_distillation.train", "the loss of answers without their prompt falls")
def test_prompt_distillation(workplace: Path, server: Server) -> None:
    data = workplace / "distilled.jsonl"
    data.write_text((workplace / "HuggingFaceH4/no_robots/train.jsonl").read_text())
    sizes = (f"file_path={data}", "batch_size=16", "max_steps=6", "eval_every=0")
    options = ("learning_rate=1e-2", "lora_rank=8", AGAIN)
    program = Program(workplace, server.url, "prompt_distillation.train", *sizes, *options).run()
    losses = program.metric("train_mean_nll")
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.recipe("rl_basic", "the reward rises")
def test_rl_basic(workplace: Path, server: Server) -> None:
    builder = (
        "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
        "dataset_builder.batch_size=2",
        "dataset_builder.group_size=8",
        "dataset_builder.renderer_name=qwen3",
        f"dataset_builder.model_name_for_tokenizer={MODEL}",
    )
    options = ("learning_rate=4e-3", "lora_rank=8", "max_tokens=12", "max_steps=8")
    program = Program(workplace, server.url, "rl_basic", *builder, *options).run()
    assert rises(program.metric("env/all/reward/total"))


@pytest.mark.recipe(
    "math_rl.train",
    "the reward rises on policy; killed and begun again, it goes on; the server is killed in the middle",
)
def test_math_rl(workplace: Path, server: Server) -> None:
    sizes = ("env=gsm8k", "groups_per_batch=2", "eval_every=0", "save_every=2", "max_steps=10")
    program = Program(workplace, server.url, "math_rl.train", *sizes, *TO_RIGHT, AGAIN)
    with program.started():
        program.wait_for_step(3)
    steps = len(program.rows())
    start = program.checkpoints()[-1]["batch"]
    assert 2 <= start <= steps
    with program.started():
        program.wait_for_step(5)
        server.kill()
        server.begin()
        program.finish()
    assert [int(step) for step in program.metric("step")[steps:]] == list(range(start, 10))
    assert rises(program.metric("env/all/reward/total"))
    assert max(map(abs, program.metric("optim/kl_sample_train_v2"))) < ON_POLICY


@pytest.mark.recipe("math_rl.train max_steps_off_policy=1", "asynchronous: the reward rises")
def test_asynchronous_math_rl(workplace: Path, server: Server) -> None:
    sizes = ("env=gsm8k", "groups_per_batch=2", "eval_every=0", "max_steps=10")
    late = ("max_steps_off_policy=1", AGAIN)
    program = Program(
        workplace, server.url, "math_rl.train", *sizes, *TO_RIGHT, *late, name="math_rl_async"
    ).run()
    assert rises(program.metric("env/all/reward/total"))
    assert program.checkpoints()[-1]["name"] == "final"


@pytest.mark.recipe("preference.dpo.train", "the loss falls; the chosen answer is preferred")
def test_dpo(workplace: Path, server: Server) -> None:
    options = ("batch_size=8", "learning_rate=4e-3", "max_steps=8", AGAIN)
    program = Program(workplace, server.url, "preference.dpo.train", *options).run()
    losses = program.metric("dpo_loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.8 * losses[0]
    assert program.metric("accuracy")[-1] == 1.0


@pytest.mark.recipe("preference.shorter.train", "groups are compared pair by pair; on policy")
def test_pairs_of_a_group(workplace: Path, server: Server) -> None:
    sizes = ("renderer_name=qwen3", "batch_size=2", "group_size=4", "eval_every=0", "max_steps=3")
    options = ("learning_rate=1e-3", "max_tokens=12", AGAIN)
    program = Program(workplace, server.url, "preference.shorter.train", *sizes, *options).run()
    assert len(program.metric("env/all/reward/total")) == 3
    assert max(map(abs, program.metric("optim/kl_sample_train_v2"))) < ON_POLICY


@pytest.mark.recipe(
    "preference.rlhf.rlhf_pipeline",
    "supervised, then a reward model, then a policy that begins with the one and is judged by the other",
)
def test_rlhf_pipeline(workplace: Path, server: Server) -> None:
    sizes = ("short_name=here", "lora_rank=8", "batch_size=8", "max_steps=3")
    rates = ("sft_learning_rate=4e-3", "rm_learning_rate=1e-2", "rl_max_tokens=12")
    stages = workplace / "runs/rlhf-here"
    program = Program(
        workplace,
        server.url,
        "preference.rlhf.rlhf_pipeline",
        *sizes,
        *rates,
        model_option="base_model",
        logs=stages / "rl",
    ).run()
    assert len(program.metric("env/all/reward/total")) == 3
    assert {path.name for path in stages.iterdir()} == {"sft", "rm", "rl"}
    assert program.checkpoints()[-1]["name"] == "final"


@pytest.mark.recipe(
    "distillation.on_policy_distillation", "the divergence from a trained teacher falls"
)
def test_distillation(workplace: Path, server: Server, rl_loop: Program) -> None:
    teacher = rl_loop.checkpoints()[-1]["sampler_path"]
    sizes = ("dataset=deepmath", "groups_per_batch=2", "eval_every=0", "max_steps=10")
    named = (f"teacher_model={MODEL}", f"teacher_checkpoint={teacher}", AGAIN)
    program = Program(
        workplace, server.url, "distillation.on_policy_distillation", *sizes, *TO_RIGHT, *named
    ).run()
    divergences = program.metric("teacher_kl")
    assert mean(divergences[-2:]) < mean(divergences[:2])


@pytest.mark.recipe(
    "multiplayer_rl.guess_number.train",
    "ten turns; more and more guesses have the right form; on policy",
)
def test_several_turns(workplace: Path, server: Server) -> None:
    sizes = ("renderer_name=qwen3", "batch_size=1", "group_size=8", "eval_every=0", "max_steps=8")
    options = ("learning_rate=4e-3", "max_tokens=12", AGAIN)
    program = Program(
        workplace, server.url, "multiplayer_rl.guess_number.train", *sizes, *options
    ).run()
    turns = program.metric("env/all/turns_per_episode")
    assert min(turns) > 1
    rewards = program.metric("env/all/reward/total")
    shares = [1 + reward / count for reward, count in zip(rewards, turns, strict=True)]
    assert mean(shares[-2:]) > mean(shares[:2]) + 0.1, shares
    assert max(map(abs, program.metric("optim/kl_sample_train_v2"))) < ON_POLICY
    assert program.checkpoints()[-1]["name"] == "final"
