r"""Mathematics with one right answer: generated arithmetic, or problems from a file or the hub.

A completion is to think between `<think>` and `</think>` and to answer between `<answer>` and `</answer>`. Two parts make the reward, 1.1
at most:

    math_answer    1      the answer is right: the last answer tag, or else the last \boxed{}, against the gold answer by value
    soft_format    0.1    both pairs of tags, in order and with content (`task.format_weight`)

With `task.strict` the first is `pure_accuracy_math`: the completion must begin with the tags, and the answer must be
the gold one as it is written.

Generated problems have five levels:

    1    a sum or difference of numbers up to 50                   23 + 18
    2    … of two digits, or a product up to 12 × 12               81 - 37, 7 × 8
    3    three numbers, of which two are multiplied                14 + 6 × 9
    4    brackets, and divisions without a remainder               (12 + 9) × 4 - 7, (32 + 24) ÷ 8
    5    a sum, difference or product of two fractions             2/3 + 3/4

No problem occurs twice, within a split or across splits; generated problems that differ only in the order of summands or factors
count as the same. Problems of a source are compared by their text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import lcm
from statistics import fmean
from typing import Any

from pydantic import BaseModel, model_validator

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.tags import THINK
from groupwise.core.reward_call.text import CompletionText
from groupwise.core.settings.schema import setting
from groupwise.core.settings.view import TaskSection
from groupwise.tasks.data.chat import Account, Rows
from groupwise.tasks.data.messages import Unusable
from groupwise.tasks.data.order import Stream
from groupwise.tasks.data.source_rows import keep_usable, question_key
from groupwise.tasks.data.sources import read_source
from groupwise.tasks.rewards.formats import SoftFormat
from groupwise.tasks.rewards.gold import at_mark, marked_answer
from groupwise.tasks.rewards.mathematics import MathAnswer, PureAccuracyMath, in_words

LEVELS = 5
GENERATED = 2000
"""Number of generated training problems if the config does not set one."""
MAX_DUPLICATES_IN_A_ROW = 1000
"""Number of consecutive duplicates after which the generator gives up."""
LONGEST_WORDS = 40
"""Longest answer in words, in characters; in a longer text (a solution) the answer must be marked."""
LONGEST_ANSWER = 200
"""The same for numbers and expressions, which have no words."""

INSTRUCTION = "Solve the problem. Think between <think> and </think>, then answer between <answer> and </answer>."
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "question": ("question", "problem", "prompt"),
    "answer": ("answer", "solution"),
    "solution": ("solution", "answer"),
}
"""Accepted column names of a source, unless `columns` names one; the first that exists is used. A solution may contain the answer,
and an answer the solution.
"""


class TaskConfig(TaskSection):
    """The `task:` section of a config for this task."""

    min_level: int = setting(1, "Lowest level of generated problems.", ge=1, le=LEVELS)
    max_level: int = setting(3, "Highest level; each problem has a random one.", ge=1, le=LEVELS)
    source: str | None = setting(
        None, "File, folder or hub id with problems of your own; null generates them."
    )
    source_config: str | None = setting(None, "Name of a hub set's configuration, such as main.")
    source_split: str = setting("train", "Split of the source to train on.")
    eval_split: str | None = setting(
        None,
        "Split of the source for evaluations; null takes eval_size of its problems out of the training.",
    )
    columns: dict[str, str] = setting(
        {},
        "Names of question, answer and solution in the source, such as {question: ask, answer: result}.",
    )
    strict_rows: bool = setting(
        False,
        "Refuse a row of the source that cannot be used, instead of leaving it out and counting it.",
    )
    strict: bool = setting(
        False,
        "Reward only completions that begin with the tags and whose answer is written exactly like the gold one.",
    )
    format_weight: float = setting(0.1, "Weight of the layout; a right answer has weight 1.")
    train_size: int | None = setting(
        None, "Training examples; null: 2000 generated ones, or all of the source.", ge=1
    )
    validation_size: int = setting(128, "Held-out examples of a supervised run.", ge=1)
    eval_size: int = setting(128, "Held-out examples of evaluations.", ge=1)
    seed: int = setting(0, "Seed of the examples; the run has a seed of its own.", ge=0)

    @model_validator(mode="after")
    def _check_options(self) -> TaskConfig:
        if self.min_level > self.max_level:
            raise ValueError("min_level is greater than max_level")
        if unknown := set(self.columns) - set(COLUMNS):
            raise ValueError(
                f"columns names {' and '.join(sorted(unknown))}; what can be named is {' and '.join(COLUMNS)}"
            )
        idle = _OF_SOURCES if self.source is None else _OF_GENERATION
        for name in idle:
            if getattr(self, name) != type(self).model_fields[name].default:
                where = "without" if self.source is None else "with"
                raise ValueError(f"{name} has no effect {where} source; leave it out")
        return self


_OF_SOURCES = ("source_config", "source_split", "eval_split", "columns", "strict_rows")
_OF_GENERATION = ("min_level", "max_level")


def get_config_schema() -> type[BaseModel]:
    """The config's `task:` section."""
    return TaskConfig


