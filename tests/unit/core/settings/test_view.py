"""The config as user code sees it."""

import copy
import json
import pickle
from typing import Any

import pytest

from groupwise.core.settings.view import View

CONTENT: dict[str, Any] = {
    "task": {"words": 3, "langs": ["en", {"x": 1}]},
    "lora": None,
    "items": 7,
}


def test_a_view_reads_as_mapping_and_by_attribute() -> None:
    view = View(CONTENT)
    assert view["task"]["words"] == view.task.words == 3
    assert view.task.get("absent", 5) == 5
    assert "task" in view
    assert "words" not in view
    assert list(view) == ["task", "lora", "items"]
    assert len(view) == 3
    assert view["items"] == 7
    assert view.lora is None
    assert view.task.langs[1].x == 1
    assert {**view.task} == {"words": 3, "langs": ["en", {"x": 1}]}
    assert "words" in dir(view.task)
    assert view == View(CONTENT) == CONTENT
    assert view.task != {"words": 4}
    assert repr(View({"a": [1]})) == "View({'a': [1]})"
    assert json.loads(json.dumps(view.to_dict())) == CONTENT


def test_a_view_cannot_be_changed_even_through_what_it_gives_out() -> None:
    original = copy.deepcopy(CONTENT)
    view: Any = View(original)
    with pytest.raises(AttributeError, match="task cannot be set"):
        view.task = 1
    with pytest.raises(AttributeError, match=r"config\.task can only"):
        del view["task"].words
    with pytest.raises(TypeError):
        view["task"] = 1
    view["task"].langs.append("de")
    view.to_dict()["task"]["words"] = 9
    original["task"]["words"] = 8
    assert view == CONTENT


def test_a_missing_name_is_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"config\.task .*`word`.* words\?"):
        _ = View(CONTENT).task.word
    with pytest.raises(KeyError, match=r"`zzz`.*: task, lora, items\."):
        _ = View(CONTENT)["zzz"]
    assert not hasattr(View(CONTENT), "__array__")


def test_a_view_can_be_pickled_and_copied() -> None:
    view = View(CONTENT)
    assert copy.deepcopy(view).task.words == 3
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(view, protocol)) == CONTENT
        with pytest.raises(AttributeError, match=r"config\.task has no"):
            _ = pickle.loads(pickle.dumps(view.task, protocol)).zzz
