"""What `tool_choice` of OpenAI's protocol asks for, in all of its forms.

"none"                                                           the model is not shown the tools
"auto"                                                           it calls, or answers in words
"required"                                                       it calls one or more
{"type": "function", "function": {"name": "add"}}                it calls this one, once
{"type": "allowed_tools", "allowed_tools":
    {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": "add"}}]}}
                                                                 as above, but only these can be called
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

FORMS = (
    '`auto`, `none`, `required`, {"type": "function", "function": {"name": "..."}}, or {"type": "allowed_tools", "allowed_tools": '
    '{"mode": "auto" or "required", "tools": [...]}}'
)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """The tools that the model may call, and whether it must call one."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    """The tools that can be called; None: all."""
    is_single: bool = False
    """True: exactly one call is forced."""


def parse_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[str]) -> ToolSelection:
    """Parse a `tool_choice`; `tools` are the names of the request's tools. Raises ValueError; its text follows the field's name."""
    if choice in (None, "auto"):
        return ToolSelection()
    if choice == "none":
        return ToolSelection("none")
    if choice == "required":
        selection = ToolSelection("required")
    elif isinstance(choice, dict) and (name := _function_name(choice)) is not None:
        selection = ToolSelection("required", (name,), is_single=True)
    elif isinstance(choice, dict) and choice.keys() == {"type", "allowed_tools"}:
        selection = _parse_allowed(choice)
    else:
        raise ValueError(f"is {FORMS}; it was {choice!r:.200}")
    if not tools:
        raise ValueError("asks for calls, but there are no `tools`; give some, or leave it out")
    unknown = next((name for name in selection.names or () if name not in tools), None)
    if unknown is not None:
        raise ValueError(
            f"names {unknown!r:.80}, which is none of the request's tools: {', '.join(tools)[:500]}"
        )
    return selection


def _parse_allowed(choice: dict[str, Any]) -> ToolSelection:
    allowed: Any = choice["allowed_tools"]
    if isinstance(allowed, dict):
        fields = cast("dict[str, Any]", allowed)
        mode, entries = fields.get("mode"), fields.get("tools")
        if fields.keys() == {"mode", "tools"} and isinstance(entries, list) and entries:
            names = [_function_name(entry) for entry in cast("list[Any]", entries)]
            known = tuple(name for name in names if name is not None)
            if mode in ("auto", "required") and len(known) == len(names):
                return ToolSelection(mode, known)
    raise ValueError(f"is {FORMS}; it was {choice!r:.200}")


def _function_name(value: Any) -> str | None:
    """The name in `{"type": "function", "function": {"name": ...}}`; None for anything else."""
    match value:
        case {"type": "function", "function": {"name": str(name), **inner}, **outer}:
            return None if inner or outer.keys() - {"type", "function"} else name
        case _:
            return None
