"""Rubrics of one's own: weighted criteria, written in Python or YAML, that score completions by their words or through a judge.

    rubric = Rubric(
        name="steps",
        criteria=[
            Criterion(name="order", description="The steps follow each other", weight=2.0, keywords=["first", "then", "therefore"]),
            Criterion(name="check", description="The result is checked", keywords=["check", "verify"]),
        ],
    )
    train_grpo(config, session, extra_reward_functions=[rubric.reward()])

Words are cheap and easily learnt by heart: a policy can say `therefore` without reason. `rubric.judge(endpoint=…, model=…)` asks a model.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

from pydantic import Field
from ruamel.yaml import YAML

from groupwise.core import atomic_files
from groupwise.core.errors import ConfigError, StoreError, TaskError, UsageError
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.settings.schema import Conflict, setting
from groupwise.core.settings.tree import Tree, read_yaml
from groupwise.core.settings.validation import validate
from groupwise.notebook.friendly_errors import UserModel
from groupwise.tasks.rewards.judge import Judge
from groupwise.tasks.rewards.matching import keyword_share
from groupwise.tasks.rewards.overlap import overlap, words

Item = TypeVar("Item")

if TYPE_CHECKING:  # any sequence is taken, and held as a tuple
    SequenceOf = Sequence[Item]
else:
    SequenceOf = Annotated[tuple[Item, ...], Field(strict=False)]

Texts = SequenceOf[str]
LogMetric = Callable[[str, float], None]

EXPECTED = "a rubric has a `name:` and `criteria:`, a set of them has `rubrics:`"
"""The expected content of a file, for messages."""
ROUNDING = 1e-9
"""Largest rounding error of a sum of weighted scores."""
LONG = 3
"""Minimum number of letters of a description's word that carries meaning."""


class Criterion(UserModel):
    """One thing that a good answer has."""

    name: str = setting(..., "What it is called in metrics.", min_length=1)
    description: str = setting("", "What it asks for.")
    weight: float = setting(1.0, "Its share in the score.", ge=0)
    range: Annotated[tuple[float, float], Field(strict=False)] = setting(
        (0.0, 1.0), "Its score where nothing of it is met, and where all is."
    )
    keywords: Texts = setting(
        (), "Words or phrases that show it; without them, the words of the description."
    )
    examples: Texts = setting((), "Answers that meet it, for a judge.")

    def conflicts(self) -> Iterator[Conflict]:
        """A range whose low end is not below its high end, and a criterion that no text could meet."""
        low, high = self.range
        if not low < high:
            yield Conflict(
                f"range is {low:g} to {high:g}; the second number must be the greater one.",
                ("range",),
            )
        if not self.keywords and not self._vocabulary:
            yield Conflict(
                "it has neither keywords nor a description with words of three letters and more, so no answer could meet it.",
                ("keywords", "description"),
            )

    def score(self, text: str) -> float:
        """A number in the range, by the share of keywords (else of the description's words) that the text has.

        Raises UsageError if `text` is not a string.
        """
        if not isinstance(cast("object", text), str):
            raise UsageError(
                f"What is to be scored is of the type {type(text).__name__}. Give the text of one answer; several are scored one by one."
            )
        share = keyword_share(text, self.keywords)
        if share is None:
            share = overlap(set(words(text)), self._vocabulary)
        low, high = self.range
        return low + (high - low) * share

    @property
    def _vocabulary(self) -> list[str]:
        return [word for word in words(self.description) if len(word) >= LONG]

    def __str__(self) -> str:
        example_lines = "".join(f"\n  such as: {example}" for example in self.examples)
        return f"{self.name}{f': {self.description}' if self.description else ''}{example_lines}"


