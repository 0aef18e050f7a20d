"""Mathematics: generated problems have right answers and are in one split each; sources are read and split in the same way."""

import re
from fractions import Fraction

import pytest

from groupwise.core.errors import TaskError
from groupwise.tasks.builtin import math
from groupwise.tasks.builtin.math import final_answer
from tests import task_kit
from tests.task_kit import config, earned, jsonl


def splits(**own):
    return task_kit.splits(math, config(**own))


def score(text, answer="42", **own):
    return earned("math", text, {"answer": answer}, config(**own))


def question(row):
    return row["prompt"][1]["content"]


def value(expression):
    """The expression computed by Python, with fractions for numbers."""
    signs = expression.replace("×", "*").replace("÷", "/")
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", signs))


def answered(answer, thought="I see."):
    return f"<think>\n{thought}\n</think>\n<answer>{answer}</answer>"


# Rewards


@pytest.mark.parametrize(("text", "reward", "strict"), [
    (answered("42"), 1.1, 1.1), (answered("42.0"), 1.1, 1.1), (answered(r"\boxed{42}"), 1.1, 1.1),
    ("Well: " + answered("42"), 1.1, 0.1), (answered("24"), 0.1, 0.1),
    (answered("42") + "<answer>24</answer>", 0.1, 0.1), ("<answer>42</answer>", 1.0, 0.0),
    (r"It is \boxed{42}.", 1.0, 0.0), ("42", 0.0, 0.0), (answered(""), 0.0, 0.0), (answered("forty-two"), 0.1, 0.1),
    ("", 0.0, 0.0),
])  # fmt: skip
def test_rewards(text, reward, strict):
    assert score(text) == pytest.approx(reward)
    assert score(text, strict=True) == pytest.approx(strict)


def test_answers_count_by_value_and_the_layout_by_its_weight():
    for right in ("17/12", r"\frac{17}{12}", "34/24", "1 5/12"):
        assert score(answered(right), "17/12") == pytest.approx(1.1)
    for weight, reward in ((0.1, 0.1), (0.5, 0.5), (0, 0.0)):
        assert score(answered("17/13"), "17/12", format_weight=weight) == pytest.approx(reward)


# Generated problems


PATTERNS = {
    1: r"\d+ [+-] \d+", 2: r"\d+ [+×-] \d+", 3: r"\d+ [+-] \d+ × \d+|\d+ × \d+ - \d+", 4: r"\(\d+ [+-] \d+\) (× \d+ [+-] \d+|÷ \d+)",
    5: r"\d+/\d+ [+×-] \d+/\d+",
}  # fmt: skip


@pytest.mark.parametrize("level", range(1, 6))
def test_problems_are_right_and_worked_out_truly(level):
    train, validation, test = splits(min_level=level, max_level=level, train_size=200)
    for row in [*train, *validation, *test]:
        expression = re.fullmatch(r"What is (.+)\?", question(row))[1]
        assert value(expression) == Fraction(row["answer"]) >= 0
        assert row["level"] == level
        assert re.fullmatch(PATTERNS[level], expression)
        worked = re.fullmatch(
            r"<think>\n(.+)\n</think>\n<answer>(.+)</answer>", row["gold_completion"], re.DOTALL
        )
        assert worked[2] == row["answer"]
        lines = worked[1].splitlines()
        for line in lines:
            assert len({value(side) for side in line.split(" = ")}) == 1, line
        assert lines[-1].endswith(f" = {row['answer']}")
    assert all(row["completion"] == row["gold_completion"] for row in train)


def same(row):
    """Equal for problems that differ in the order of two summands or factors."""
    expression = question(row)
    simple = re.fullmatch(r"What is (\S+) ([+×]) (\S+)\?", expression)
    return (simple[2], *sorted(simple.group(1, 3))) if simple else expression


@pytest.mark.parametrize("own", [{"train_size": 1000}, {"max_level": 1, "train_size": 900}])
def test_no_problem_occurs_twice_not_even_the_other_way_round(own):
    found = [same(row) for rows in splits(**own) for row in rows]
    assert len(set(found)) == len(found)
    if own.get("max_level"):
        with pytest.raises(TaskError, match=r"2\d{3} different problems, and 3256"):
            math.get_rl_dataset(config(max_level=1, train_size=3000))
    else:
        assert {row["level"] for row in splits(**own)[0]} == {1, 2, 3}


# Sources


def gsm8k(count, first=0):
    return [
        {
            "question": f"Tom has {n} eggs and buys {n} more. How many has he?",
            "answer": f"He has {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n} eggs.\n#### {2 * n}",
        }
        for n in range(first, first + count)
    ]


SMALL = {"eval_size": 3, "validation_size": 2}


def test_a_set_like_gsm8k(tmp_path):
    source = jsonl(tmp_path / "sums.jsonl", gsm8k(20))
    train, validation, test = splits(source=source, **SMALL)
    assert [len(rows) for rows in (train, validation, test)] == [15, 2, 3]
    assert len({question(row) for rows in (train, validation, test) for row in rows}) == 20
    for row in [*train, *validation, *test]:
        n = int(re.search(r"has (\d+)", question(row))[1])
        assert row["answer"] == str(2 * n)
        assert row["gold_completion"] == answered(2 * n, f"He has {n}+{n}={2 * n} eggs.")
        assert score(row["gold_completion"], row["answer"], strict=True) == pytest.approx(1.1)
    assert splits(source=source, **SMALL) == (train, validation, test)
    assert splits(source=source, **SMALL, seed=1)[2] != test
    assert (
        math.get_rl_dataset(config(source=source, **SMALL, train_size=4))
        == (math.get_rl_dataset(config(source=source, **SMALL))[:4])
    )


