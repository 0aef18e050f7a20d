"""Makes problems of the package reasoning-gym in a separate process. Grading runs in the process that computes rewards.

`python -m groupwise.tasks.builtin.reasoning_gym_problems` reads a request from standard input and answers it on standard output,
both JSON:

    {"seed": 0, "sizes": {"test": 2}, "datasets": [{"name": "chain_sum", "level": null, "parameters": {}, "weight": 1.0}]}
    {"rows": {"test": [{"source": 0, "question": "State …", "answer": "19", "entry": "{'question': …}"}, …]}}
    {"problem": "why there are none"}

The process is separate for three reasons: some generators iterate over sets of strings, whose order differs between processes
unless the hash seed is fixed; some use Python's global random generator or print; and a slow one can be killed.

An entry is sent as a Python literal: graders need its tuples and numeric keys, which JSON would change. It is never regenerated
from a seed, because then a reward would depend on the process that computes it.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from groupwise.core.extras import not_installed
from groupwise.core.plugins import nearest
from groupwise.tasks.builtin.reasoning_gym_answers import is_harmless
from groupwise.tasks.data.order import Stream

SPLITS = ("test", "validation", "train")
"""Splits in the order in which they are made: earlier ones do not depend on the sizes of later ones."""
BLOCK = 100
"""Problems per dataset object. An index counts as a seed, so a split uses consecutive seeds, one block at a time."""
SEEDS_PER_SPLIT = 10**9
"""Seeds may reach 2**32; each split has a range of this many."""
RIGHT = 1.0 - 1e-6
"""Lowest score at which an answer counts as right."""
WRITTEN_ANSWERS = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Datasets whose entries have no answer, with the metadata key that holds a correct one."""

Spec = Mapping[str, Any]
"""A dataset: `name`, `level` or None, `parameters`."""


def dataset_of(spec: Spec, seed: int = 0, size: int = 1) -> Any:
    """The package's dataset object. Raises ValueError for an unknown name, level or parameter."""
    factory = _import_package()
    name, level = str(spec["name"]), spec["level"]
    if name == "composite":
        raise ValueError(
            "`composite` is a mixture of other datasets; list these under task.datasets, each with its weight."
        )
    if name not in factory.DATASETS:
        suggestions = nearest(name, factory.DATASETS)
        hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
        available = ", ".join(sorted(set(factory.DATASETS) - {"composite"}))
        raise ValueError(
            f"there is no dataset `{name}` in reasoning-gym.{hint} It has: {available}."
        )
    kind = factory.DATASETS[name][1]
    parameter_names = [
        field.name for field in dataclasses.fields(kind) if field.name not in ("seed", "size")
    ]
    for parameter in spec["parameters"]:
        if parameter not in parameter_names:
            suggestions = nearest(parameter, parameter_names)
            hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else "."
            raise ValueError(
                f"the dataset `{name}` has no parameter `{parameter}`{hint} It takes: {', '.join(parameter_names)}."
            )
    options = {**spec["parameters"], "seed": seed, "size": size}
    try:
        config = (
            kind(**options) if level is None else _config_of_level(factory, name, level, options)
        )
        return factory.DATASETS[name][0](config=config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"the dataset `{name}`: {str(error) or type(error).__name__}") from error


def entry_as_text(entry: Mapping[str, Any]) -> str:
    """An entry as a Python literal. Raises ValueError if it holds anything but plain values."""
    text = repr(_without_numpy(entry))
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"an entry holds something that is not a plain value: {text:.200}"
        ) from error
    return text


def entry_of_text(text: str) -> dict[str, Any]:
    """The entry that `entry_as_text` wrote. Raises ValueError for anything else."""
    try:
        entry = ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError) as broken:
        raise ValueError(f"the column `entry` holds no entry: {text!r:.80}") from broken
    if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
        raise ValueError(f"the column `entry` holds no question, answer and metadata: {text!r:.80}")
    return cast("dict[str, Any]", entry)


