"""Runs of `groupwise rl` with the backend tunix: two devices, a resume, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from groupwise.build import training_parts
from groupwise.config import load_config
from groupwise.errors import ConfigError, ModelError, UsageError
from groupwise.loops.rl_start import RlResult, rl
from groupwise.machine_layout import choose_layout
from groupwise.notebook.record import Record
from groupwise.sft_config import load_sft_config
from tests.tunix_models import described, model_of, write_model

pytestmark = pytest.mark.timeout(400)


class Digits:
    """A task that a random model can get better at."""

    def get_rl_dataset(self, config: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"count to {number}"} for number in range(12)]

    def get_reward_funcs(self, config: Any, tokenizer: Any) -> list[Any]:
        return [digits]


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


def values(folder: Path, **model: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model_of("gemma3")), "backend": "tunix", **model},
        "lora": {"r": 8, "alpha": 16},
        "sampler": {"max_completion_length": 12},
        "algorithm": {"type": "grpo", "beta": 0.05},
        "training": {"max_steps": 4, "prompts_per_step": 2, "num_generations": 8, "learning_rate": 0.02, "num_iterations": 2,
                     "lr_scheduler_type": "constant"},
        "run": {"dir": str(folder), "name": "r", "save_steps": 2},
    }  # fmt: skip


def adapter(result: RlResult) -> bytes:
    return (result.folder / "final" / "adapter_model.safetensors").read_bytes()


def rewards(result: RlResult) -> list[float]:
    return [value for _, value in Record(result.folder).metrics("reward")["reward"]]


@pytest.mark.parametrize(
    "mesh", [pytest.param([1, 1], marks=pytest.mark.soak(suite="tunix")), [2, 1]]
)
@pytest.mark.usefixtures("divided")
def test_a_run_that_is_gone_on_with_is_equal_to_the_bit(tmp_path: Path, mesh: list[int]) -> None:
    whole = rl(values(tmp_path / "whole", mesh=mesh), Digits())
    cut = values(tmp_path / "cut", mesh=mesh)
    cut["training"]["max_steps"] = 2
    rl(cut, Digits())
    longer = rl(values(tmp_path / "cut", mesh=mesh), Digits(), resume_from="r@2")
    assert adapter(whole) == adapter(longer)
    assert list((whole.folder / "checkpoints" / "step-4").rglob("orbax"))


@pytest.mark.usefixtures("divided")
def test_two_devices_divide_the_work(tmp_path: Path) -> None:
    """What they come to is what one comes to, but for rounding."""
    alone = rl(values(tmp_path / "alone", mesh=[1, 1]), Digits())
    for mesh in ([2, 1], [1, 2]):
        together = rl(values(tmp_path / str(mesh), mesh=mesh), Digits())
        assert rewards(together) == pytest.approx(rewards(alone), abs=0.02)
        theirs, ours = (load(adapter(each)) for each in (alone, together))
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, atol=2e-3, err_msg=name)


@pytest.mark.parametrize(
    "family", ["gemma3", pytest.param("llama", marks=pytest.mark.soak(suite="tunix"))]
)
def test_layers_may_be_computed_again(family: str, tmp_path: Path) -> None:
    """Which changes nothing but the memory."""
    results: list[RlResult] = []
    for again in (False, True):
        given = values(tmp_path / str(again), name=str(model_of(family, layers=2)))
        given["training"] |= {"gradient_checkpointing": again, "max_steps": 2}
        results.append(rl(given, Digits()))
    kept, computed = map(rewards, results)
    assert computed == pytest.approx(kept, abs=0.02)
    one, other = (load(adapter(each)) for each in results)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, atol=2e-3, err_msg=name)
    assert any(value.any() for name, value in other.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora": None}, "trains adapters"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout is 0.1"),
        ({"run": {"processes": 2}}, "model.mesh"),
        ({"run": {"server": "http://127.0.0.1:1"}}, "run.server is"),
        ({"algorithm": {"type": "grpo", "adaptive_kl": True}}, "compile the loss anew"),
    ],
)
def test_what_has_no_effect_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({**values(tmp_path), **changes})


def test_other_commands_compute_with_torch(tmp_path: Path) -> None:
    model = {"name": str(model_of("gemma3")), "backend": "tunix"}
    with pytest.raises(ConfigError, match="not supervised"):
        load_sft_config({"model": model})
    config = load_config(values(tmp_path)).config
    with pytest.raises(UsageError, match="this command computes with torch"):
        training_parts(config, choose_layout(config, 20), "r", tmp_path)
    with pytest.raises(ConfigError, match="mesh is"):
        load_config({"model": {"name": "tiny", "mesh": [2, 1]}})


def refused(folder: Path, told: str) -> None:
    given = values(folder / "runs")
    given["model"]["name"] = str(folder / "model")
    with pytest.raises(ModelError, match=told):
        rl(given, Digits())


def test_what_tunix_would_compute_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import tunix_models

    def changed(family: str) -> Any:
        config = described(family)
        if family == "llama":
            config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
        else:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        return config

    monkeypatch.setattr(tunix_models, "described", changed)
    for family, told in (
        ("llama", "positions of this model are scaled"),
        ("gemma3", "layer_types"),
    ):
        folder = tmp_path / family
        write_model(family, folder / "model")
        refused(folder, told)


def test_a_family_that_tunix_has_not_is_refused(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from groupwise.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    refused(tmp_path, "no models of the type 'gpt_neox'; it has: gemma3_text")
