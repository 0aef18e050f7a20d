"""The file that `groupwise init` writes: the commands to run with it, then each choice below its reason."""

from __future__ import annotations

import io
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter

from groupwise.training.init.choices import Choice, Kind

WIDTH = 96
INDENT = 2


class _WithNull(RoundTripRepresenter):
    """Writes null as `null` instead of as nothing."""


def _null(representer: Any, _: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


cast("Any", _WithNull).add_representer(type(None), _null)


WARM_UP = """\
# A supervised run on the rows of get_sft_dataset before the training, which helps if hardly any
# answer is right at first:
# warm_up:
#   training: {max_steps: 20, examples_per_step: 16, learning_rate: 1e-4}
"""
"""The section for a task that has supervised rows, to be made active by hand."""
WARM_UP_UNTIL = """\
# A supervised run on the rows of get_sft_dataset before the training, which helps if hardly any
# answer is right at first. It ends as soon as sampled answers earn different rewards, or are alike:
# warm_up:
#   training:
#     max_steps: 20
#     examples_per_step: 16
#     learning_rate: 1e-4
#     stop_when: [groups/with_signal >= 0.6, groups/distinct < 0.6]
#   eval: {eval_steps: 1, completions: {max_prompts: 32}}
"""
"""The section for a task that also has held-out prompts: their sampled answers say when the warm-up may end."""


def commands(kind: Kind, task: str, file: str, *, evaluates: bool) -> list[str]:
    """The commands to run with the file, in order. `evaluates`: the task has held-out rows."""
    task_options, with_config = shlex.join(["--task-module", task]), shlex.join(["--config", file])
    check = (
        f"groupwise check {with_config} {task_options}"
        if kind == "rl"
        else f"groupwise check {task_options}"
    )
    examine = [f"groupwise doctor {with_config} {task_options}"] if kind == "rl" else []
    if kind == "rl" and evaluates:
        # At the temperature of the training: the most probable answer may be right where hardly any sampled one is.
        sampled = "--samples-per-prompt 4 eval.temperature=1.0"
        examine.append(f"groupwise eval {with_config} {task_options} --policy base {sampled}")
    train = f"groupwise {kind} {with_config} {task_options}"
    return [check, *examine, f"{train} --dry-run", train]


def render(
    title: str, command_lines: Sequence[str], choices: Iterable[Choice], at_end: str = ""
) -> str:
    """The content of the file. `title` is a sentence about it, `command_lines` are the commands; `at_end` is a comment."""
    content = CommentedMap()
    for choice in choices:
        _write_choice(content, choice)
    stream = io.StringIO()
    yaml: Any = YAML()
    yaml.Representer = _WithNull
    yaml.width = 10**6  # otherwise long texts are folded, which is hard to edit
    yaml.dump(content, stream)
    header = [*textwrap.wrap(title, WIDTH), "", *command_lines]
    comments = "\n".join(f"# {line}".rstrip() for line in header)
    return f"{comments}\n\n{stream.getvalue()}{at_end}"


def _write_choice(content: Any, choice: Choice) -> None:
    *sections, leaf = choice.path
    for section in sections:
        content = content.setdefault(section, CommentedMap())
    content[leaf] = choice.value
    if choice.reason:
        indent = INDENT * len(sections)
        lines = textwrap.wrap(" ".join(choice.reason.split()), WIDTH - indent)
        content.yaml_set_comment_before_after_key(leaf, before="\n".join(lines), indent=indent)
