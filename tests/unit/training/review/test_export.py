"""`groupwise runs export`: the contents of the folder, and that files already in it are never damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import groupwise
from groupwise.core.errors import ModelError, RunError, RunNotFoundError, UsageError
from groupwise.engine.models.config import recorded_base
from groupwise.runs.record_files import KINDS
from groupwise.training.evaluation import evaluate as evaluate_module
from groupwise.training.review import export as export_module
from groupwise.training.review.export import CONVERTER_VARIABLE, export
from tests.integration.toy_run import TOY, config
from tests.meanwhile import right_after

CONVERTER = """
import json, pathlib, sys
model, flag, output = sys.argv[1:]
assert flag == "--outfile"
pathlib.Path(output).write_text(json.dumps(sorted(p.name for p in pathlib.Path(model).iterdir())))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of an adapter and one of a whole model."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("runs")
    groupwise.rl(config(place), TOY)
    whole = config(place, max_steps=1) | {"lora": None, "eval": {}}
    whole["run"] |= {"name": "whole"}
    groupwise.rl(whole, TOY)
    return place


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# --- weights


@pytest.mark.parametrize("read", [
    lambda runs, out: export("toy@4", "adapter", out, runs_dir=runs),
    lambda runs, out: export("toy@4", "merged", out, runs_dir=runs),
    lambda runs, _: evaluate_module.evaluate(config(runs), TOY, policy="toy@4"),
])  # fmt: skip
def test_a_checkpoint_that_its_run_prunes_meanwhile_is_named(read, runs, tmp_path, monkeypatch):
    """By whoever reads its weights."""
    checkpoint, elsewhere = runs / "toy/checkpoints/step-4", tmp_path / "moved"
    for module in (export_module, evaluate_module):
        right_after(monkeypatch, module, "find_policy", lambda: checkpoint.rename(elsewhere))
    with pytest.raises(RunNotFoundError, match="step-4 was deleted"):
        read(runs, tmp_path / "out")
    elsewhere.rename(checkpoint)
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_exported_unchanged(runs, tmp_path):
    made = export("toy", "adapter", tmp_path / "out", runs_dir=runs)
    final = runs / "toy/final"
    assert names(tmp_path / "out") == names(final) == set(made.files)
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (final / name).read_bytes()
        assert (tmp_path / "out" / name).stat().st_nlink == 1, "who edits it edits no run"
    assert (made.run, made.step, made.format) == ("toy", 5, "adapter")


def test_a_checkpoint_of_a_server_is_exported_by_its_name_and_any_by_its_folder(runs, tmp_path):
    shutil.copytree(runs / "toy", tmp_path / "runs/toy")
    step, good = tmp_path / "runs/toy/checkpoints/step-4", tmp_path / "checkpoints/good"
    shutil.copytree(step, good)
    (good / "saved.json").write_text(json.dumps({"run": "toy", "step": 4}))
    by_step = export("toy@4", "adapter", tmp_path / "by-step", runs_dir=runs)
    for number, reference in enumerate(("good", str(good), str(step))):
        made = export(reference, "adapter", tmp_path / str(number), runs_dir=tmp_path / "runs")
        assert (made.run, made.step, made.files) == ("toy", 4, by_step.files)


def test_a_checkpoint_gets_tokenizer_and_card_and_nothing_of_the_training(runs, tmp_path):
    made = export("toy@4", "adapter", tmp_path / "out", runs_dir=runs)
    assert set(made.files) == names(runs / "toy/final")
    assert "for 4 steps" in (tmp_path / "out/README.md").read_text()
    there = (tmp_path / "out/adapter_model.safetensors").read_bytes()
    assert there == (runs / "toy/checkpoints/step-4/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("run", "base"), [("toy", "tiny"), ("whole", "whole")])
def test_a_merged_model_stands_alone(runs, tmp_path, run, base):
    export(run, "merged", tmp_path / "out", runs_dir=runs)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model(tokenizer("write a1:", return_tensors="pt")["input_ids"]).logits.isfinite().all()
    card = (tmp_path / "out/README.md").read_text()
    assert "PeftModel" not in card
    assert "A model made from `tiny`" in card
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


def test_gguf_is_made_by_the_converter(runs, tmp_path, monkeypatch):
    program = tmp_path / "llama.cpp/convert_hf_to_gguf.py"
    program.parent.mkdir()
    program.write_text(CONVERTER)
    monkeypatch.setenv(CONVERTER_VARIABLE, str(program.parent))
    made = export("toy", "gguf", tmp_path / "out", runs_dir=runs)
    assert made.files == ("README.md", "toy.gguf")
    assert "model.safetensors" in json.loads((tmp_path / "out/toy.gguf").read_text())
    assert "llama-cli -m toy.gguf" in (tmp_path / "out/README.md").read_text()


# --- the record


# --- the place


def test_an_existing_output_is_replaced_only_with_force(runs, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    export("toy", "jsonl", output, runs_dir=runs)  # an empty one is taken
    assert names(output) == {f"{kind}.jsonl" for kind in KINDS}
    (output / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"is not empty.*--force"):
        export("toy", "merged", output, runs_dir=runs)
    assert (output / "mine.txt").exists()
    export("toy", "adapter", output, runs_dir=runs, force=True)
    assert names(output) == names(runs / "toy/final")


def test_a_failure_leaves_what_was_there(runs, tmp_path):
    output, program = tmp_path / "out", tmp_path / "convert.py"
    program.write_text("raise SystemExit(1)")
    export("toy", "jsonl", output, runs_dir=runs)
    before = names(output)
    with pytest.raises(RunError):
        export("toy", "gguf", output, runs_dir=runs, converter=program, force=True)
    assert names(output) == before


def test_code_of_a_recorded_base_runs_only_with_consent(runs):
    recorded = {"name": "tiny", "trust_remote_code": True, "adapter": "somewhere"}
    with pytest.raises(ModelError, match="--trust-remote-code"):
        recorded_base(recorded)
    found = recorded_base(recorded, trust_remote_code=True)
    assert (found.trust_remote_code, found.adapter) == (True, None)


@pytest.mark.parametrize(("arguments", "told"), [
    ({"to": "jsonl", "dtype": "bfloat16"}, "--dtype has no effect"),
    ({"to": "merged", "converter": Path("x.py")}, "--converter has no effect"), ({"to": "gguf", "converter": Path("none.py")}, "none.py"),
    ({"to": "adapter", "run": "other"}, "'other'"), ({"to": "adapter", "run": "base"}, "'base' is not a run"),
])  # fmt: skip
def test_invalid_exports_are_refused_before_anything_is_written(runs, tmp_path, arguments, told):
    given = {"run": "toy", **arguments}
    with pytest.raises((UsageError, RunNotFoundError), match=told):
        export(output=tmp_path / "out", runs_dir=runs, **given)
    assert not (tmp_path / "out").exists()