class Rubric(UserModel):
    """Criteria that are scored together."""

    name: str = setting(..., "What it is called.", min_length=1)
    description: str = setting("", "What it judges.")
    criteria: SequenceOf[Criterion] = setting(..., "At least one.", min_length=1)
    question_types: Texts = setting(
        (), "Values of a row's question_type that it is for; empty: any."
    )
    reference_response: str | None = setting(None, "An answer as it should be.")
    target_score: float | None = setting(
        None, "What the reference scores at least, by its words; it is checked."
    )
    metadata: dict[str, Any] = setting({}, "Anything else: version, author.")

    def conflicts(self) -> Iterator[Conflict]:
        """Two criteria with the same name; a target score without a reference, or one that the reference does not reach."""
        names = [criterion.name for criterion in self.criteria]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Conflict(f"two criteria are called {name!r}.", ("criteria",))
        if self.target_score is not None and self.reference_response is None:
            yield Conflict(
                "target_score is that of reference_response, which is missing.",
                ("target_score", "reference_response"),
            )
        if self.target_score is None or self.reference_response is None:
            return
        if any(list(criterion.conflicts()) for criterion in self.criteria):
            return  # the criteria report this themselves and cannot score
        reached = self.score(self.reference_response)
        keys = ("target_score", "reference_response", "criteria")
        if not self.lowest <= self.target_score <= self.highest:
            yield Conflict(
                f"target_score is {self.target_score:g}, but answers score from {self.lowest:g} to {self.highest:g}, the sum of weight × "
                "range of the criteria. Give a number between them, or leave it out.",
                keys,
            )
        elif reached < self.target_score - ROUNDING:
            parts = ", ".join(
                f"{name} {value:g}" for name, value in self.scores(self.reference_response).items()
            )
            yield Conflict(
                f"target_score is {self.target_score:g}, but reference_response scores {reached:g} ({parts}, not yet weighted). Fix the "
                "reference or the keywords, lower target_score, or leave it out.",
                keys,
            )

    def scores(self, text: str) -> dict[str, float]:
        """The score of each criterion by its name, not yet weighted."""
        return {criterion.name: criterion.score(text) for criterion in self.criteria}

    def score(self, text: str) -> float:
        """Σ weight × score of the criteria. Raises UsageError if `text` is not a string."""
        scores = self.scores(text)
        return sum(criterion.weight * scores[criterion.name] for criterion in self.criteria)

    @property
    def highest(self) -> float:
        """The score of an answer that meets all of it."""
        return sum(criterion.weight * criterion.range[1] for criterion in self.criteria)

    @property
    def lowest(self) -> float:
        """The score of an answer that meets nothing of it."""
        return sum(criterion.weight * criterion.range[0] for criterion in self.criteria)

    def reward(self) -> Callable[..., list[float]]:
        """A reward function that scores by words; the mean of each criterion is recorded as NAME/CRITERION."""
        return _reward(self.name, (self,))

    def judge(self, **parameters: Any) -> Judge:
        """A reward by a model that reads the rubric: `endpoint`, `model` and the other parameters of the reward `judge`."""
        return Judge(rubric=str(self), **parameters)

    def reweighted(self, weights: Mapping[str, float]) -> Self:
        """A copy with other weights for the named criteria. It has no target_score, because the old one belonged to the old weights."""
        self._refuse_unknown(weights)
        return self._with_criteria(
            [
                criterion.changed(weight=weights.get(criterion.name, criterion.weight))
                for criterion in self.criteria
            ]
        )

    def with_keywords(self, name: str, keywords: Sequence[str]) -> Self:
        """A copy with more keywords for one criterion, also without target_score."""
        self._refuse_unknown([name])
        return self._with_criteria(
            [
                criterion.changed(keywords=[*criterion.keywords, *keywords])
                if criterion.name == name
                else criterion
                for criterion in self.criteria
            ]
        )

    def normalised(self, highest: float = 1.0) -> Self:
        """A copy with scaled weights: an answer that meets every criterion scores `highest`. target_score is scaled too."""
        if self.highest <= 0:
            raise TaskError(f"The rubric {self.name!r} has no positive score that could be scaled.")
        factor = highest / self.highest
        return self._with_criteria(
            [criterion.changed(weight=criterion.weight * factor) for criterion in self.criteria],
            None if self.target_score is None else self.target_score * factor,
        )

    def to_yaml(self, path: Path | str) -> None:
        """Write the rubric to a file that `load_rubrics` can read. Raises UsageError if that is not possible."""
        _write_yaml(path, self)

    def _with_criteria(self, criteria: Sequence[Criterion], target: float | None = None) -> Self:
        target_fields = {} if self.target_score is None else {"target_score": target}
        return self.changed(criteria=criteria, **target_fields)

    def _refuse_unknown(self, names: Any) -> None:
        criterion_names = [criterion.name for criterion in self.criteria]
        for name in names:
            if name not in criterion_names:
                raise TaskError(
                    f"The rubric {self.name!r} has no criterion {name!r}. It has: {', '.join(criterion_names)}."
                )

    def __str__(self) -> str:
        """The rubric's text for a judge."""
        heavy = [f"- {criterion} (weight {criterion.weight:g})" for criterion in self.criteria]
        example = (
            [f"An answer as it should be:\n{self.reference_response}"]
            if self.reference_response
            else []
        )
        return "\n".join([*([self.description] if self.description else []), *heavy, *example])


