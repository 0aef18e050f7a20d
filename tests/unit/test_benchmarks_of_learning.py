"""What the benchmarks of learning keep, resume, compare and draw; what they measure is run by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import get_peft_model
from torch import nn

from benchmarks import learning
from benchmarks.adapter_slope import by_peft
from benchmarks.equal_learning import drawn, ratio
from benchmarks.exactness import rounded
from benchmarks.learning import CONFIG, Curve, Study
from benchmarks.trl_side import settings
from groupwise.config import load_config
from groupwise.data.order import example_of_draw
from groupwise.learner.slopes import slope_of
from groupwise.models.config import Dtype, LoraConfig, ModelConfig
from groupwise.models.load import load_model
from groupwise.models.lora import AdaptedModel, ExactLoraLinear, new_lora_config

SETTINGS = {"training.max_steps": 2}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs as they are made, here instead of in processes of their own."""
    monkeypatch.setattr(learning, "apart", lambda *works: [work() for work in works])
    return []


def sides(made: list[tuple[str, int]]) -> dict[str, Callable[[int], Curve]]:
    def side(name: str) -> Callable[[int], Curve]:
        def learn(seed: int) -> Curve:
            made.append((name, seed))
            return {"reward": [0.1 * seed, 0.5], "seconds": [1.0, 3.0]}

        return learn

    return {"a": side("a"), "b": side("b")}


def test_sides_take_turns_and_what_is_there_is_not_made_again(
    made: list[tuple[str, int]], tmp_path: Path
) -> None:
    file = tmp_path / "study.json"
    Study.opened(SETTINGS, file).run(sides(made), 1, None)
    Study.opened(SETTINGS, file).run(sides(made), 2, None)
    assert made == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    stored = json.loads(file.read_text())["curves"]
    assert {side: list(runs) for side, runs in stored.items()} == {
        "a": ["0", "1"],
        "b": ["0", "1"],
    }


def test_a_run_that_failed_costs_no_other(made: list[tuple[str, int]], tmp_path: Path) -> None:
    def fails(_: int) -> Curve:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Study.opened(SETTINGS, tmp_path / "s").run({**sides(made), "b": fails}, 1, None)
    assert list(Study.opened(SETTINGS, tmp_path / "s").curves) == ["a"]


