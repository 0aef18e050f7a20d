"""One way to load user code: every form, and a message that teaches for every way it can fail."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from groupwise.core import plugins
from groupwise.core.errors import TaskError
from groupwise.core.plugins import LoadedPlugin, load, trains_when_imported


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_user_folders", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def refused(spec: str, **options) -> str:
    with pytest.raises(TaskError) as caught:
        load(spec, **options)
    return str(caught.value)


def test_file_and_its_attribute(tmp_path):
    path = write(tmp_path, "task.py", "class Chess:\n    board = 8\nready = Chess()\n")
    whole = load(path)
    assert whole == LoadedPlugin(whole.module, whole.module, path, path)
    made = load(f"{path}:Chess")
    assert made.object.board == 8
    assert made.spec == f"{path}:Chess"
    assert load(f"{path}:ready").object.board == 8


def test_files_of_one_name_do_not_collide(tmp_path):
    first = load(write(tmp_path / "a", "task.py", "x = 'a'"))
    second = load(write(tmp_path / "b", "task.py", "x = 'b'"))
    assert (first.object.x, second.object.x) == ("a", "b")
    assert first.module.__name__ != second.module.__name__
    assert sys.modules[first.module.__name__] is first.module


def test_an_edited_file_is_read_again(tmp_path):
    assert load(write(tmp_path, "task.py", "x = 1")).object.x == 1
    assert load(write(tmp_path, "task.py", "x = 2")).object.x == 2


def test_built_in_name_comes_before_a_module_of_that_name():
    found = load("math", builtins={"math": "json"})
    assert found.module.__name__ == "json"
    assert found.spec == "json"
    assert load("math", builtins={}).module.__name__ == "math"


def test_entry_point(monkeypatch):
    point = EntryPoint("chess", "json:JSONDecoder", "groupwise.tasks")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    found = load("chess", entry_points="groupwise.tasks")
    assert type(found.object).__name__ == "JSONDecoder"
    assert found.spec == "json:JSONDecoder"


def test_unknown_name_says_what_was_tried_and_what_is_near(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused("sort_word", builtins={"sort_words": "x"}, entry_points="groupwise.tasks")
    positions = [
        message.index(part)
        for part in (str(tmp_path / "sort_word"), "a built-in task", "an entry point", "a module")
    ]
    assert positions == sorted(positions)
    assert "mean `sort_words`?" in message


def test_traceback_holds_the_users_frames_only(tmp_path):
    write(tmp_path, "helper_that_fails.py", "import json\njson.loads('{')\n")
    path = write(tmp_path, "task.py", "x = 1\nimport helper_that_fails\n")
    message = refused(path)
    assert f"{path}:2 in <module>" in message
    assert f"{tmp_path / 'helper_that_fails.py'}:2" in message
    assert "json.loads('{')" in message
    assert "JSONDecodeError" in message
    for foreign in ("decoder.py", "plugins.py", "importlib"):
        assert foreign not in message


def test_search_path_is_as_before_after_a_failure_and_longer_at_its_end_after_success(tmp_path):
    before = list(sys.path)
    refused(write(tmp_path, "task.py", "1 / 0"))
    assert sys.path == before
    path = write(tmp_path, "task.py", "")
    load(path)
    load(path)
    assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize(("source", "told"), [
    ("t = Trainer(m)\nif True:\n    t.train()", "line 3: t.train()"), ("Trainer(m).train()", "line 1: Trainer(m).train()"),
    ("model.train()", None), ("def f(:", None), ('if __name__ == "__main__":\n    t.train()', None),
    ('if "__main__" == __name__:\n    pass\nelse:\n    t.train()', "line 4: t.train()"), ("def f():\n    t.train()", None),
])  # fmt: skip
def test_scripts_that_train_when_imported_are_recognised(source, told):
    assert trains_when_imported(source) == told


def test_a_script_that_trains_is_reported_before_it_runs(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    refused(write(tmp_path, "training_script.py", "1 / 0\ntrainer.train()"), kind="reward")
    refused("training_script")
    assert ["line 2: trainer.train()" in record.getMessage() for record in caplog.records] == [
        True
    ] * 2