class RubricSet(UserModel):
    """Rubrics for questions of several types."""

    name: str = setting("rubrics", "What it is called.", min_length=1)
    description: str = setting("", "What it is for.")
    rubrics: SequenceOf[Rubric] = setting(..., "At least one.", min_length=1)
    metadata: dict[str, Any] = setting({}, "Anything else.")

    def conflicts(self) -> Iterator[Conflict]:
        """Two rubrics of one name."""
        names = [rubric.name for rubric in self.rubrics]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            positions = [
                str(position) for position, other_name in enumerate(names, 1) if other_name == name
            ]
            yield Conflict(
                f"the rubrics {' and '.join(positions)} of {len(names)} are all called {name!r}; rename all but one.",
                ("rubrics",),
            )

    def __getitem__(self, which: int | str) -> Rubric:
        """The rubric at a position or with a name. Raises TaskError for an unknown name."""
        if isinstance(which, int):
            return self.rubrics[which]
        for rubric in self.rubrics:
            if rubric.name == which:
                return rubric
        raise TaskError(
            f"There is no rubric {which!r}. There are: {', '.join(rubric.name for rubric in self.rubrics)}."
        )

    def of_type(self, question_type: str | None) -> list[Rubric]:
        """The rubrics for a type of question; if there are none, or it has no type, the rubrics for any question."""
        matching = [rubric for rubric in self.rubrics if question_type in rubric.question_types]
        return matching or [rubric for rubric in self.rubrics if not rubric.question_types]

    def reward(self) -> Callable[..., list[float | None]]:
        """A reward function: for each row, the mean over the rubrics for its question_type; None if there are none."""
        return _reward(self.name, self)

    def to_yaml(self, path: Path | str) -> None:
        """Write the set to a file that `load_rubrics` can read. Raises UsageError if that is not possible."""
        _write_yaml(path, self)


def load_rubrics(path: Path | str) -> RubricSet:
    """The rubrics of a YAML file, which holds one or a set, or of all such files in a folder. Raises ConfigError."""
    source = Path(path).expanduser()
    if not source.is_dir():
        return _load_file(source)
    files = sorted(file for file in source.iterdir() if file.suffix in (".yaml", ".yml"))
    if not files:
        raise ConfigError(f"{source} has no files .yaml or .yml.")
    rubrics = [(file, rubric) for file in files for rubric in _load_file(file).rubrics]
    file_by_name: dict[str, Path] = {}
    for file, rubric in rubrics:
        if (first_file := file_by_name.setdefault(rubric.name, file)) != file:
            raise ConfigError(
                f"Two rubrics are called {rubric.name!r}, one in {first_file} and one in {file}. Rename one of them."
            )
    return RubricSet(name=source.name, rubrics=tuple(rubric for _, rubric in rubrics))


def _load_file(file: Path) -> RubricSet:
    tree: Tree = read_yaml(file, EXPECTED)
    if "rubrics" in tree.values:
        return validate(RubricSet, tree)
    rubric = validate(Rubric, tree)
    return RubricSet(name=rubric.name, rubrics=(rubric,))


def _write_yaml(path: Path | str, rubrics: Rubric | RubricSet) -> None:
    yaml: Any = YAML()
    yaml.default_flow_style = False
    text = io.StringIO()
    yaml.dump(rubrics.model_dump(mode="json", exclude_unset=True), text)
    file = Path(path).expanduser()
    try:
        atomic_files.write_file(file, text.getvalue().encode())
    except StoreError as error:  # its hint would be about a run
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise UsageError(
            f"The rubrics cannot be written to {file}: {reason}. Fix that, or name another file."
        ) from error


def _reward(name: str, rubrics: Sequence[Rubric] | RubricSet) -> Any:
    def reward(
        completions: Sequence[CompletionText], log_metric: LogMetric | None = None, **columns: Any
    ) -> list[float | None]:
        texts = [completion_text(completion) for completion in completions]
        types = columns.get("question_type", [None] * len(texts))
        rubrics_by_row = [
            rubrics.of_type(kind) if isinstance(rubrics, RubricSet) else rubrics for kind in types
        ]
        if log_metric is not None:  # the mean of each criterion
            scores_by_metric: dict[str, list[float]] = {}
            for text, row_rubrics in zip(texts, rubrics_by_row, strict=True):
                for rubric in row_rubrics:
                    for criterion, value in rubric.scores(text).items():
                        scores_by_metric.setdefault(f"{rubric.name}/{criterion}", []).append(value)
            for metric, values in scores_by_metric.items():
                log_metric(metric, fmean(values))
        return [
            fmean(rubric.score(text) for rubric in row_rubrics) if row_rubrics else None
            for text, row_rubrics in zip(texts, rubrics_by_row, strict=True)
        ]

    reward.__name__ = name
    return reward
