"""A user's own rubrics: scores by words, YAML in both directions, and messages for mistakes."""

from __future__ import annotations

import pytest

from groupwise.core.errors import ConfigError, TaskError
from groupwise.notebook.rubrics import Criterion, Rubric, RubricSet, load_rubrics

STEPS = Rubric(
    name="steps",
    description="How a solution is told",
    criteria=[
        Criterion(name="order", description="Steps follow", weight=2.0, keywords=["first", "then"]),
        Criterion(name="units", description="Names every unit", range=(-1.0, 1.0)),
    ],
    question_types=["math"],
    reference_response="First 3 kg, then 4 kg.",
    target_score=1.0,
    metadata={"author": "me"},
)


def test_keywords_or_else_the_words_of_the_description():
    assert STEPS.scores("FIRST this, then that") == {"order": 1.0, "units": -1.0}
    assert STEPS.scores("then it names a unit") == {
        "order": 0.5,
        "units": pytest.approx(-1 + 2 * 2 / 3),
    }
    assert STEPS.score("first, then, names every unit") == STEPS.highest == 3.0


def test_as_a_reward_it_records_its_criteria():
    reward, logged = STEPS.reward(), {}
    assert reward.__name__ == "steps"
    values = reward(
        prompts=["?", "?"],
        completions=["first then", [{"role": "assistant", "content": "names every unit"}]],
        log_metric=logged.setdefault,
    )
    assert values == [2.0 * 1.0 - 1.0, 0.0 + 1.0]
    assert logged == {"steps/order": 0.5, "steps/units": 0.0}


def test_a_set_scores_each_row_by_its_type():
    plain = Rubric(name="plain", criteria=[Criterion(name="short", keywords=["yes"])])
    both = RubricSet(name="both", rubrics=[STEPS, plain])
    assert both[0] is STEPS
    assert both["plain"] is plain
    values = both.reward()(
        completions=["first then", "yes", "yes"], question_type=["math", "poetry", None]
    )
    assert values == [1.0, 1.0, 1.0]
    only = RubricSet(rubrics=[STEPS]).reward()
    assert only(completions=["first", "yes"], question_type=["math", "poetry"]) == [0.0, None]
    with pytest.raises(TaskError, match="There are: steps, plain"):
        _ = both["stops"]


def test_yaml_there_and_back(tmp_path):
    STEPS.to_yaml(tmp_path / "one.yaml")
    assert load_rubrics(tmp_path / "one.yaml").rubrics == (STEPS,)
    both = RubricSet(
        name="both", rubrics=[STEPS, STEPS.changed(name="other")], metadata={"version": "1.0"}
    )
    both.to_yaml(tmp_path / "two.yml")
    assert load_rubrics(str(tmp_path / "two.yml")) == both
    (tmp_path / "one.yaml").unlink()
    STEPS.changed(name="third").to_yaml(tmp_path / "three.yaml")
    found = load_rubrics(tmp_path)
    assert [each.name for each in found.rubrics] == ["third", "steps", "other"]
    for place in (tmp_path / "none.yaml", tmp_path / "none"):
        with pytest.raises(ConfigError, match="none"):
            load_rubrics(place)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\ncriteria:\n  - {name: a, wieght: 2, keywords: [b]}\n", "wieght"), ("name: x\ncriteria: []\n", r"criteria is \[\]"),
        ("criteria:\n  - {name: a, keywords: [b]}\n", "name is required"),
        ("name: x\ncriteria:\n  - {name: a, description: of it}\n", "no answer could meet it"),
        ("name: x\ncriteria:\n  - {name: a, keywords: [b], range: [1, 1]}\n", "the greater one"),
        ("name: x\ntarget_score: 2\ncriteria: [{name: a, keywords: [b]}]\n", "reference_response"),
        ("name: x\ncriteria: [{name: a, keywords: [b]}, {name: a, keywords: [c]}]\n", "two criteria"), ("", "is empty"),
        ("- name: x\n", "holds"),
    ],
)  # fmt: skip
def test_errors_of_a_rubric_file_name_the_key(text, said, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        load_rubrics(tmp_path / "x.yaml")
    assert "x.yaml" in str(refused.value)
    assert "model" not in str(refused.value)


@pytest.mark.parametrize(
    ("target", "said"), [(99.0, "from -1 to 3"), (2.5, "scores 1 .order 1, units -1, not yet")]
)
def test_a_reference_reaches_its_score(target, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        STEPS.changed(target_score=target)
    STEPS.to_yaml(tmp_path / "x.yaml")
    text = (tmp_path / "x.yaml").read_text()
    (tmp_path / "x.yaml").write_text(text.replace("target_score: 1.0", f"target_score: {target}"))
    with pytest.raises(ConfigError, match=said):
        load_rubrics(tmp_path / "x.yaml")
