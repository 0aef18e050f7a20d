"""The tools and arguments that a row hands to its chat template."""

from __future__ import annotations

import pytest

from groupwise.api.schemas.template_columns import columns_of, for_request, for_template
from groupwise.core.errors import TaskError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", ["[]", [], None, "", float("nan")])
def test_a_row_without_them_gives_nothing(tools):
    given = for_template({"tools": tools, "chat_template": "x"}, "row 0")
    assert (given.tools, given.arguments) == ((), {})
    assert for_request({"tools": tools}) == {}


@pytest.mark.parametrize("columns", [
    {"tools": [{**TOOL, "strict": None}], "chat_template_kwargs": {"enable_thinking": False, "date": None}},
    {"tools": '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
     "chat_template_kwargs": '{"enable_thinking": false}'},
])  # fmt: skip
def test_tools_and_arguments_as_values_or_as_json(columns):
    given = for_template(columns, "row 0")
    assert given.tools == (TOOL,)
    assert given.arguments == {"enable_thinking": False}
    assert columns_of(given.tools, given.arguments).keys() == columns.keys()


@pytest.mark.parametrize(("columns", "told"), [
    ({"template_kwargs": {}}, "`template_kwargs` has no effect"), ({"chat_template_args": {}}, "chat_template_kwargs"),
    ({"enable_thinking": False}, "`enable_thinking`"), ({"chat_template_kwargs": [1]}, "list"), ({"tools": "no JSON"}, "no JSON"),
    ({"tools": {"name": "f"}}, "Expected a list"),
])  # fmt: skip
def test_template_columns_without_effect_are_refused(columns, told):
    with pytest.raises(TaskError, match=f"^row 7: .*{told}"):
        for_template(columns, "row 7")
