"""Algorithms by name: the loop makes them from a config, the learner from a `LossSpec`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from groupwise.algorithms.base import Algorithm, Loss
from groupwise.algorithms.cispo import Cispo
from groupwise.algorithms.clip_cov import ClipCov
from groupwise.algorithms.custom import is_custom, load_custom
from groupwise.algorithms.dapo import Dapo
from groupwise.algorithms.distillation import Distillation
from groupwise.algorithms.dr_grpo import DrGrpo
from groupwise.algorithms.gdpo import Gdpo
from groupwise.algorithms.gigpo import Gigpo
from groupwise.algorithms.given import Given
from groupwise.algorithms.gmpo import Gmpo
from groupwise.algorithms.group_relative import GroupRelative
from groupwise.algorithms.grpo import Grpo
from groupwise.algorithms.gspo import Gspo
from groupwise.algorithms.kl_cov import KlCov
from groupwise.algorithms.luspo import Luspo
from groupwise.algorithms.max_rl import MaxRl
from groupwise.algorithms.pass_at_k import PassAtK
from groupwise.algorithms.reinforce_pp import ReinforcePp
from groupwise.algorithms.rloo import Rloo
from groupwise.algorithms.sapo import Sapo
from groupwise.algorithms.sft import Sft
from groupwise.algorithms.vespo import Vespo
from groupwise.core.types import LossSpec

_KINDS: tuple[type[GroupRelative], ...] = (
    Grpo, DrGrpo, Dapo, Gspo, Cispo, Rloo, ReinforcePp, MaxRl, Gmpo, Sapo, Gdpo, PassAtK, Gigpo, ClipCov,
    KlCov, Luspo, Vespo, Distillation,
)  # fmt: skip

ALGORITHMS: dict[str, type[GroupRelative]] = {kind.name: kind for kind in _KINDS}
"""Every algorithm by the name that configs use."""


def kind_of(name: str) -> type[GroupRelative]:
    """The class of an algorithm, by its name or as `path/to/file.py:Class`. Raises ValueError for an unknown name, TaskError for a file."""
    if is_custom(name):
        return load_custom(name)
    if name not in ALGORITHMS:
        raise ValueError(
            f"There is no algorithm {name!r}{_suggest_knob(name, ALGORITHMS)} One of your own is named by its file and class: "
            "my_file.py:Mine."
        )
    return ALGORITHMS[name]


def make(name: str, knobs: Mapping[str, Any]) -> Algorithm:
    """The algorithm with these knobs, and defaults for the rest.

    Raises ValueError for an unknown name, knob or value; the message lists the known ones.
    """
    kind = kind_of(name)
    _check_names(kind, name, knobs)
    return kind(**knobs)


def from_spec(spec: LossSpec) -> Loss:
    """The inverse of `Loss.loss_spec`: an algorithm, the supervised loss `sft`, or `given`."""
    if spec.name == Sft.name and not spec.knobs:
        return Sft()
    if spec.name == Given.name:
        _check_names(Given, spec.name, spec.knobs)
        return Given(**spec.knobs)
    return make(spec.name, spec.knobs)


def _check_names(kind: type[GroupRelative | Given], name: str, knobs: Mapping[str, Any]) -> None:
    knob_names = [knob.name for knob in fields(kind)]
    unknown = [
        f"{knob!r}{_suggest_knob(knob, knob_names)}" for knob in knobs if knob not in knob_names
    ]
    if unknown:
        raise ValueError("\n".join(f"{name} has no knob {message}" for message in unknown))


def _suggest_knob(name: str, known_names: Iterable[str]) -> str:
    names = sorted(known_names)
    matches = get_close_matches(name, names, n=1)
    suggestion = f"; did you mean {matches[0]!r}?" if matches else "."
    return f"{suggestion} There are: {', '.join(names)}."
