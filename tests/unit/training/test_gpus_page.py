"""`docs/how-to/gpus.md`: its config, and the memory that it names, for a GPU that is not here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

import groupwise
from groupwise.core.settings.tree import copy_plain, parse_yaml
from groupwise.engine.models.tiny import tiny_tokenizer
from tests.unit.training.test_placement import give_device

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "gpus.md"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the config of Qwen3-4B and no weights."""
    folder = tmp_path / "Qwen3-4B"
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    thinking = "{% if enable_thinking is defined %}{% endif %}"
    tokenizer.chat_template = f"{tokenizer.chat_template}{thinking}"
    tokenizer.save_pretrained(folder)
    return folder


def planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, *words: str
) -> dict[str, Any]:
    """The plan of the page's config, with changes from the command line, on one GPU with 79 GiB free."""
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    config: dict[str, Any] = copy_plain(parse_yaml(found[1]))
    config["model"]["name"] = str(model)
    del config["task"]  # the problems are on the hub
    give_device(monkeypatch, "cuda", 79 << 30)
    monkeypatch.setattr("groupwise.engine.models.machine.has_bfloat16", lambda device: True)
    monkeypatch.setattr("groupwise.engine.models.machine.gpu_count", lambda: 1)
    for word in words:
        (section, key), value = word.partition("=")[0].split("."), int(word.partition("=")[2])
        config.setdefault(section, {})[key] = value
    done = groupwise.rl({**config, "run": {"dir": str(tmp_path)}}, "math", dry_run=True)
    return done.summary["plan"]


def test_a_sampler_beside_the_learner_takes_what_the_page_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    text = PAGE.read_text()
    command = re.search(r"math (distributed\.samplers=1 .*)", text)
    numbers = re.search(r"that is ([\d,]+)\s+MiB, and `total` is ([\d,]+)", text)
    assert command is not None
    assert numbers is not None
    plan = planned(monkeypatch, tmp_path, model, *command[1].split())
    memory = plan["memory_mib"]
    assert plan["layout"]["shares_gpus"]
    assert memory["server_learning"] == memory["server_sampling"]
    assert [f"{memory[key]:,}" for key in ("server_sampling", "total")] == [*numbers.groups()]
    assert memory["total"] < 0.9 * 79 * 1024


def test_the_memory_that_the_page_names_is_the_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    text = PAGE.read_text()
    plan = planned(monkeypatch, tmp_path, model)
    layout = plan["layout"]
    assert (layout["slots"], layout["max_tokens_per_microbatch"]) == (256, 8192)
    named = {
        part: int(mib.replace(",", ""))
        for part, mib in re.findall(r"\| `(\w+)` \| ([\d,]+) ", text)
    }
    assert named == {part: mib for part, mib in plan["memory_mib"].items() if part in named}
    left_out = plan["memory_mib"].keys() - named.keys()
    assert sum(plan["memory_mib"][part] for part in left_out - {"update"}) == 0
