"""Names of rewards in other projects (TRL, open-r1, ms-swift, verifiers, well-known notebooks), and our equivalents.

`meaning_of` looks up a name that we do not have; usual prefixes and suffixes (`get_…_reward`, `…_reward_func`) are ignored. The table
is other_names.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NameMeaning:
    """A guess at the meaning of a name that we do not have."""

    rewards: tuple[str, ...]
    """Names of our rewards, the likeliest first; empty if there is no equivalent."""
    remark: str
    """An explanation of these rewards, or advice if there are none."""
    parameters: tuple[tuple[str, str | float], ...] = ()
    """Parameters with which the first of our rewards does the same."""

    @property
    def hint(self) -> str:
        """The hint for the error message about the unknown name."""
        remark = f"{self.remark[0].upper()}{self.remark[1:]}."
        names = " or ".join(f"`{reward}`" for reward in self.rewards)
        return f"Did you mean {names}? {remark}" if names else remark


@cache
def other_names() -> dict[str, NameMeaning]:
    """Meanings by name, without the prefixes and suffixes that `meaning_of` removes."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        name: NameMeaning(
            tuple(meaning["rewards"]),
            meaning["remark"],
            tuple(meaning.get("parameters", {}).items()),
        )
        for meaning in tomllib.loads(text)["meaning"]
        for name in meaning["names"]
    }


_ENDS = re.compile(r"(_rewards?)?(_(func|fn|function)s?)?$|_score$")


def meaning_of(name: str, own_names: Collection[str]) -> NameMeaning | None:
    """The likely meaning of a name; for `module.function` also of its last part. None if it is unknown.

    `own_names` are our own names, which a name such as `get_…_reward` may contain.
    """
    last_part = re.split(r"[.:/]", name)[-1]
    # `cosine_scaled` of `get_cosine_scaled_reward`.
    for candidate in (last_part, _ENDS.sub("", last_part.lower().removeprefix("get_"), count=1)):
        if meant := other_names().get(candidate):
            return meant
        if candidate in own_names and candidate != name:
            return NameMeaning((candidate,), "here it has that name")
    return None
