"""The keys that name data: which ones conflict, and how a mixture is written."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.core.errors import ConfigError
from groupwise.tasks.data.config import DatasetConfig
from groupwise.training.config import RunConfig, load_config
from groupwise.training.sft_config import load_sft_config

ONE, MIXTURE = {"dataset_name": "a"}, {"dataset_mixture": [{"source": "a"}]}


def section(**data: Any) -> DatasetConfig:
    return loaded(**data).data


def loaded(**data: Any) -> RunConfig:
    return load_config({"model": {"name": "tiny"}, "data": data}).config


def refused(**data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(**data)
    with pytest.raises(ConfigError) as of_sft:
        load_sft_config({"model": {"name": "tiny"}, "data": data})
    assert str(of_sft.value) == str(caught.value), "both commands say the same"
    return str(caught.value)


def mixture(*entries: dict[str, Any]) -> str:
    return refused(dataset_mixture=list(entries))


def test_names_of_columns_come_together() -> None:
    given = section(
        dataset_name="x", columns={"id": "key"}, prompt_column="question", answer_column="solution"
    )
    assert given.renamed_columns("answer") == {
        "id": "key",
        "prompt": "question",
        "answer": "solution",
    }
    assert given.renamed_columns("completion")["completion"] == "solution"


def test_mixture_comes_back_from_the_resolved_config() -> None:
    entries = [{"source": "a", "weight": 2.0}, {"task": "sort_words", "config": {"words": 2}}]
    config = loaded(dataset_mixture=entries)
    again = load_config(config.model_dump(mode="json")).config
    assert again == config
    assert [entry.name for entry in again.data.mixture] == ["a", "sort_words"]
    assert again.data.mixture[1].config == {"words": 2}


@pytest.mark.parametrize(("entry", "said"), [
    ({"sorce": "a"}, "set 0: 'sorce' is not a key; did you mean source."),
    ({"source": "a", "weight": 0}, "set 0: weight is 0; it must be a number (above 0)."),
    ({"source": "a", "weight": "2"}, 'set 0: weight is "2"; it must be a number'), ({"source": 3}, "set 0: source is 3; it must be text"),
    ({"weight": 1}, "set 0: give either `source` or `task`."), ({"source": "a", "task": "b"}, "set 0: give either `source` or `task`."),
    ({"task": "b", "split": "test"}, "set 0: `split` has no effect on a task"),
    ({"task": "b", "columns": {"a": "b"}}, "set 0: `columns` has no effect on a task"),
    ({"task": "b", "config": "main"}, "set 0: `config` of a task is its section `task`"),
    ({"source": "a", "config": {}}, "set 0: `config` of a source is a name"),
])  # fmt: skip
def test_entry_says_what_is_wrong_with_it(entry: dict[str, Any], said: str) -> None:
    assert said in mixture(entry)


@pytest.mark.parametrize(("data", "said"), [
    ({"dataset_name": "a", "dataset_mixture": [{"source": "b"}]}, "leave one out"),
    ({"system_prompt": "x"}, "system_prompt has no effect without dataset_name"),
    ({"columns": {"a": "b"}, "seed": 3}, "seed, columns have no effect without dataset_name"),
    ({"dataset_name": "a", "mixture_columns": "all"}, "without dataset_mixture"),
    ({**MIXTURE, "dataset_config": "main"}, "give `config` to each"),
    ({**MIXTURE, "dataset_test_split": "test"}, "give `test_split` to each"),
    ({"dataset_mixture": [{"task": "math"}], "test_split_size": 0.1}, "no effect on tasks"),
    ({**ONE, "dataset_test_split": "test", "test_split_size": 0.1}, "and test_split_size"),
    ({**ONE, "prompt_column": "q", "columns": {"prompt": "r"}}, "and columns.prompt both"),
    ({**ONE, "strip_roles": ["user"]}, "strip_roles has no effect without strip_tags"),
    ({"mixture": [{"source": "a"}]}, "here it is data.dataset_mixture"), ({"dataset_name": "a", "test_split_size": 1.5}, "below 1"),
])  # fmt: skip
def test_conflicting_data_keys_are_refused(data: dict[str, Any], said: str) -> None:
    assert said in refused(**data)
