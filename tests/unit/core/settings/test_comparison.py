"""What changed between two configs."""

from typing import Any

from groupwise.core.settings.comparison import compare
from tests.unit.core.settings.shapes import Root


def plain(**changes: Any) -> dict[str, Any]:
    return {**Root(title="a").model_dump(mode="json"), **changes}


def test_compare_sorts_changes_by_what_a_resume_does() -> None:
    new = plain(rate=0.5, title="b", engine={"name": "fake", "stop": [], "slots": 4})
    found = compare(plain(), new, Root)
    assert found.free == {"rate": (1e-5, 0.5)}
    assert found.warned == {"engine.slots": (None, 4)}
    assert found.fixed == {"title": ("a", "b"), "engine.name": ("torch", "fake")}


def test_compare_takes_the_default_for_a_key_that_the_old_config_did_not_have() -> None:
    old = plain()
    del old["rate"], old["engine"]
    assert compare(old, plain(), Root).free == {}
    assert compare(old, plain(rate=0.5), Root).free == {"rate": (1e-5, 0.5)}
    assert compare(old, plain(engine={"slots": 2}), Root).warned == {"engine.slots": (None, 2)}


def test_compare_sees_sections_that_come_and_go_and_keys_inside_free_ones() -> None:
    whole = {"name": "torch", "stop": [], "slots": None}
    assert compare(plain(), plain(spare=whole), Root).fixed == {"spare": (None, whole)}
    assert compare(plain(spare=whole), plain(), Root).fixed == {"spare": (whole, None)}
    changed = compare(plain(task={"a": {"b": 1}}), plain(task={"a": {"b": 2}, "c": 3}), Root)
    assert changed.fixed == {"task.a.b": (1, 2), "task.c": (None, 3)}