def test_no_run_is_begun_when_time_is_over(
    made: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    Study(SETTINGS, None).run(sides(made), 3, -1.0, together=True)
    assert made == []
    assert "no time is left" in capsys.readouterr().out


def test_runs_of_other_settings_are_not_mixed(made: list[tuple[str, int]], tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    Study.opened(SETTINGS, file).run(sides(made), 1, None)
    with pytest.raises(SystemExit, match="max_steps"):
        Study.opened({"training.max_steps": 3}, file)


def test_pictures_show_the_range_and_the_mean_of_seeds(
    made: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "IMAGES", tmp_path)
    study = Study(SETTINGS, None)
    study.run(sides(made), 3, None, together=True)
    study.draw("picture")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "picture-seconds.svg",
        "picture-step.svg",
    ]
    band, line = learning._drawn("a", study.curves["a"], "seconds")
    assert [x for x, _ in line.points] == [1.0, 4.0]
    assert [y for _, y in line.points] == pytest.approx([0.1, 0.3])
    assert [y for _, y in band.points] == pytest.approx([0.0, 0.2, 0.25, 0.35])


def test_the_ratio_is_of_seeds_that_both_sides_have() -> None:
    def curve(seconds: float) -> Curve:
        return {"reward": [0.0], "seconds": [seconds]}

    curves = {"Groupwise": {"0": curve(2.0), "1": curve(99.0)}, "TRL": {"0": curve(8.0)}}
    assert ratio(Study({}, None, curves)) == pytest.approx(4.0)


def test_trl_gets_the_prompts_of_groupwises_draws() -> None:
    config = load_config(
        CONFIG, ["training.max_steps=2", "training.prompts_per_step=3", "training.seed=4"]
    ).config
    found = drawn(list(range(5)), config)
    assert found == [example_of_draw(draw, 5, 4) for draw in range(6)]
    assert sorted(found[:5]) == list(range(5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_gets_the_settings_of_groupwises_config(tmp_path: Path) -> None:
    changed = {
        "training.seed": 3,
        "training.max_steps": 7,
        "training.prompts_per_step": 5,
        "training.num_generations": 6,
        "training.learning_rate": 3e-6,
        "training.lr_scheduler_type": "cosine",
        "training.warmup_steps": 2,
        "training.weight_decay": 0.03,
        "training.adam_beta1": 0.8,
        "training.adam_beta2": 0.98,
        "training.adam_epsilon": 1e-7,
        "training.max_grad_norm": 0.7,
        "sampler.max_completion_length": 9,
        "sampler.temperature": 0.9,
        "algorithm.epsilon": 0.3,
        "algorithm.beta": 0.02,
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in changed.items()]).config
    theirs: Any = settings(config, str(tmp_path), logging_steps=1)
    names = {
        "prompts_per_step": "gradient_accumulation_steps",
        "max_steps": "max_steps",
    }
    for key, value in changed.items():
        name = key.partition(".")[2]
        assert getattr(theirs, names.get(name, name)) == value, key
    assert theirs.per_device_train_batch_size == 6
    assert theirs.loss_type == config.algorithm.type
    assert theirs.scale_rewards == "none"
    assert not theirs.bf16
    assert not theirs.shuffle_dataset


def test_a_rounded_adapter_loses_small_changes_and_an_exact_one_does_not() -> None:
    torch.manual_seed(0)
    model = load_model(ModelConfig(name="tiny"), "bfloat16", "cpu")
    adapted = AdaptedModel(model, new_lora_config(LoraConfig()))
    adapted.add("policy", trainable=False, seed=0)
    layer = next(iter(adapted.layers.values()))
    down, up = layer.factors("policy")
    up.data = 1e-5 * torch.randn_like(up)
    inputs = torch.randn(256, down.shape[1]).bfloat16()
    exact = layer.scaling["policy"] * (inputs.float() @ down.t()) @ up.t()

    def share(forward: Callable[[ExactLoraLinear, torch.Tensor], torch.Tensor]) -> float:
        with torch.no_grad():
            plain = forward(layer, inputs)
            with adapted.using("policy"):
                changed = forward(layer, inputs)
        return slope_of((changed - plain).double(), exact.double())

    assert share(rounded) < 0.5
    assert 0.8 < share(ExactLoraLinear.forward) < 1.2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_rounds_as_a_rounded_adapter_does(dtype: Dtype) -> None:
    """To the bit: a layer as TRL makes it, as its slope is measured, and as an arm learns with it."""
    path, config = "model.layers.1.mlp.down_proj", ModelConfig(name="tiny")
    adapted = AdaptedModel(load_model(config, dtype, "cpu"), new_lora_config(LoraConfig()))
    adapted.add("policy", trainable=False, seed=0)
    layer = adapted.layers[path]
    down, up = layer.factors("policy")
    up.data = torch.randn(up.shape, generator=torch.Generator().manual_seed(0)) / 10
    theirs: Any = get_peft_model(load_model(config, dtype, "cpu"), new_lora_config(LoraConfig()))
    made = theirs.get_base_model().get_submodule(path)
    for factor, given in ((made.lora_A["default"], down), (made.lora_B["default"], up)):
        assert factor.weight.dtype == torch.float32
        factor.weight.data = given.data
    base = cast("nn.Linear", layer.get_base_layer())
    inputs = torch.randn(64, base.in_features).to(base.weight.dtype)
    with torch.no_grad(), adapted.using("policy"):
        wanted = made(inputs)
        assert not torch.equal(wanted, base(inputs))
        assert torch.equal(by_peft(base, inputs, adapted.low_rank("policy")[path]), wanted)
        assert torch.equal(rounded(layer, inputs), wanted)


def test_a_rounded_adapter_computes_what_an_exact_one_does_in_float32() -> None:
    model = load_model(ModelConfig(name="tiny"), "float32", "cpu")
    adapted = AdaptedModel(model, new_lora_config(LoraConfig()))
    adapted.add("policy", trainable=False, seed=0)
    layer = next(iter(adapted.layers.values()))
    _, up = layer.factors("policy")
    up.data = torch.randn_like(up)
    inputs = torch.randn(8, layer.factors("policy")[0].shape[1])
    with adapted.using("policy"), torch.no_grad():
        torch.testing.assert_close(rounded(layer, inputs), layer(inputs))