def get_rl_dataset(config: Any) -> Rows:
    """The training rows, with the columns `answer` and `gold_completion`, and for generated ones `level`."""
    return _make_splits(TaskConfig.of(config)).train


def get_eval_dataset(config: Any) -> Rows:
    """The test rows."""
    return _make_splits(TaskConfig.of(config)).test


def get_sft_dataset(config: Any, tokenizer: Any) -> Rows:
    """The training rows with worked solutions."""
    return _with_completions(get_rl_dataset(config))


def get_sft_eval_dataset(config: Any, tokenizer: Any) -> Rows:
    """The validation rows with worked solutions."""
    return _with_completions(_make_splits(TaskConfig.of(config)).validation)


def get_reward_funcs(config: Any, tokenizer: Any) -> list[tuple[Callable[..., Any], float]]:
    """Correctness and the layout, with their weights."""
    task_config = TaskConfig.of(config)
    layout = SoftFormat(reasoning_tag=THINK.reasoning, answer_tag=THINK.answer, right=1.0)
    return [(_accuracy_reward(task_config), 1.0), (layout, task_config.format_weight)]


def compute_metrics(
    prompts: Sequence[Any],
    completions: Sequence[CompletionText],
    dataset_rows: Sequence[dict[str, Any]],
    config: Any,
    tokenizer: Any,
) -> dict[str, Any]:
    """Shares of right answers, in all and for each level, and of completions in the layout."""
    (accuracy, _), (layout, _) = get_reward_funcs(config, tokenizer)
    right = accuracy(completions, answer=[row["answer"] for row in dataset_rows])
    by_level: dict[str, list[float]] = {}
    for value, row in zip(right, dataset_rows, strict=True):
        if "level" in row:
            by_level.setdefault(f"accuracy_level_{row['level']}", []).append(value)
    return {
        "metrics": {
            "accuracy": fmean(right),
            "format_accuracy": fmean(layout(completions)),
            **{name: fmean(values) for name, values in sorted(by_level.items())},
        },
        "correct": right,
    }


