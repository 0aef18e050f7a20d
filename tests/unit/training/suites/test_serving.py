"""The values of the placeholders in braces, and how many GPUs a model needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.engine.models.tiny import tiny_model
from groupwise.runs.folder import RunFolder
from groupwise.training.suites import serving
from groupwise.training.suites.serving import Weights


@pytest.fixture
def run(tmp_path) -> Path:
    config = {"model": {"name": "tiny", "adapter": "elsewhere"}, "run": {}}
    with RunFolder.create(tmp_path, "r", config, {"task": "t"}) as made:
        return made.path


def test_weights_in_the_folder_of_a_run_know_their_model(run):
    folder = run / "benchmarks/mine/step-2/files"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    weights = Weights.of(folder)
    assert weights.base().name == "tiny"
    assert weights.base().adapter is None
    words = ("{policy}", "--base={base}", "{port}", "{gpus}")
    filled = [serving._fill_placeholders(word, weights, run, 81) for word in words]
    assert filled == [str(folder), "--base=tiny", "81", "1"]


def test_an_adapter_is_merged_where_that_is_asked_for(run, tmp_path):
    from safetensors.torch import load_file, save_file

    layer = "model.layers.0.self_attn.q_proj"
    weight = dict(tiny_model().named_parameters())[f"{layer}.weight"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    rank, (rows, columns) = 1, weight.shape
    tensors = {
        f"base_model.model.{layer}.lora_A.weight": weight.new_ones(rank, columns).float(),
        f"base_model.model.{layer}.lora_B.weight": weight.new_ones(rows, rank).float(),
    }
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny", "layers_to_transform": [0],
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = Weights.of(adapter, run)
    first = serving._fill_placeholders("{merged}", weights, tmp_path, 81)
    assert (
        serving._fill_placeholders("--model={merged}", weights, tmp_path, 81) == f"--model={first}"
    )
    merged = load_file(Path(first) / "model.safetensors")[f"{layer}.weight"].float()
    assert (merged - weight.float() - 2.0).abs().max() < 0.02  # alpha / r times ones
    assert (Path(first) / "tokenizer.json").is_file()
