"""Creates objects from a class and its parameters in a config, such as `{name: early_stop, patience: 5}`.

If that is impossible, a TaskError says what the class accepts: unknown and missing parameters, values that do not match
the annotations, and the class's own errors (a ValueError).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from groupwise.core.errors import TaskError
from groupwise.core.plugins import nearest, run_user_code
from groupwise.core.settings.field_errors import field_errors


def instance(kind: type, parameters: Mapping[str, Any], what: str) -> object:
    """An instance of `kind`, after its parameters were checked against the constructor's; messages start with `what`."""
    accepted = accepted_parameters(kind)
    names = [p.name for p in accepted]
    signature = inspect.signature(kind)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in parameters:
        if name not in names and not takes_any:
            close_matches = nearest(name, names)
            hint = f"; did you mean {' or '.join(close_matches)}?" if close_matches else "."
            accepted_text = f"It takes: {', '.join(names)}." if names else "It takes none."
            raise TaskError(f"{what} has no parameter `{name}`{hint} {accepted_text}")
    missing = [p.name for p in accepted if p.default is p.empty and p.name not in parameters]
    if missing:
        raise TaskError(f"{what} needs {' and '.join(f'`{name}`' for name in missing)}.")
    try:
        hints = get_type_hints(kind.__init__)
    except Exception:  # noqa: BLE001 — users' annotations may be anything; without them any value is accepted
        hints: dict[str, Any] = {}
    values = {
        name: _convert(value, hints.get(name), f"{what}: {name}")
        for name, value in parameters.items()
    }
    return run_constructor(lambda: kind(**values), what)


def accepted_parameters(kind: type) -> list[inspect.Parameter]:
    """The parameters of a class that a config can give by name."""
    parameters = inspect.signature(kind).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def run_constructor(call: Callable[[], Any], what: str) -> Any:
    """The result of `call`. The message of a ValueError is shown alone, since it explains itself; other errors with their traceback."""

    def explained() -> Any:
        try:
            return call()
        except ValueError as refused:
            raise TaskError(f"{what}: {refused}") from refused

    return run_user_code(explained, what=f"{what} failed")


def _convert(value: Any, hint: Any, what: str) -> Any:
    """The value as the parameter's annotation requires: lists become tuples, whole numbers become floats; nothing else is converted."""
    if hint is None:
        return value
    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reason = field_errors(error, hint, document_name="it")[0]
        raise TaskError(f"{what} is {json.dumps(value)}; {reason}.") from None
    except PydanticUserError:  # pydantic does not support the annotation
        return value