def _accuracy_reward(task_config: TaskConfig) -> MathAnswer | PureAccuracyMath:
    return PureAccuracyMath("answer") if task_config.strict else MathAnswer("answer")


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its answer and the worked solution."""

    question: str
    answer: str
    worked: str
    key: str
    """Equal for problems that are the same, e.g. with their summands swapped."""
    level: int | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The row for training and evaluation."""
        gold = f"<think>\n{self.worked}\n</think>\n<answer>{self.answer}</answer>"
        return {
            "prompt": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": self.question},
            ],
            "answer": self.answer,
            "gold_completion": gold,
            **({} if self.level is None else {"level": self.level}),
        }


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of each split. No problem occurs twice; each split reports which rows of the source were left out."""

    test: Rows
    validation: Rows
    train: Rows


def _make_splits(task_config: TaskConfig) -> Splits:
    if task_config.source is None:
        held_out = task_config.eval_size + task_config.validation_size
        problems = generate(task_config, held_out + (task_config.train_size or GENERATED))
        return _split_problems(problems, task_config, Counter())
    train_problems, left_out = _problems_of_split(
        task_config, task_config.source, task_config.source_split
    )
    shuffled = Stream("math", task_config.seed).sample(train_problems, len(train_problems))
    if task_config.eval_split is None:
        return _split_problems(shuffled, task_config, left_out)
    test_problems, left_out_of_test = _problems_of_split(
        task_config, task_config.source, task_config.eval_split
    )
    test = test_problems[: task_config.eval_size]
    test_keys = {problem.key for problem in test}
    rest = [problem for problem in shuffled if problem.key not in test_keys]
    left_out["the test split has the question"] += len(shuffled) - len(rest)
    splits = _split_problems([*test, *rest], task_config, left_out, len(test))
    return replace(splits, test=Rows(splits.test, Account(dict(left_out_of_test))))


def _split_problems(
    problems: Sequence[Problem],
    task_config: TaskConfig,
    left_out: Counter[str],
    test: int | None = None,
) -> Splits:
    """Splits the problems. The test takes the first ones, so it does not depend on the number of training rows. Raises TaskError if
    none are left to train on.
    """
    first = task_config.eval_size if test is None else test
    second = first + task_config.validation_size
    if len(problems) <= second:
        raise TaskError(
            f"{task_config.source} has {len(problems)} different problems that can be used, of which task.eval_size and "
            f"task.validation_size take {second}, so that none is left to train on. Lower them."
        )
    rows, account = [problem.row for problem in problems], Account(dict(+left_out))
    end = None if task_config.train_size is None else second + task_config.train_size
    parts = rows[:first], rows[first:second], rows[second:end]
    return Splits(*(Rows(part, account) for part in parts))


def _with_completions(rows: Rows) -> Rows:
    return Rows([{**row, "completion": row["gold_completion"]} for row in rows], rows.account)


# --- problems of a source ------------------------------------------------------------------------


def _problems_of_split(
    task_config: TaskConfig, source: str, split: str
) -> tuple[list[Problem], Counter[str]]:
    rows = read_source(source, task_config.source_config, split, task_config.columns or None)
    question, answer, solution = (_find_column(rows, kind, source) for kind in COLUMNS)
    return keep_usable(
        rows,
        lambda row: problem_of(
            task_config, *(row.get(name) for name in (question, answer, solution))
        ),
        lambda problem: problem.key,
        source=source,
        strict=task_config.strict_rows,
        remedy=(
            f"Questions are read from `{question}` and answers from `{answer}`: after ####, in \\boxed{{}}, in answer tags, or a text of "
            f"one line with at most {LONGEST_WORDS} characters, {LONGEST_ANSWER} for numbers and expressions without words. task.columns "
            "names other columns."
        ),
    )


def _find_column(rows: Sequence[Mapping[str, Any]], kind: str, source: str) -> str:
    """The name of the column that holds questions or answers."""
    columns = dict.fromkeys(name for row in rows for name in row)
    matches = [name for name in COLUMNS[kind] if name in columns]
    if not matches:
        raise TaskError(
            f"{source} has no column for the {kind}: looked for {', '.join(COLUMNS[kind])}. It has: {', '.join(columns)}. Name it in "
            f"task.columns, as in {{{kind}: …}}."
        )
    return matches[0]


def _cell_text(cell: Any) -> str:
    is_value = isinstance(cell, str | int | float) and cell == cell  # NaN is a gap in a table
    return str(cell).strip() if is_value else ""


def problem_of(task_config: TaskConfig, *cells: Any) -> Problem:
    """The problem made of a row's cells: question, answer and solution. Raises Unusable."""
    question, answer, solution = map(_cell_text, cells)
    if not question:
        raise Unusable("there is no question")
    if not answer:
        raise Unusable("there is no answer")
    final = final_answer(answer)
    if final is None:
        raise Unusable("no answer is marked, and the text is too long for one")
    try:
        _accuracy_reward(task_config).check_row({"answer": final})
    except ValueError as reason:
        raise Unusable("the reward cannot read the answer") from reason
    key = question_key(question)
    # The worked solution as a model may write it in its reasoning, without tags and calculator annotations.
    solution_and_answer = at_mark(solution)
    answer_text = solution if solution_and_answer is None else solution_and_answer[0]
    text = re.sub(r"<<[^<>]*>>|</?(?:think|answer)>", "", answer_text).strip()
    worked = text if text not in ("", final) else f"The answer is {final}."
    return Problem(question, final, worked, key)


