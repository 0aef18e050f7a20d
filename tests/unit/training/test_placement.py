"""How the work is laid out on a machine."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from groupwise.core.errors import ConfigError, UsageError
from groupwise.engine.models import machine
from groupwise.training import placement
from groupwise.training.config import load_config
from groupwise.training.loops.rl_prepare import planned_sizes, training_layout


def test_whole_rollouts_have_room():
    limited = {"type": "environment", "max_turns": 3, "max_rollout_length": 500}
    config = load_config({"model": {"name": "tiny"}, "rollout": limited}).config
    assert placement.choose_layout(config, longest_prompt=12).key_length == 512


def give_device(monkeypatch, device, memory=80 << 30):
    monkeypatch.setattr("groupwise.engine.models.machine.choose_device", lambda: device)
    monkeypatch.setattr("groupwise.engine.models.machine.describe_processor", lambda device: device)
    monkeypatch.setattr("groupwise.engine.models.probes.free_memory", lambda device: memory)
    monkeypatch.setattr("groupwise.engine.models.machine.has_bfloat16", lambda device: False)


def processes(monkeypatch, *, cores=4, size=10**9, device="cpu", **sections) -> int:
    """How many are chosen on such a machine, for a model of that size."""
    monkeypatch.setattr(placement, "available_cores", lambda: cores)
    monkeypatch.setattr("groupwise.engine.models.plan.all_parameters", lambda model: size)
    give_device(monkeypatch, device)
    config = load_config({"model": {"name": "tiny"}, **sections}).config
    return placement.choose_layout(config, longest_prompt=12).processes


def test_the_number_of_processes_follows_cores_and_step_size(monkeypatch):
    step = {"prompts_per_step": 4, "num_generations": 8}
    assert processes(monkeypatch, cores=2, training=step) == 2
    assert processes(monkeypatch, cores=4, training=step) == 4
    assert processes(monkeypatch, cores=64, training=step) == 4
    assert processes(monkeypatch, cores=64, run={"threads": 3}, training=step) == 3
    huge = {"prompts_per_step": 64, "num_generations": 16}
    assert processes(monkeypatch, cores=64, training=huge) == placement.MAX_PROCESSES


def test_one_process_where_several_would_not_pay(monkeypatch):
    assert processes(monkeypatch, cores=1) == 1
    assert processes(monkeypatch, run={"threads": 1}) == 1
    assert processes(monkeypatch, size=placement.SMALL_MODEL - 1) == 1
    assert processes(monkeypatch, size=placement.SMALL_MODEL) > 1
    assert processes(monkeypatch, lora=None) == 1
    assert processes(monkeypatch, device="cuda") == 1
    small = {"prompts_per_step": 2, "num_generations": 4}
    assert processes(monkeypatch, training=small) == 1
    monkeypatch.setattr("sys.platform", "darwin")
    assert processes(monkeypatch) == 1


def test_the_configured_number_of_processes_is_used_or_refused(monkeypatch):
    for count in (1, 3):
        assert processes(monkeypatch, cores=1, size=1, lora=None, run={"processes": count}) == count
    with pytest.raises(ConfigError, match=r"run\.processes is 3(.|\n)* cuda"):
        processes(monkeypatch, device="cuda", run={"processes": 3})
    assert processes(monkeypatch, device="cuda", run={"processes": 1}) == 1
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="darwin"):
        processes(monkeypatch, run={"processes": 2})


def test_threads_and_slots_are_divided(monkeypatch):
    monkeypatch.setattr(placement, "available_cores", lambda: 5)
    settings = {"training": {"prompts_per_step": 4, "num_generations": 8}, "run": {"processes": 2}}
    layout = placement.choose_layout(
        load_config({"model": {"name": "tiny"}, **settings}).config, 12
    )
    assert (layout.threads, layout.threads_each, layout.all_threads) == (5, 2, 4)
    assert (layout.slots, layout.all_slots) == (16, 32)


@pytest.mark.parametrize(("memory", "rows", "expected"), [
    (80 << 30, (8, 8), 64), (80 << 30, (5, 4), 24), (80 << 30, (2, 2), 8), (80 << 30, (64, 8), 256), (1 << 30, (64, 8), 152),
    (1 << 20, (64, 8), 8),
])  # fmt: skip
def test_a_gpu_has_slots_by_its_memory(monkeypatch, memory, rows, expected):
    """512 tokens of 1,024 numbers of 4 bytes are 2 MiB, of which 0.3 GiB hold 153."""
    give_device(monkeypatch, "cuda", memory)
    monkeypatch.setattr("groupwise.engine.models.footprint.cached_numbers", lambda sizes: 1024)
    training = {"prompts_per_step": rows[0], "num_generations": rows[1]}
    config = load_config({"model": {"name": "tiny"}, "training": training}).config
    layout = placement.choose_layout(config, 512 - config.sampler.max_completion_length)
    assert (layout.key_length, layout.slots) == (512, expected)
    asked = load_config({"model": {"name": "tiny"}, "sampler": {"max_num_seqs": 300}}).config
    assert placement.choose_layout(asked, 12).slots == 300


@pytest.mark.parametrize(("mib", "sections", "expected"), [
    (80 << 10, {}, 65_536), (80, {}, 16_384), (80, {"sampler": {"url": "http://127.0.0.1:1", "engine": "vllm"}}, 32_768),
    (180, {}, 32_768), (180, {"training": {"gradient_checkpointing": True}}, 65_536), (1, {}, 4096),
    (80 << 10, {"training": {"max_tokens_per_microbatch": 500}}, 500),
])  # fmt: skip
def test_a_gpu_has_micro_batches_by_its_memory(monkeypatch, mib, sections, expected):
    give_device(monkeypatch, "cuda", mib << 20)
    config = load_config({"model": {"name": "tiny"}, **sections}).config
    assert placement.choose_layout(config, 12).max_tokens_per_microbatch == expected


@pytest.mark.parametrize(("gpus", "expected"), [(1, 8192), (2, 16_384)])
def test_a_learner_shares_its_gpu_with_a_server_only_if_there_is_no_other(
    monkeypatch, gpus, expected
):
    give_device(monkeypatch, "cuda", 80 << 20)
    monkeypatch.setattr("groupwise.engine.models.machine.gpu_count", lambda: gpus)
    sampler = {"engine": "vllm", "vllm_python": "/opt/vllm/bin/python"}
    config = load_config({"model": {"name": "tiny"}, "lora": None, "sampler": sampler}).config
    assert placement.choose_layout(config, 12).max_tokens_per_microbatch == expected


AHEAD = {"distributed": {"samplers": 1}, "training": {"max_off_policy_steps": 1}}
"""A run that samples a step while it learns from the one before."""


@pytest.mark.parametrize("lora", [{}, None])
def test_a_sampler_shares_the_only_gpu_and_the_plan_knows_both(monkeypatch, lora):
    give_device(monkeypatch, "cuda", 900 << 20)
    config = load_config({"model": {"name": "tiny"}, "lora": lora, **AHEAD}).config
    layouts = []
    for gpus in (1, 2):
        monkeypatch.setattr("groupwise.engine.models.machine.gpu_count", lambda gpus=gpus: gpus)
        layouts.append(training_layout(config, 12))
    shared, apart = layouts
    assert (shared.shares_gpus, apart.shares_gpus) == (True, False)
    assert (shared.processes, shared.samplers, shared.slots) == (2, 1, apart.slots)
    assert shared.max_tokens_per_microbatch < apart.max_tokens_per_microbatch
    assert (placement.first_gpu(shared), placement.first_gpu(apart)) == (0, 1)
    both, learner = (planned_sizes(config, layout).memory for layout in layouts)
    fewer = replace(shared, slots=shared.slots // 2)
    half = planned_sizes(config, fewer).memory.server_learning
    assert both.server_sampling == both.server_learning > half > 600
    assert (learner.server_learning, learner.keys_and_values) == (0, 0)


@pytest.mark.parametrize(
    ("gpus", "sections", "hint"),
    [
        (1, {"distributed": {"samplers": 1}}, "training.max_off_policy_steps: 1"),
        (1, {**AHEAD, "distributed": {"samplers": 2}}, "Ask for fewer"),
        (2, {**AHEAD, "distributed": {"learners": 3, "samplers": 1}}, "Ask for fewer"),
    ],
)
def test_too_few_gpus_are_refused(monkeypatch, gpus, sections, hint):
    give_device(monkeypatch, "cuda")
    monkeypatch.setattr("groupwise.engine.models.machine.gpu_count", lambda: gpus)
    config = load_config({"model": {"name": "tiny"}, **sections}).config
    with pytest.raises(ConfigError, match=r"needs [234] GPUs on this machine") as caught:
        placement.choose_layout(config, 12)
    assert hint in str(caught.value)


@pytest.mark.parametrize("backend", ["unsloth", "tunix", "tinker"])
def test_a_training_server_computes_with_no_other_backend(backend: str) -> None:
    config = load_config({"model": {"name": "tiny", "backend": backend}}).config
    with pytest.raises(UsageError, match=f"model.backend is {backend}"):
        placement.refuse_on_server(config)


def test_the_layout_of_a_tinker_service_names_it() -> None:
    model = {"name": "tiny", "backend": "tinker", "base_url": "http://127.0.0.1:1"}
    layout = placement.choose_layout(load_config({"model": model}).config, 100)
    assert (layout.processes, layout.samplers, layout.device) == (1, 0, "cpu")
    assert layout.key_length >= 100
    assert "http://127.0.0.1:1" in layout.processor


@pytest.mark.parametrize(
    ("device", "sampler", "seeded"),
    [
        ("cuda", {"vllm_python": "/opt/vllm/bin/python"}, False),
        ("cuda", {"vllm_python": "/opt/vllm/bin/python", "seeded": True}, True),
        ("cpu", {"vllm_python": "/opt/vllm/bin/python"}, True),
        ("cuda", {"url": "http://127.0.0.1:8000"}, True),
        ("cpu", {"url": "http://127.0.0.1:8000", "seeded": False}, False),
        ("cpu", {"engine": "sglang", "url": "http://127.0.0.1:30000"}, False),
    ],
)
def test_an_own_server_on_a_gpu_and_sglang_are_sent_no_seeds(monkeypatch, device, sampler, seeded):
    give_device(monkeypatch, device)
    model = {"name": "tiny", "dtype": "bfloat16"}
    given = {"model": model, "sampler": {"engine": "vllm", **sampler}}
    assert placement.choose_layout(load_config(given).config, 100).seeded is seeded


def test_tf32_keeps_weights_in_float32(monkeypatch):
    config = load_config({"model": {"name": "tiny", "dtype": "tf32"}}).config
    monkeypatch.setattr("torch.cuda.is_tf32_supported", lambda: True)
    give_device(monkeypatch, "cuda")
    layout = placement.choose_layout(config, 12)
    assert (layout.dtype, layout.tf32, layout.products_dtype) == ("float32", True, "tf32")
    give_device(monkeypatch, "cpu")
    with pytest.raises(ConfigError, match=r"model\.dtype is tf32"):
        placement.choose_layout(config, 12)


@pytest.mark.parametrize(("free", "sections", "frees"), [
    (1 << 40, {}, False), (1 << 20, {}, True), (1 << 20, {"training": {"max_off_policy_steps": 1}}, False),
    (1 << 20, {"distributed": {"samplers": 1}}, False),
    (1 << 20, {"sampler": {"engine": "vllm", "url": "http://127.0.0.1:8000"}}, False),
])  # fmt: skip
def test_a_sampler_frees_its_cache_where_memory_is_short(monkeypatch, free, sections, frees):
    give_device(monkeypatch, "cuda", free)
    monkeypatch.setattr("groupwise.engine.models.machine.gpu_count", lambda: 2)
    config = load_config({"model": {"name": "tiny"}, **sections}).config
    assert training_layout(config, 12).frees_cache is frees


@pytest.mark.parametrize(
    ("device", "dtype", "lora", "refused"),
    [
        ("cuda", "float32", {}, "model.dtype is float32, but"),
        ("cuda", "auto", {}, "model.dtype is auto, which is float32 on this GPU"),
        ("cuda", "bfloat16", {}, ""),
        ("cuda", "float32", None, ""),
        ("cpu", "float32", {}, ""),
    ],
)
def test_an_own_server_on_a_gpu_computes_no_adapters_in_float32(
    monkeypatch, device, dtype, lora, refused
):
    give_device(monkeypatch, device)
    sampler = {"engine": "vllm", "vllm_python": "/opt/vllm/bin/python"}
    given = {"model": {"name": "tiny", "dtype": dtype}, "lora": lora, "sampler": sampler}
    config = load_config(given).config
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        placement.choose_layout(config, 100)


def test_one_process_learns_where_servers_sample(monkeypatch):
    monkeypatch.setattr(placement, "available_cores", lambda: 8)
    sampler = {"engine": "vllm", "url": "http://127.0.0.1:1"}
    config = load_config({"model": {"name": "tiny"}, "sampler": sampler}).config
    assert placement.choose_layout(config, 20).processes == placement.most_processes(config) == 1


def test_a_process_computes_in_tf32_only_for_runs_that_ask_for_it(monkeypatch):
    monkeypatch.setattr(placement, "prepare_process", lambda threads: None)
    layout = placement.choose_layout(load_config({"model": {"name": "tiny"}}).config, 20)
    placement.apply_layout(replace(layout, tf32=True))
    assert not machine.exact_products(torch.float32)
    placement.apply_layout(layout)
    assert machine.exact_products(torch.float32), "what comes after the run"
