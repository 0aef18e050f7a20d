"""The model card: what it contains, what it must not contain, and that its code loads the weights next to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from groupwise.engine.models.bundled import tiny_folder
from groupwise.engine.models.card import WeightsLocation, model_card
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.engine.models.load import load_model
from groupwise.engine.models.lora import AdaptedModel
from groupwise.engine.models.lora_config import new_lora_config
from groupwise.engine.models.tokenizer import load_tokenizer
from groupwise.runs.folder import CLIENTS, RunFolder
from groupwise.runs.records import EvaluationRecord

IDS = torch.tensor([[7, 8, 9, 30, 31, 4]])


def run_folder(runs: Path, facts: dict[str, Any] | None = None, **config: Any) -> Path:
    given = {
        "model": {"name": "lab/base", "revision": None},
        "algorithm": {"type": "grpo", "beta": 0.04},
        "data": {"dataset_name": None},
        "callbacks": ["loss_logging"],
        "run": {"license": None, "dir": str(runs)},
        **config,
    }
    noted = {"kind": "rl", "task": "sums", "examples": 1000, **(facts or {})}
    with RunFolder.create(runs, "my-run", given, noted) as run:
        for step, reward in ((0, 0.5), (4, 0.6), (8, 0.7)):
            name = f"step-{step}" if step else "before"
            record = EvaluationRecord(step, name, f"my-run@{step}", {"reward": reward})
            run.store.add_evaluation(record)
    return runs / "my-run"


@pytest.fixture
def weights(tmp_path) -> Path:
    """The folder of an adapter, as far as the card looks at it."""
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def front(card: str) -> dict[str, Any]:
    return YAML(typ="safe").load(card.split("---\n")[1])


def test_the_front_matter_of_a_model_card(tmp_path, weights):
    run = run_folder(tmp_path / "runs", run={"license": "apache-2.0", "dir": "x"})
    assert front(model_card(run, weights, 8)) == {
        "base_model": "lab/base", "library_name": "peft", "license": "apache-2.0", "pipeline_tag": "text-generation",
        "tags": ["groupwise", "rl", "grpo"],
    }  # fmt: skip
    local = run_folder(tmp_path / "local", model={"name": "/models/mine", "revision": None})
    told = front(model_card(local, weights, 8, merged=True))
    assert not {"license", "base_model"} & told.keys()
    assert told["library_name"] == "transformers"


def test_a_run_of_clients_has_no_task(tmp_path, weights):
    card = model_card(run_folder(tmp_path / "runs", {"task": CLIENTS, "task_file": ""}), weights, 8)
    assert card.count("prompts and rewards of a training server's clients") == 2
    assert f"`{CLIENTS}`" not in card


def test_names_in_it_are_names_whatever_they_hold(tmp_path, weights):
    name = "r |\n\n![x](http://tracker/p.png)\n# owned <b>"
    run = run_folder(tmp_path / "runs", {"task": f"`{name}"})
    interval = {"value": 0.5}
    held_out = {
        "prompts": 3, "before": {name: interval}, "after": {name: interval}, "change": interval,
    }  # fmt: skip
    card = model_card(run, weights, 8, results={"held_out": held_out})
    prose = re.sub("`[^`\\n]*`", "", card.split("```")[0])
    assert re.findall(r"(?m)^# .*|(?<!\\)!\[x\]|(?<!\\)<b>", prose) == ["# my-run"]
    row = next(line for line in card.splitlines() if "owned" in line and line.startswith("|"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


def test_it_names_no_path_and_no_secret(tmp_path, weights):
    run = run_folder(
        tmp_path / "runs",
        model={"name": str(tmp_path / "base"), "revision": None},
        data={"dataset_name": str(tmp_path / "rows.jsonl"), "columns": {"a": "~/b/c.txt"}},
        task={
            "word_list": "/home/me/words.txt", "api_key": "sk-123", "deep": ["/a/b/"], "url": "https://me:passw0rd@host.org/x",
        },
        sampler={"stop": ["</answer>", "/", "\n/x/y"]},
    )  # fmt: skip
    card = model_card(run, weights, 8, location=WeightsLocation("final"))
    assert str(tmp_path) not in card
    assert not re.search(r"/home|sk-123|/a/b|~/|passw0rd", card)
    for kept in ("words.txt", "rows.jsonl", '"</answer>"', '"/"', '"\\n/x/y"', "c.txt"):
        assert kept in card
    assert "loss_logging" not in card


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_its_code_loads_the_weights(tmp_path, monkeypatch, kind):
    config = ModelConfig(name=str(tiny_folder()))
    (tmp_path / "base").symlink_to(tiny_folder())
    folder = tmp_path / "final"
    folder.mkdir()
    base: Any = load_model(config, "float32")
    adapted = AdaptedModel(base, new_lora_config(LoraConfig(r=4, alpha=8)))
    adapted.add("policy", trainable=True, seed=1)
    for parameter in adapted.parameters("policy").values():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), adapted.using("policy" if kind == "adapter" else None) as acting:
        expected = acting(IDS).logits
    with torch.no_grad():
        plain = base(IDS).logits
    load_tokenizer(config).save_pretrained(folder)
    if kind == "adapter":
        adapted.save("policy", folder)
        assert not torch.allclose(expected, plain)
    else:
        load_model(config, "float32").save_pretrained(folder)
    run = run_folder(tmp_path / "runs", model={"name": str(tmp_path / "base"), "revision": None})
    card = model_card(run, folder, 8, location=WeightsLocation("final"))
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "the card", "exec"), names)
    with torch.no_grad():
        found = names["model"](IDS).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert names["tokenizer"].decode([7]) == load_tokenizer(config).decode([7])
    assert names["model"].get_input_embeddings() is not base.get_input_embeddings()
