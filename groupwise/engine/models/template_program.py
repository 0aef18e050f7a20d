"""Runs a chat template: a program in Jinja that comes with a model and turns messages into text.

What a template may use, and what it sees of its arguments, is what `apply_chat_template` of transformers gives it, so that both write the
same text; `test_fast_tokenizer.py` compares them. Templates come from the hub, so they run in Jinja's sandbox and see plain data only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which messages carry their reasoning; templates read one of the first two."""


def run_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The text that a template writes. Raises whatever the template raises."""
    chat = [
        _with_reasoning(_plain({key: value for key, value in message.items() if value is not None}))
        for message in messages
    ]
    return _compiled(template).render(
        messages=chat, tools=_plain(tools), documents=None, **_plain(variables)
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The value made of JSON's types: the sandbox does not know which methods of other types are dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is dict:  # of texts, as most messages are
        return {
            key if type(key) is str else _plain(key): item if type(item) is str else _plain(item)
            for key, item in cast("dict[Any, Any]", value).items()
        }
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_plain(key): _plain(item) for key, item in items}
    if isinstance(value, list | tuple):
        plain = [_plain(item) for item in cast("Sequence[Any]", value)]
        return plain if isinstance(value, list) else tuple(plain)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    dump = getattr(value, "model_dump", None)  # pydantic's
    if callable(dump):
        return _plain(dump())
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    compiled = environment.from_string(template)
    # Jinja copies them for each render, a chain of mappings slowly.
    compiled.globals = dict(compiled.globals)
    return compiled


class _Generation(Extension):
    """The block `{% generation %}`, which marks the assistant's words. Here it writes its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Any) -> str:
        return caller()


class _Dict:
    """Python's `dict`, for calls alone: the sandbox must not reach the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be a name
        this, *rest = args
        for name in (values := dict(*rest, **kwargs)):
            _refuse_private(name)
        Namespace.__init__(this, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a chat template keeps the name {name!r} in a namespace: it must not begin with an underscore"
        )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)
