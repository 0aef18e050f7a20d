"""What a session samples from its model, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.core.errors import UsageError
from groupwise.notebook import (
    TrainingConfig,
    evaluate,
    format_prompt,
    prepare_session,
    quick_test,
    sampler,
    train_grpo,
)
from tests.tunix_models import model_of


@pytest.fixture
def sampling_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the model would be asked; it answers `42`."""
    calls: list[Any] = []

    async def complete(core: Any, prompts: Any, weights: Any, params: Any, seed: int) -> list[str]:
        calls.append((prompts, weights, params, seed))
        return ["42"] * len(prompts)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampler, "complete", complete)
    return calls


def few(**values: Any) -> TrainingConfig:
    return TrainingConfig(**{"model": "tiny", "dataset": "arithmetic", "dataset_max": 8, **values})


def prepared_session(**values: Any) -> Any:
    return prepare_session(few(**values))


def test_invalid_sampler_calls_are_refused(sampling_calls: list[Any]) -> None:
    prepared = prepared_session()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("one text", {}, "prompts is one text"), (5, {}, "of the type int"),
        ([None], {}, "A prompt is None"), ([""], {}, "A prompt is ''"),
        ([[]], {}, r"A prompt is \[\]"), (["a"], {"temperature": -1.0}, "temperature is -1.0"),
        (["a"], {"total_generation_steps": 0, "top_p": 2.0}, "at least 1; top_p is 2.0"),
        (["a"], {"top_k": 0}, "top_k is 0"),
        (["a"], {"total_generation_steps": 4.5}, "total_generation_steps is 4.5"),
        (["a"], {"total_generation_steps": True}, "total_generation_steps is True"),
        (["a"], {"temperature": "1"}, "temperature is '1'"),
        (["a"], {"temperature": float("inf")}, "temperature is inf"),
        (["a"], {"top_k": "5"}, "top_k is '5'"), (["a"], {"top_p": float("nan")}, "top_p is nan"),
        (["a"], {"seed": 1.5}, "seed is 1.5"),
    ]  # fmt: skip
    for prompts, parameters, said in wrong:
        with pytest.raises(UsageError, match=said):
            prepared.sampler(prompts, **parameters)
    assert prepared.sampler([]) == []
    assert sampling_calls == []
    numbers = {"total_generation_steps": np.int64(4), "temperature": np.float32(0.5), "seed": np.int32(7)}  # fmt: skip
    prepared.sampler(["a"], **numbers)
    [(_, _, params, seed)] = sampling_calls
    assert (params.max_tokens, params.temperature, seed) == (4, 0.5, 7)
    assert {type(params.max_tokens), type(seed)} == {int}
    config = few(total_generation_steps=12)
    quick_test(config, prepare_session(config))
    assert sampling_calls[-1][2].max_tokens == 12, "as long as the completions of the training"


def test_a_question_that_the_model_cannot_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = prepared_session()
    for prompts, steps, said in (
        (["why " * 300], 2000, r"\d+ tokens, .* room for 48 "),
        (["a", "why " * 6000], 8, r"^Prompt 2 has \d+ tokens"),
        (["a"], 5000, "is 5000, .* at most 2048 tokens"),
        (["\ud800"], 8, r"'\\ud800'"),
    ):
        with pytest.raises(UsageError, match=said):
            prepared.sampler(prompts, total_generation_steps=steps)


def test_a_run_whose_folder_is_gone_is_not_taken_for_no_run(
    sampling_calls: list[Any], tmp_path: Path
) -> None:
    config = few()
    prepared = prepare_session(config)
    prepared.folder = tmp_path / "run"
    for use in (
        lambda: quick_test(config, prepared),
        lambda: prepared.sampler(["a"]),
        lambda: prepared.policy,
        lambda: prepared.run,
    ):
        with pytest.raises(UsageError, match=r"not there.*prepare_session"):
            use()
    assert sampling_calls == []
    prepared.folder.mkdir()
    assert "before any training" in prepared.policy
    prepared.sampler(["a"])
    assert sampling_calls[0][1] is None


def test_settings_that_tunix_lacks_are_refused_at_once() -> None:
    for changes, said in (
        ({"devices": (1, 3)}, r"^devices is \[1, 3\]: its tp of 3"),
        ({"devices": (1, 1), "overrides": {"lora.target_modules": ["k_proj"]}}, "take all or none"),
    ):
        with pytest.raises(UsageError, match=said):
            prepared_session(model=str(model_of("gemma3")), backend="tunix", **changes)


def test_rows_that_replace_others_get_their_prompts(sampling_calls: list[Any]) -> None:
    config = few()
    prepared = prepare_session(config)
    own = [{"role": "user", "content": "One and one?"}]
    prepared.train_dataset = [
        {"question": "What is 1 + 1?", "answer": "2"},
        {"question": "And 1 + 1?", "answer": "2", "prompt": own},
    ]
    prompts = [row["prompt"] for row in prepared.train_dataset]
    assert prompts == [[{"role": "user", "content": format_prompt("What is 1 + 1?", config)}], own]
    tested = len(prepared.test_dataset)
    said = f"own rows, tested on arithmetic: 2 rows to train on, {tested} to test"
    assert ("dataset", said) in prepared.table().rows
    prepared.test_dataset = [{"question": "And 1 + 2?", "answer": "3"}]
    said = "own rows: 2 rows to train on, 1 to test"
    assert ("dataset", said) in prepared.table().rows
    with pytest.raises(UsageError, match="A row is str"):
        prepared.test_dataset = ["What is 1 + 1?"]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match=r"column answer, .* columns question, gold, prompt"):
        prepared.test_dataset = [{"question": "And 1 + 2?", "gold": "3"}]
    assert len(prepared.test_dataset) == 1


def test_parts_that_share_a_question_are_refused_by_training_and_evaluation(
    sampling_calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainingConfig(
        model="tiny", dataset="arithmetic", dataset_max=20, num_batches=2, total_generation_steps=4
    )
    prepared = prepare_session(config)
    rows = [*prepared.train_dataset, *prepared.test_dataset]
    prepared.train_dataset = rows[:10]
    prepared.test_dataset = [{"question": rows[3]["question"].upper(), "answer": "1"}, *rows[10:]]
    assert "1 of 10 rows" in capsys.readouterr().out
    for ask in (train_grpo, evaluate):
        with pytest.raises(UsageError, match="1 of 10 rows") as told:
            ask(config, prepared)
        assert repr(rows[3]["question"]) in str(told.value)
    assert not (Path("checkpoints") / config.experiment_name).exists()


def test_rows_longer_than_the_limit_are_counted_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = few(system_prompt="", overrides={"data.max_prompt_length": 60})
    prepared = prepare_session(config)
    prepared.train_dataset = [
        {"question": "1 + 1?", "answer": "2"},
        {"question": "And 1 + 2? " * 9, "answer": "3"},
    ]
    tested = len(prepared.test_dataset)
    for row in (
        ("dataset", f"own rows, tested on arithmetic: 1 row to train on, {tested} to test"),
        ("left out", "1 × longer than max_prompt_length = 60 tokens"),
    ):
        assert row in prepared.table().rows
    with pytest.raises(
        UsageError, match=r" all \d+ prompts are longer than max_prompt_length = 5 "
    ):
        prepare_session(few(max_prompt_length=5))
