"""Variables of the environment as settings: GROUPWISE_<PROGRAM>_<KEY>, laid over what a file says."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from groupwise.core.errors import ConfigError
from groupwise.core.settings.overrides import parse_override
from groupwise.core.settings.schema import Strict, keys_of
from groupwise.core.settings.tree import Tree


def lay_environment_over(
    tree: Tree,
    environment: Mapping[str, str],
    config: type[Strict],
    prefix: str,
    as_text: frozenset[str] = frozenset(),
) -> None:
    """Lay every variable that begins with `prefix` over the tree, typed as in the file; those that are no key become problems of the tree.

    `as_text`: keys whose values are taken as they stand, but for `null`; a URL may hold what YAML reads otherwise.
    """
    known = keys_of(config)
    for variable in sorted(environment):
        if not variable.startswith(prefix):
            continue
        key, text = variable.removeprefix(prefix).lower(), environment[variable]
        if key not in known or variable != variable.upper():
            if key in config.refused:
                tree.problems.append(f"{variable} is no setting; {config.refused[key]}.")
                continue
            names = {name: prefix + name.upper() for name in known}
            near = difflib.get_close_matches(key, names, n=1)
            likest = difflib.get_close_matches(key, names, n=3, cutoff=0.0)
            nearest = f"the nearest are {', '.join(names[each] for each in likest)}."
            hint = f"did you mean {names[near[0]]}?" if near else nearest
            tree.problems.append(f"{variable} is no setting; {hint}")
            continue
        try:
            plain = key in as_text and text != "null"
            tree.values[key] = text if plain else parse_override(f"{key}={text}")[1]
        except ConfigError as error:
            reason = error.message.partition(": ")[2] or error.message
            tree.problems.append(f"{variable}: {reason}")
            tree.unread.add((key,))
            continue
        tree.origins[(key,)] = variable
