"""Single keys of a config from outside its file: arguments of a command line, and environment variables.
training.learning_rate=1e-5        an argument, typed as the same text in the file would be
GROUPWISE_<PROGRAM>_<KEY>=value    a variable, which overrides the file
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ruamel.yaml.error import YAMLError

from groupwise.core.errors import ConfigError
from groupwise.core.settings.credentials import is_secret, names_secret
from groupwise.core.settings.schema import KeyPath, Strict, keys_of
from groupwise.core.settings.tree import Tree, copy_plain, parse_yaml, plain_value
from groupwise.core.settings.wording import as_given


def override(tree: Tree, assignments: Sequence[str], alternatives: Sequence[KeyPath] = ()) -> Tree:
    """The tree with `a.b=value` arguments applied in order, so the last one wins. Their problems are added to `problems`.

    `alternatives`: keys of which a config has one. An argument for one of them takes the place of those in the file.
    """
    result = Tree(
        tree.source,
        copy_plain(tree.values),
        dict(tree.origins),
        list(tree.problems),
        set(tree.unread),
    )
    given: set[KeyPath] = set()
    for assignment in assignments:
        try:
            path, value = parse_override(assignment)
            given.add(path)
            section = result.values
            origin = _override_origin(path, assignment)
            for depth, key in enumerate(path[:-1], start=1):
                inner = section.get(key)
                if inner is None:
                    inner = section[key] = {}
                    result.origins[path[:depth]] = origin
                if not isinstance(inner, dict):
                    dotted = ".".join(path[:depth])
                    raise ConfigError(
                        f"{origin}: {dotted} is {as_given(inner)}, which has no keys inside."
                    )
                section = cast("dict[str, Any]", inner)
            section[path[-1]] = value
            for overridden in [
                path_set for path_set in result.origins if path_set[: len(path)] == path
            ]:
                del result.origins[overridden]
            result.origins[path] = origin
            if path in alternatives and value is not None:
                section |= {key[-1]: None for key in alternatives if key not in given}
        except ConfigError as error:
            result.problems.append(error.message)
            result.unread.add(tuple(assignment.partition("=")[0].split(".")))
    return result


def parse_override(assignment: str) -> tuple[KeyPath, Any]:
    """`training.learning_rate=1e-5` as path and value. Raises ConfigError that shows the right form."""
    name, equals, text = assignment.partition("=")
    if not equals:
        visible = "…" if names_secret(assignment) else assignment
        raise ConfigError(
            f"override {visible}: write it as key=value, for example training.seed=1."
        )
    path = tuple(name.split("."))
    for key in path:
        _check_override_key(key, name, assignment)
    origin = _override_origin(path, assignment)
    try:
        mapping = parse_yaml(f"value: {text}")
    except YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        remedy = f"for plain text, quote it: {name}='\"text\"'"
        if "{" in text and re.search(r"\w:[\[{]", text):
            remedy = "write a space after each colon: '{a: [1], b: 2}'"
        raise ConfigError(
            f"{origin}: the value cannot be read as YAML ({problem}); {remedy}."
        ) from None
    value = cast("Mapping[str, Any]", mapping)["value"]
    if len(cast("Mapping[str, Any]", mapping)) > 1:
        raise ConfigError(
            f"{origin}: one override sets one key; give the others as words of their own."
        )
    if value is None and not re.match(r"(null|Null|NULL|~)(\s|$)", text.strip()):
        raise ConfigError(f"{origin}: nothing is given after `=`; write {name}=null for no value.")
    # `plain_value` reports problems to a tree; this one is for this override alone.
    holder = Tree(origin)
    plain_result = plain_value(value, path, holder)
    if holder.problems:
        raise ConfigError(holder.problems[0])
    return path, plain_result


def _check_override_key(key: str, name: str, assignment: str) -> None:
    origin = f"override {assignment.partition('=')[0]}=…"
    if re.fullmatch(r"[A-Za-z_][\w-]*", key):
        return
    if not name:
        raise ConfigError(f"{origin}: there is no key before `=`; write key=value.")
    if name[0] in "+~":
        bare_name = name.lstrip("+~")
        raise ConfigError(f"{origin}: keys take no `{name[0]}`; write {bare_name}=value.")
    if key.isdigit() or "[" in key:
        list_key = re.split(r"\.\d|\[", name)[0]
        raise ConfigError(
            f"{origin}: a list is given whole, {list_key}=[first, second]; single items cannot be set."
        )
    raise ConfigError(f"{origin}: `{name}` is not a key; keys are words joined by dots.")


def _override_origin(path: KeyPath, assignment: str) -> str:
    """The override's name in messages, without its value if that is, or contains, a credential."""
    secret = any(map(is_secret, path)) or names_secret(assignment.partition("=")[2])
    return f"override {'.'.join(path)}=…" if secret else f"override {' '.join(assignment.split())}"


def lay_environment_over(
    tree: Tree,
    environment: Mapping[str, str],
    config: type[Strict],
    prefix: str,
    as_text: frozenset[str] = frozenset(),
) -> None:
    """Apply every variable that starts with `prefix` to the tree, typed as in the file; unknown ones become problems of the tree.

    `as_text`: keys whose values are taken as plain text, except `null`; YAML would misread some URLs.
    """
    keys = keys_of(config)
    for variable in sorted(environment):
        if not variable.startswith(prefix):
            continue
        key, text = variable.removeprefix(prefix).lower(), environment[variable]
        if key not in keys or variable != variable.upper():
            if key in config.refused:
                tree.problems.append(f"{variable} is not a setting; {config.refused[key]}.")
                continue
            names = {name: prefix + name.upper() for name in keys}
            close_matches = difflib.get_close_matches(key, names, n=1)
            closest = difflib.get_close_matches(key, names, n=3, cutoff=0.0)
            nearest = f"the nearest are {', '.join(names[match] for match in closest)}."
            hint = f"did you mean {names[close_matches[0]]}?" if close_matches else nearest
            tree.problems.append(f"{variable} is not a setting; {hint}")
            continue
        try:
            is_plain_text = key in as_text and text != "null"
            tree.values[key] = text if is_plain_text else parse_override(f"{key}={text}")[1]
        except ConfigError as error:
            reason = error.message.partition(": ")[2] or error.message
            tree.problems.append(f"{variable}: {reason}")
            tree.unread.add((key,))
            continue
        tree.origins[(key,)] = variable