def test_sets_of_other_columns(tmp_path):
    """As MATH has them, and as the config maps them."""
    solution = r"We have $x = \frac{2}{4}$, so $x = \boxed{\frac{1}{2}}$."
    rows = [{"problem": f"Problem {n}", "solution": solution, "level": "Level 1"} for n in range(6)]
    (row, *_), _, _ = splits(source=jsonl(tmp_path / "m.jsonl", rows), **SMALL)
    assert row["completion"] == answered(row["answer"], solution)
    assert (row["answer"], "level" in row) == (r"\frac{1}{2}", False)
    assert score(answered("0.5"), row["answer"]) == pytest.approx(1.1)
    rows = [{"ask": f"Q{n}", "result": n, "why": f"Because of {n}."} for n in range(6)]
    source = jsonl(tmp_path / "own.jsonl", rows)
    columns = {"question": "ask", "answer": "result", "solution": "why"}
    (row, *_), _, _ = splits(source=source, columns=columns, **SMALL)
    assert row["completion"] == answered(row["answer"], f"Because of {row['answer']}.")
    with pytest.raises(TaskError, match="question, problem, prompt"):
        splits(source=source, **SMALL)


def test_questions_of_the_test_are_not_trained(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [*gsm8k(20), *gsm8k(5)])
    repeated = [{**row, "question": row["question"].replace(" ", "  ").upper()} for row in gsm8k(2)]
    jsonl(folder / "test.jsonl", [*repeated, *gsm8k(10, first=100)])
    train, validation, test = splits(
        source=str(folder), eval_split="test", eval_size=5, validation_size=2
    )
    assert [len(rows) for rows in (train, validation, test)] == [16, 2, 5]
    left_out = {"the test split has the question": 2, "it is the same as an earlier row": 5}
    assert train.account.left_out == left_out
    assert test.account.left_out == {}
    folded = {
        question(row).replace("  ", " ").lower()
        for rows in (train, validation, test)
        for row in rows
    }
    assert len(folded) == 23


def test_rows_that_cannot_be_used_are_counted_or_refused(tmp_path):
    bad = [
        {"question": "", "answer": "1"}, {"question": "Q", "answer": "so\nit is"}, {"question": "R"}, gsm8k(1)[0],
    ]  # fmt: skip
    source = jsonl(tmp_path / "some.jsonl", [*gsm8k(6), *bad])
    rows = math.get_rl_dataset(config(source=source, **SMALL))
    assert len(rows) == 1
    left_out = {
        "there is no question": 1,
        "no answer is marked, and the text is too long for one": 1,
        "there is no answer": 1,
        "it is the same as an earlier row": 1,
    }
    assert rows.account.left_out == left_out
    assert math.get_eval_dataset(config(source=source, **SMALL)).account.left_out == left_out
    few = jsonl(tmp_path / "few.jsonl", gsm8k(5))
    none = jsonl(tmp_path / "none.jsonl", bad[:3])
    for own, said in (
        ({"source": source, "strict_rows": True}, "some.jsonl, row 6: "),
        ({"source": none}, r"no usable row: 1 × .*`question`"),
        ({"source": few}, "5 different problems"),
    ):
        with pytest.raises(TaskError, match=said):
            math.get_rl_dataset(config(**own, **SMALL))


MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ 5 & 6 \end{pmatrix}"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("#### 3\n#### 1,234", "1,234"),
        (r"First \boxed{1}. Then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<think>a\nb</think><answer> 7 </answer>", "7"),
        (" 42 ", "42"),
        ("a\nlong text", None),
        ("x" * 41, None),
        ("so #### 7", "7"),
        ("a\n#### Notes\nb", None),
        ("x" * 40, "x" * 40),
        ("7" * 200, "7" * 200),
        (MATRIX, MATRIX),
        ("7" * 201, None),
        ("####", None),
        ("", None),
    ],
)
def test_final_answers(solution, answer):
    assert final_answer(solution) == answer


# Metrics and schema


def test_metrics():
    rows = [{"answer": "42", "level": level} for level in (1, 2, 2)]
    texts = [answered("42"), r"\boxed{42}", answered("41")]
    found = math.compute_metrics(["?"] * 3, texts, rows, config(), None)
    assert found["metrics"] == pytest.approx(
        {
            "accuracy": 2 / 3, "format_accuracy": 2 / 3, "accuracy_level_1": 1.0, "accuracy_level_2": 0.5,
        }
    )  # fmt: skip
    strict = math.compute_metrics(
        ["?"] * 3, texts, [{"answer": "42"}] * 3, config(strict=True), None
    )
    assert strict["metrics"] == pytest.approx({"accuracy": 1 / 3, "format_accuracy": 2 / 3})