def main() -> None:
    """Answer the request on standard input. Output that generators print is sent to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        answer = {"rows": _rows_by_split(request)}
    except ValueError as problem:
        answer = {"problem": str(problem)}
    with answers:
        json.dump(answer, answers)


# --- making problems -----------------------------------------------------------------------------


def _rows_by_split(request: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each split, in a random order if they come from several datasets."""
    seen: set[str] = set()
    seed, datasets, sizes = request["seed"], request["datasets"], request["sizes"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for split in (split for split in SPLITS if split in sizes):
        counts = shares([spec["weight"] for spec in datasets], sizes[split])
        split_rows = [
            row
            for source, (spec, count) in enumerate(zip(datasets, counts, strict=True))
            for row in _new_rows(spec, source, _first_seed(seed, source, split), count, seen)
        ]
        is_mixture = len(datasets) > 1
        order = Stream("reasoning_gym", seed, split)
        rows[split] = order.sample(split_rows, len(split_rows)) if is_mixture else split_rows
    return rows


def shares(weights: Sequence[float], total: int) -> list[int]:
    """How many of `total` each weight gets: rounded down, and the remainder goes to the largest fractions."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _first_seed(seed: int, source: int, split: str) -> int:
    start = Stream("reasoning_gym", seed, source).below(SEEDS_PER_SPLIT // 2)
    return start + SPLITS.index(split) * SEEDS_PER_SPLIT


def _new_rows(
    spec: Spec, source: int, first: int, count: int, seen: set[str]
) -> list[dict[str, Any]]:
    """Makes `count` problems whose question is not in `seen`, and adds them to it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        previous_count, failure = len(rows), None
        for entry in _entries_of_block(spec, first):
            if isinstance(entry, Exception):
                failure = entry
            elif entry["question"] not in seen:
                seen.add(entry["question"])
                gold = entry.pop("gold")
                rows.append(
                    {
                        "source": source,
                        "question": entry["question"],
                        "answer": gold,
                        "entry": entry_as_text(entry),
                    }
                )
                if len(rows) == count:
                    break
        if len(rows) == previous_count:
            if failure is not None:
                raise ValueError(
                    f"the dataset `{spec['name']}` made none of {BLOCK} problems in a row; the last one failed: "
                    f"{type(failure).__name__}: {failure}"
                )
            raise ValueError(
                f"the dataset `{spec['name']}` has too few different problems: after {previous_count} of {count}, {BLOCK} in a row were "
                "there already. Make the splits smaller, or the problems larger by level or parameters."
            )
        first += BLOCK
    return rows


def _entries_of_block(spec: Spec, start: int) -> Iterator[dict[str, Any] | Exception]:
    """The entries of a block, each with `gold`: a correct answer as text, or None.

    An entry that could not be made, or whose own answer is wrong, is replaced by the exception that explains why.
    """
    import numpy

    name, dataset = str(spec["name"]), dataset_of(spec, start, BLOCK)
    for index in range(BLOCK):
        random.seed(start + index)
        numpy.random.seed(start + index)
        try:
            entry = dataset[index]
            if entry["answer"] is not None:
                # A correct answer that the grader may not see, such as an unsolved integral, also counts as None.
                gold = str(entry["answer"])
                shows_gold = is_harmless(gold, name)
                if not shows_gold or dataset.score_answer(entry["answer"], entry) < RIGHT:
                    raise ValueError(f"its grader rejects its own answer, {entry['answer']!r:.80}")
            else:  # the metadata may have a correct one
                metadata_answer = entry["metadata"].get(WRITTEN_ANSWERS.get(name))
                gold = (
                    metadata_answer
                    if metadata_answer is None or isinstance(metadata_answer, str)
                    else json.dumps(metadata_answer)
                )
                if gold is not None and dataset.score_answer(gold, entry) < RIGHT:
                    gold = None
            yield {**entry, "gold": gold}
        except Exception as error:  # noqa: BLE001 — generators fail in many ways for some of their seeds
            yield error


def _without_numpy(value: Any) -> Any:
    """The value with numpy types replaced by plain ones, because numpy types print as calls."""
    if isinstance(value, dict):
        return {
            _without_numpy(key): _without_numpy(item)
            for key, item in cast("dict[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        entries = [_without_numpy(item) for item in cast("Sequence[Any]", value)]
        return entries if isinstance(value, list) else tuple(entries)
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


# --- the package ---------------------------------------------------------------------------------


def _import_package() -> Any:
    """The package's module of datasets and curricula by name. Raises ValueError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dependency warns when it is compiled
        try:
            from reasoning_gym import factory  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as missing:
            raise ValueError(
                not_installed("The task reasoning_gym", "reasoning-gym", "reasoning-gym")
            ) from missing
    return cast("Any", factory)


def _config_of_level(factory: Any, name: str, level: int, options: Mapping[str, Any]) -> Any:
    """The configuration of the dataset's curriculum for a level; `options` override it."""
    if name not in factory.CURRICULA:
        raise ValueError("it has no levels; give parameters instead")
    curriculum = factory.create_curriculum(name)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > highest:
        raise ValueError(f"its highest level is {highest}, and {level} was asked for")
    curriculum.set_global_level(level)
    return dataclasses.replace(curriculum.generate_configuration(), **options)


if __name__ == "__main__":
    main()