def final_answer(solution: str) -> str | None:
    """The answer that a text gives: the marked part, or the whole text if it is short; None otherwise."""
    marked = marked_answer(solution, THINK.answer, boxes=True)
    if marked is not None:
        return marked or None
    answer = solution.strip()
    longest = LONGEST_WORDS if in_words(answer) else LONGEST_ANSWER
    return answer if answer and "\n" not in answer and len(answer) <= longest else None


# --- generated problems --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """`left sign right`."""

    sign: str
    left: Term
    right: Term


Term = Fraction | Operation

_BINDS = {"+": 1, "-": 1, "×": 2, "÷": 2}


def generate(task_config: TaskConfig, count: int) -> list[Problem]:
    """Makes `count` different problems of the config's levels. Raises TaskError if there seem to be fewer."""
    return list(
        _distinct_problems(task_config.min_level, task_config.max_level, task_config.seed, count)
    )


@lru_cache(maxsize=1)  # each hook takes its part of the same problems
def _distinct_problems(
    min_level: int, max_level: int, seed: int, count: int
) -> tuple[Problem, ...]:
    """The first `count` different problems. Raises TaskError if there seem to be fewer."""
    stream = Stream("math", seed)
    problems: dict[str, Problem] = {}
    repeats = 0
    while len(problems) < count:
        level = min_level + stream.below(max_level - min_level + 1)
        term = _OF_LEVEL[level](stream)
        question, worked, key = (
            f"What is {_term_text(term)}?",
            "\n".join(_worked_steps(term)),
            _term_key(term),
        )
        repeats = repeats + 1 if key in problems else 0
        problems.setdefault(key, Problem(question, str(_value_of_term(term)), worked, key, level))
        if repeats == MAX_DUPLICATES_IN_A_ROW:
            raise TaskError(
                f"The levels that task.min_level and task.max_level name seem to have no more than {len(problems)} different problems, "
                f"and {count} are asked for. Raise task.max_level, or ask for fewer."
            )
    return tuple(problems.values())


def _random_sum(stream: Stream, least: int, most: int) -> Operation:
    """A sum or difference with a non-negative result."""
    first, second = _random_number(stream, least, most), _random_number(stream, least, most)
    if stream.below(2):
        return Operation("+", first, second)
    return Operation("-", max(first, second), min(first, second))


def _random_product(stream: Stream, most: int) -> Operation:
    return Operation("×", _random_number(stream, 2, most), _random_number(stream, 2, most))


def _level_3(stream: Stream) -> Operation:
    product = _random_product(stream, 12)
    other = _random_number(stream, 1, 50)
    if stream.below(2):
        return Operation("+", other, product)
    larger, smaller = (product, other) if _value_of_term(product) >= other else (other, product)
    return Operation("-", larger, smaller)


def _level_4(stream: Stream) -> Operation:
    if stream.below(2):
        product = Operation("×", _random_sum(stream, 10, 40), _random_number(stream, 2, 9))
        other = _random_number(stream, 1, 40)
        return Operation("-" if _value_of_term(product) >= other else "+", product, other)
    divisor, quotient = _random_number(stream, 2, 12), _random_number(stream, 2, 20)
    first = _random_number(stream, 1, int(divisor * quotient) - 1)
    return Operation("÷", Operation("+", first, divisor * quotient - first), divisor)


def _level_5(stream: Stream) -> Operation:
    first, second = _random_fraction(stream), _random_fraction(stream)
    sign = "+-×"[stream.below(3)]
    return (
        Operation(sign, max(first, second), min(first, second))
        if sign == "-"
        else Operation(sign, first, second)
    )


_OF_LEVEL: dict[int, Callable[[Stream], Operation]] = {
    1: lambda stream: _random_sum(stream, 1, 50),
    2: lambda stream: (
        _random_product(stream, 12) if stream.below(3) == 0 else _random_sum(stream, 10, 99)
    ),
    3: _level_3,
    4: _level_4,
    5: _level_5,
}


def _random_number(stream: Stream, least: int, most: int) -> Fraction:
    return Fraction(least + stream.below(most - least + 1))


def _random_fraction(stream: Stream) -> Fraction:
    """Between 0 and 1, with a denominator up to 12."""
    under = 2 + stream.below(11)
    return Fraction(1 + stream.below(under - 1), under)


def _value_of_term(term: Term) -> Fraction:
    if isinstance(term, Fraction):
        return term
    left, right = _value_of_term(term.left), _value_of_term(term.right)
    match term.sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "×":
            return left * right
        case _:
            return left / right


def _term_text(term: Term) -> str:
    """The term as text, with brackets if they are needed."""
    if isinstance(term, Fraction):
        return str(term)
    left, right = _term_text(term.left), _term_text(term.right)
    if isinstance(term.left, Operation) and _BINDS[term.left.sign] < _BINDS[term.sign]:
        left = f"({left})"
    if isinstance(term.right, Operation) and _BINDS[term.right.sign] <= _BINDS[term.sign]:
        right = f"({right})"
    return f"{left} {term.sign} {right}"


def _term_key(term: Term) -> str:
    """Text that is the same if summands or factors are swapped."""
    if isinstance(term, Fraction):
        return str(term)
    operands = [_term_key(term.left), _term_key(term.right)]
    if term.sign in "+×":
        operands.sort()
    return f"({operands[0]}{term.sign}{operands[1]})"


def _worked_steps(term: Term) -> Iterator[str]:
    """One line for each operation, in the order of evaluation."""
    if isinstance(term, Fraction):
        return
    yield from _worked_steps(term.left)
    yield from _worked_steps(term.right)
    left, right = _value_of_term(term.left), _value_of_term(term.right)
    stages = [
        f"{left} {term.sign} {right}",
        *_intermediate_steps(term.sign, left, right),
        str(_value_of_term(term)),
    ]
    yield " = ".join(dict.fromkeys(stages))


def _intermediate_steps(sign: str, left: Fraction, right: Fraction) -> Iterator[str]:
    """Intermediate steps between a hard operation and its result."""
    if left.denominator > 1 or right.denominator > 1:
        if sign == "×":
            yield f"{left.numerator * right.numerator}/{left.denominator * right.denominator}"
        else:
            denominator = lcm(left.denominator, right.denominator)
            yield f"{int(left * denominator)}/{denominator} {sign} {int(right * denominator)}/{denominator}"
    elif sign in "+-" and left >= 10 and right > 10 and right % 10:
        tens, ones = right - right % 10, right % 10
        first = left + tens if sign == "+" else left - tens
        yield f"{left} {sign} {tens} {sign} {ones}"
        yield f"{first} {sign} {ones}"
    elif sign == "×" and left > 12 and left % 10:
        tens, ones = left - left % 10, left % 10
        yield f"{tens} × {right} + {ones} × {right}"
        yield f"{tens * right} + {ones * right}"
