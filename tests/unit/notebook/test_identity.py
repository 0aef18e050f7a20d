"""What makes two trainings the same: rows, marks and the code of the rewards, but not what functions collect."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from groupwise.notebook import Criterion, Rubric, Session, TrainingConfig
from groupwise.notebook.collected import FILE, Collected, collected, comparable, noticed
from groupwise.notebook.fingerprint import Look, digest
from groupwise.notebook.identity import UNSEEN, USED, differences, reward_facts
from groupwise.notebook.rewards import create_reward_functions

BEGIN = """
LIMIT = 3
seen = []
calls = 0

def helper(text):
    return len(text) > LIMIT

def reward(completions, scale=2.0, **columns):
    global calls
    calls += 1
    seen.append(completions)
    return [helper(text) * scale for text in completions]
"""


def rubric_of(reward: Any) -> Any:
    return SimpleNamespace(names=["reward"], weights=[1.0], functions=[reward])


def look_at(reward: Any) -> dict[str, str]:
    return Look(reward).found


def made(source: str = BEGIN, calls: int = 0) -> dict[str, str]:
    """The fingerprints of what the reward of a cell uses, by name; its own under an empty one."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    for _ in range(calls):
        names["reward"](["a text"])
    return look_at(names["reward"])


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def test_the_same_code_is_the_same_but_for_what_it_collected():
    assert made() == made()
    assert changed(made(), made(calls=1)) == {"seen", "calls"}
    assert made(BEGIN.replace("global calls", "global calls  # a remark")) == made()
    assert made(BEGIN.replace("    global", '    "What it is for."\n    global')) == made(
        BEGIN.replace("    global", '    "In other words."\n    global')
    )


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("LIMIT = 3", "LIMIT = 4", "LIMIT"),
        ("len(text) >", "len(text) >=", "helper"),
        ("scale=2.0", "scale=3.0", "scale"),
        ("* scale for", "+ scale for", ""),
        ("helper(text) *", 'helper("a" + text) *', ""),
    ],
)
def test_a_change_of_code_number_helper_or_default_is_another_and_known_by_its_name(old, new, name):
    assert changed(made(), made(BEGIN.replace(old, new))) == {name}


DATA = """
import numpy as np
from dataclasses import dataclass

WORDS = ["therefore", "so"]
WEIGHTS = {"a": 1.0}
PAIRS = (["x"], 2)
TABLE = np.array([1.0, 2.0])

def first(text):
    return 1.0

RULES = [first]

def made(words):
    def inner(text):
        return sum(word in text for word in words)
    return inner

inside = made(["x"])

class Scorer:
    def __init__(self, terms):
        self.terms = terms
        self.seen = []

    def score(self, text):
        self.seen.append(text)
        return sum(term in text for term in self.terms)

SCORER = Scorer(["p"])

def reward(completions, kept=[], **columns):
    kept.append(1)
    return [
        sum(word in text for word in WORDS) + WEIGHTS["a"] + len(PAIRS) + TABLE[0] + RULES[0](text) + inside(text) + SCORER.score(text)
        for text in completions
    ]
"""
COLLECTED = {"kept of the reward reward", "SCORER.seen of the reward reward"}


def assert_noticed(source: str, old: str, new: str) -> None:
    """An edit of a cell makes another reward of it, and no edit does not."""
    assert source.count(old) == 1
    assert made(source) == made(source)
    assert made(source) != made(source.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('"so"]', '"so", "hence"]', "WORDS"),
        ('"a": 1.0', '"a": 2.0', "WEIGHTS"),
        ('["x"], 2', '["y"], 2', "PAIRS"),
        ("[1.0, 2.0]", "[1.0, 3.0]", "TABLE"),
        ('made(["x"])', 'made(["y"])', "inside.words"),
        ('Scorer(["p"])', 'Scorer(["q"])', "SCORER.terms"),
        ("return 1.0", "return 2.0", "first"),
        ("sum(term in text", "2 * sum(term in text", "Scorer.score"),
    ],
)
def test_what_rewards_read_is_known_by_what_is_in_it(old, new, name):
    assert DATA.count(old) == 1
    assert changed(made(DATA), made(DATA.replace(old, new))) == {name}


def test_what_rewards_collect_is_found_by_what_a_run_has_changed(tmp_path: Path):
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(DATA, names)
    rubric = rubric_of(names["reward"])
    before = reward_facts(rubric)
    assert comparable(before, before, collected(tmp_path)) == (before, before)
    watching = Collected(rubric, before)
    run: Any = SimpleNamespace(folder=tmp_path)
    watching.on_save(run, tmp_path)
    assert not (tmp_path / FILE).exists()
    names["reward"](["a text"])
    watching.on_save(run, tmp_path)
    assert collected(tmp_path) == COLLECTED
    after = reward_facts(rubric)
    assert sorted(differences(before, after)) == sorted(COLLECTED)
    kept = comparable(before, after, collected(tmp_path))
    assert differences(*kept) == []
    assert kept[0][USED]


OBJECT = """
import functools
import re
from dataclasses import dataclass

WORD = re.compile("[a-z]+")
FACTOR = 2.0

def scaled(by):
    def around(function):
        @functools.wraps(function)
        def inner(*arguments, **columns):
            return [by * value for value in function(*arguments, **columns)]
        return inner
    return around

@functools.cache
def helper(text):
    return len(WORD.findall(text))

class Base:
    least = 1

    @staticmethod
    def bounded(value):
        return max(value, 0)

class Reward(Base):
    def __init__(self, limit=400):
        self.limit = limit
        self.calls = 0

    def __call__(self, completions, **columns):
        self.calls += 1
        return [self.bounded(helper(text) / self.limit) for text in completions]

@dataclass
class Kept:
    limit: float = 4.0

    def __call__(self, completions, answer, **columns):
        return [FACTOR * self.limit for _ in answer]

@scaled(3.0)
def plain(completions, answer, **columns):
    return [float(len(each)) for each in answer]

made = Reward()
rewards = {"object": made, "method": made.__call__, "kept": Kept(), "plain": plain}
"""


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("object", "limit=400", "limit=800"),
        ("object", "made = Reward()", "made = Reward(300)"),
        ("object", "self.limit = limit", "self.limit = limit + 1"),
        ("object", '"[a-z]+"', '"[a-z0-9]+"'),
        ("object", "max(value, 0)", "max(value, 1)"),
        ("object", "findall(text))", "findall(text)) + 1"),
        ("method", "limit=400", "limit=800"),
        ("method", "max(value, 0)", "max(value, 1)"),
        ("kept", "limit: float = 4.0", "limit: float = 5.0"),
        ("kept", "FACTOR = 2.0", "FACTOR = 3.0"),
        ("kept", "FACTOR *", "FACTOR +"),
        ("plain", "@scaled(3.0)", "@scaled(2.0)"),
        ("plain", "by * value", "by + value"),
        ("plain", "float(len(each))", "2.0 * len(each)"),
        ("plain", "answer", "reference"),
    ],
)
def test_objects_and_decorated_functions_are_known_by_all_of_their_code(kind, old, new):
    def made(source: str, calls: int = 0) -> dict[str, str]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(source, names)
        reward = names["rewards"][kind]
        for _ in range(calls):
            reward(completions=["a b"], answer=["a"], reference=["a"])
        return look_at(reward)

    assert OBJECT.count(old)
    collected = {"object": {"calls"}, "method": {"self.calls"}}.get(kind, set())
    assert changed(made(OBJECT), made(OBJECT, calls=2)) == collected
    assert made(OBJECT) != made(OBJECT.replace(old, new))


def test_a_counter_that_a_helper_counts_and_names_of_attributes_are_nothing():
    source = """
steps = 0

def count():
    global steps
    steps += 1

def reward(completions, **columns):
    count()
    return [float(steps > 0 and text.path is None) for text in completions]
"""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    before = look_at(names["reward"])
    names["count"]()
    names["path"] = "a name of another cell"
    assert changed(before, look_at(names["reward"])) == {"steps"}


def test_helpers_of_modules_of_the_users_count_and_installed_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = """
import json
import helpers_of_the_user
from helpers_of_the_user import other

def reward(completions, **columns):
    return [helpers_of_the_user.first(text) + other(text) for text in map(json.dumps, completions)]
"""

    def made(first: int, second: int) -> dict[str, str]:
        code = f"def first(text):\n    return {first}\n\ndef other(text):\n    return {second}\n"
        (tmp_path / "helpers_of_the_user.py").write_text(code)
        sys.modules.pop("helpers_of_the_user", None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(source, names)
        return look_at(names["reward"])

    assert made(1, 2) == made(1, 2)
    assert changed(made(1, 2), made(3, 2)) == {"helpers_of_the_user.first"}
    assert changed(made(1, 2), made(1, 3)) == {"helpers_of_the_user.other"}


def test_any_rows_have_a_fingerprint():
    rows = [{"question": "q", "extra": {(1, 2): "a", "b": np.int64(3)}, "at": Decimal("1.5")}]
    other = [{"question": "q", "extra": {(1, 2): "a", "b": np.int64(4)}, "at": Decimal("1.5")}]
    assert digest(rows) == digest(rows) != digest(other)
    assert digest([object()]) == digest([object()])


def test_a_session_that_a_reward_mentions_is_nothing():
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "def reward(completions, **columns):\n    return [len(session.config) for _ in completions]",
        names,
    )
    config = TrainingConfig(dataset="arithmetic")
    session = Session(config, [{"question": "a"}], [{"question": "b"}])
    names["session"] = session
    before = reward_facts(rubric_of(names["reward"]))
    session.folder = Path("somewhere")
    assert reward_facts(rubric_of(names["reward"])) == before
    assert not before[UNSEEN]


def test_rubrics_by_their_content():
    def reward(word: str) -> dict[str, str]:
        criteria = [Criterion(name="order", description="d", keywords=[word])]
        return look_at(Rubric(name="steps", criteria=criteria).reward())

    assert reward("first") == reward("first") != reward("second")


def test_differences_in_words():
    before = {"marks": "a", "rewards": {"right": "1", "near": "2"}}
    assert differences(before, before) == []
    now = {"marks": "b", "rewards": {"right": "1", "near": "3", "short": "4"}}
    assert differences(before, now) == ["marks", "the reward near", "the reward short"]
    assert differences({}, {"marks": "b"}) == ["marks"]


IN_DEPTH = """
import re
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace

CHECKS = [("digits", lambda text: 1.0)]
TABLES = {"a": {"b": [len, lambda text: 2.0]}}
PATTERNS = [re.compile("[a-z]")]
LEAST = Decimal("1.5")
SHARE = Fraction(1, 3)
RANGE = range(4)
FROZEN = MappingProxyType({"a": 5})
NAMES = SimpleNamespace(weight=6)

class Part:
    def __init__(self, rules):
        self.rules = rules

PARTS = [Part([("x", lambda text: 7.0)])]

class Counter:
    def __init__(self, start):
        self.start = start
        self.calls = 0

    def value(self):
        self.calls += 1
        self.start = self.start * 1
        return self.start

COUNTER = Counter(8)

def reward(completions, **columns):
    values = [rule(text) for _, rule in CHECKS for text in completions]
    values += [TABLES["a"]["b"][1]("x"), len(PATTERNS), LEAST, SHARE, len(RANGE), FROZEN["a"], NAMES.weight, COUNTER.value()]
    return values + [PARTS[0].rules[0][1]("x")]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("text: 1.0", "text: 1.5"),
        ("text: 2.0", "text: 2.5"),
        ("[a-z]", "[0-9]"),
        ('"1.5"', '"2.5"'),
        ("Fraction(1, 3)", "Fraction(2, 3)"),
        ("range(4)", "range(5)"),
        ('"a": 5', '"a": 6'),
        ("weight=6", "weight=7"),
        ("text: 7.0", "text: 7.5"),
        ("self.rules = rules", "self.rules = rules[:1]"),
        ("Counter(8)", "Counter(9)"),
    ],
)
def test_functions_patterns_and_values_count_however_deep_they_stand(old, new):
    assert_noticed(IN_DEPTH, old, new)


def test_what_an_object_counts_is_found_by_what_a_run_has_changed():
    assert changed(made(IN_DEPTH), made(IN_DEPTH, calls=1)) == {"COUNTER.calls"}


def test_modules_that_a_reward_imports_when_it_runs_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    inside = tmp_path / "package_of_the_user" / "scores"
    inside.mkdir(parents=True)
    (inside.parent / "__init__.py").write_text("")
    (inside / "__init__.py").write_text("")
    sources = {
        "imported": "def reward(completions, **columns):\n    from package_of_the_user.scores.words import score\n"
        "    import json\n    return [score(json.dumps(text)) for text in completions]\n",
        "dotted": "import package_of_the_user.scores.words\n\ndef reward(completions, **columns):\n"
        "    return [package_of_the_user.scores.words.score(text) for text in completions]\n",
    }

    def made(source: str, value: int) -> dict[str, str]:
        (inside / "words.py").write_text(
            f"import package_of_the_user\n\ndef score(text):\n    return {value}\n"
        )
        for name in [each for each in sys.modules if each.startswith("package_of_the_user")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        shutil.rmtree(inside / "__pycache__", ignore_errors=True)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(source, names)
        return look_at(names["reward"])

    for source in sources.values():
        assert made(source, 1) == made(source, 1) != made(source, 2)


def test_objects_of_libraries_are_named_since_nothing_of_them_is_compared():
    names: dict[str, Any] = {"__name__": "__main__", "JUDGE": pytest.MonkeyPatch(), "TABLE": np}
    exec(
        "LIST = [1]\n\ndef reward(completions, **columns):\n    return [JUDGE, TABLE, LIST]\n",
        names,
    )
    unseen = reward_facts(rubric_of(names["reward"]))[UNSEEN]
    assert unseen == {"JUDGE of the reward reward": "_pytest.monkeypatch.MonkeyPatch"}


KEEPING = """
class Note:
    def __init__(self, text):
        self.text = text

    def value(self):
        return len(self.text)

kept = []

def keep(note):
    kept.append(note)
    return note.value()

def made(text):
    return Note(text)

def reward(completions, **columns):
    return [keep(made(text)) for text in completions]

RULES = []

def first(text):
    return len(RULES)

RULES.append(first)

def recursive(completions, **columns):
    return [first(text) for text in completions]
"""


def test_objects_that_are_collected_leave_the_code_as_it_was():
    assert changed(made(KEEPING), made(KEEPING, calls=1)) == {"kept"}


def test_a_function_in_a_list_that_it_reads_itself_has_a_fingerprint():
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(KEEPING, names)
    assert look_at(names["recursive"]) == look_at(names["recursive"])


KINDS = """
import math
import re
from enum import Enum
from functools import cached_property
from html.parser import HTMLParser
from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

def contains(words):
    def check(text):
        return any(word in text for word in words)
    return check

good = contains(["yes"])
bad = contains(["no"])
find = re.compile("[0-9]").search
price = {"a": 1.5}.get
pick = itemgetter("a")
root = math.sqrt

class Judge(BaseModel):
    words: tuple[str, ...] = ("so",)
    calls: int = 0

    def score(self, text):
        self.calls += 1
        return len(text) + 10

class Pair(NamedTuple):
    least: int

    def value(self):
        return self.least + 20

class Kind(Enum):
    ONE = "one"

    def value_of(self):
        return 30

class Table(dict):
    def value(self):
        return 40

class Parser(HTMLParser):
    def handle_data(self, data):
        self.found = len(data) + 50

class Late:
    model = None

    @cached_property
    def words(self):
        return ["sixty"]

    def __getitem__(self, name):
        if self.model is None:
            self.model = Judge()
        return len(self.words) + 70

judge, pair, table, parser, late = Judge(), Pair(1), Table(a=2), Parser(), Late()
objects = np.array(["eighty", None], dtype=object)
allowed = frozenset({frozenset({"ninety", "other"}), frozenset({"third"})})

def reward(completions, **columns):
    parser.feed(completions[0])
    used = [judge.score("x"), pair.value(), Kind.ONE.value_of(), table.value(), late["a"], 1j * 1.0, objects[0], allowed]
    return [good(text) - bad(text) + root(2) for text in completions] + used + [find("1"), price("a"), pick({"a": 1})]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["yes"]', '["yes", "ok"]'),
        ('["no"]', '["no", "never"]'),
        ('compile("[0-9]")', 'compile("[a-z]")'),
        ('"a": 1.5', '"a": 2.5'),
        ('itemgetter("a")', 'itemgetter("b")'),
        ("math.sqrt", "math.exp"),
        ("len(text) + 10", "len(text) + 11"),
        ('words: tuple[str, ...] = ("so",)', 'words: tuple[str, ...] = ("hence",)'),
        ("self.least + 20", "self.least + 21"),
        ("Pair(1)", "Pair(2)"),
        ("return 30", "return 31"),
        ("return 40", "return 41"),
        ("Table(a=2)", "Table(a=3)"),
        ("len(data) + 50", "len(data) + 51"),
        ('["sixty"]', '["sixty", "more"]'),
        ("len(self.words) + 70", "len(self.words) + 71"),
        ('"eighty"', '"eighty-one"'),
        ('"ninety"', '"ninety-one"'),
        ("1j * 1.0", "2j * 1.0"),
    ],
)
def test_all_kinds_of_values_and_their_code_count(old, new):
    assert_noticed(KINDS, old, new)


def test_what_objects_hold_after_they_were_used_is_no_other_code():
    found = changed(made(KINDS), made(KINDS, calls=1))
    assert {"late.words", "late.model"} < found
    assert "" not in found


def test_a_fingerprint_is_the_same_with_other_hashes():
    code = (
        "from tests.unit.notebook.test_identity import KINDS, IN_DEPTH, made;"
        "from groupwise.notebook.fingerprint import digest;"
        "print(made(KINDS), made(IN_DEPTH), digest([{'keywords': {'a', 'b', 'c', 'd'}}]))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] != ""


def test_a_wrapper_around_a_reward_of_the_config_counts():
    given = create_reward_functions(TrainingConfig(dataset="arithmetic"))[1]

    def made(factor: str) -> dict[str, str]:
        names: dict[str, Any] = {"__name__": "__main__", "given": given}
        exec(
            "import functools\n\n@functools.wraps(given)\ndef reward(**columns):\n"
            f"    return [value * {factor} for value in given(**columns)]\n",
            names,
        )
        return look_at(names["reward"])

    assert changed(made("2.0"), made("3.0")) == {""}
    assert made("2.0") == made("2.0")
    assert look_at(given)[""] != made("2.0")[""]


def test_methods_of_objects_of_libraries_are_known_by_their_types():
    names: dict[str, Any] = {"__name__": "__main__", "patch": pytest.MonkeyPatch().setattr}
    exec("def reward(completions, **columns):\n    return [patch]\n", names)
    before = reward_facts(rubric_of(names["reward"]))
    names["patch"].__self__.extra = 3
    assert reward_facts(rubric_of(names["reward"])) == before
    assert before[UNSEEN] == {"patch.self of the reward reward": "_pytest.monkeypatch.MonkeyPatch"}


def test_what_one_training_loaded_is_no_difference_for_the_next_of_this_process(tmp_path: Path):
    names: dict[str, Any] = {"__name__": "__main__"}
    source = """
model = None

def reward(completions, **columns):
    global model
    if model is None:
        model = ["loaded"]
    return [1.0 for _ in completions]
"""
    exec(source, names)
    rubric = rubric_of(names["reward"])
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        watching = Collected(rubric, reward_facts(rubric))
        names["reward"](["a"])
        watching.on_save(cast("Any", SimpleNamespace(folder=tmp_path / run)), tmp_path)
    assert collected(tmp_path / "second") == {"model of the reward reward"}


def test_tables_of_functions_that_use_each_other_are_each_told_once():
    tables = [f"table_{n}" for n in range(9)]
    source = "\n".join(
        f"def use_{n}(text):\n    return [{', '.join(tables)}]\n\ntable_{n} = {{'use': use_{n}}}\n"
        for n in range(9)
    )
    source += (
        "\ndef reward(completions, **columns):\n    return [use_0(each) for each in completions]\n"
    )
    found = made(source)
    assert found == made(source)
    assert {name for name in found if name.startswith("table")} == set(tables)


OBJECTS = """
import functools
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, Field, PrivateAttr

class Short:
    def score(self, text):
        return 100.0

class Long:
    def score(self, text):
        return 200.0

class Words:
    def __init__(self, words, weight):
        self.words = words
        self.weight = weight

    def score(self, text):
        return self.weight * sum(word in text for word in self.words)

class Sum:
    def __init__(self, *parts):
        self.first, self.second, self.third, self.fourth = parts
        self.last = None

    def __call__(self, text):
        self.last = Words([text], 0.0)
        return self.first.score(text) + self.second.score(text) + self.third.score(text) + self.fourth.score(text)

def has(words):
    def check(text):
        return sum(word in text for word in words)
    return check

good = has(["yes"])
bad = has(["no"])

class Between:
    def __init__(self, above, below):
        self.above, self.below = above.__call__, below.__call__

def one(text):
    return 1.0

def two(text):
    return 2.0

class Kept(NamedTuple):
    words: list

class Hidden(BaseModel):
    _words: list = PrivateAttr(default_factory=lambda: ["hidden"])
    listed: tuple = Field(default_factory=lambda: ("listed",))

@functools.singledispatch
def worth(value):
    return 300.0

@worth.register
def _(value: str):
    return 400.0

class Guarded:
    @property
    def limit(self):
        return 500.0

    @limit.setter
    def limit(self, value):
        self.kept = value + 600.0

@np.vectorize
def each(value):
    return value + 700.0

one.least = 800.0
total = Sum(Short(), Words(["so"], 1.0), Words(["hence"], 0.5), Words(["thus"], 0.25))
between = Between(good, bad)
chosen = {"score": one}
missing = defaultdict(lambda: 900.0)
window = deque([1.0], maxlen=10)
grades = {"great": 1.0, "good": 0.5}
kept = Kept(["kept"])
hidden = Hidden()
upper = str.upper
curve = {"of": np.tanh}

def reward(completions, **columns):
    used = [one, two, good, bad, between, chosen, missing, window, grades, kept, hidden, worth, Guarded(), each, upper, curve]
    return [total(text) for text in completions]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 100.0", "return 101.0"),
        ("Sum(Short()", "Sum(Long()"),
        ('["thus"], 0.25', '["thus"], 0.5'),
        ('["hence"], 0.5', '["hence"], 1.0'),
        ("Between(good, bad)", "Between(bad, good)"),
        ('{"score": one}', '{"score": two}'),
        ("lambda: 900.0", "lambda: 901.0"),
        ("maxlen=10", "maxlen=20"),
        ('{"great": 1.0, "good": 0.5}', '{"good": 0.5, "great": 1.0}'),
        ('Kept(["kept"])', 'Kept(["kept", "more"])'),
        ('["hidden"]', '["seen"]'),
        ('("listed",)', '("listed", "more")'),
        ("return 300.0", "return 301.0"),
        ("return 400.0", "return 401.0"),
        ("value + 600.0", "value + 601.0"),
        ("value + 700.0", "value + 701.0"),
        ("one.least = 800.0", "one.least = 801.0"),
        ("str.upper", "str.lower"),
        ("np.tanh", "np.exp"),
    ],
)
def test_objects_closures_and_functions_are_told_apart_by_where_they_stand(old, new):
    assert_noticed(OBJECTS, old, new)


def test_an_object_that_is_replaced_while_it_is_used_is_known_by_its_name():
    found = changed(made(OBJECTS), made(OBJECTS, calls=1))
    assert {name.partition(".")[2].partition(".")[0] for name in found} == {"last"}


def test_code_that_a_training_itself_puts_somewhere_is_no_other_reward():
    source = """
class Model:
    def forward(self, text):
        return 1.0

state = {}
parts = []

def reward(completions, **columns):
    if "forward" not in state:
        state["forward"] = Model().forward
        parts.append(lambda text: text)
    return [state["forward"](text) for text in completions]
"""
    assert changed(made(source), made(source, calls=1)) == {"state", "parts"}
    assert_noticed(source, "return 1.0", "return 2.0")


def test_a_module_of_a_package_that_a_reward_imports_when_it_runs_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "rewards_of_the_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = (
        "def reward(completions, **columns):\n    from rewards_of_the_user import scoring\n"
        "    return [scoring.score(text) for text in completions]\n"
    )

    def fresh(value: int, calls: int = 0) -> dict[str, str]:
        (package / "scoring.py").write_text(f"def score(text):\n    return {value}\n")
        for name in [each for each in sys.modules if each.startswith("rewards_of_the_user")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        return made(source, calls)

    assert fresh(1) == fresh(1, calls=1)
    assert changed(fresh(1), fresh(2)) == {"rewards_of_the_user.scoring.score"}


STRANGE = """
from enum import Enum
from functools import partial
from unittest.mock import MagicMock

class Cell:
    def __init__(self):
        self.near = []

grid = [[Cell() for _ in range(5)] for _ in range(5)]
for row in range(5):
    for column in range(5):
        cell = grid[row][column]
        cell.near += [grid[r][c] for r, c in ((row - 1, column), (row, column - 1)) if r >= 0 and c >= 0]
        for other in cell.near:
            other.near.append(cell)

class Link:
    def __init__(self, next):
        self.next = next

chain = None
for _ in range(2000):
    chain = Link(chain)

class Any:
    def __getattr__(self, name):
        return None if name.startswith("__") else self

    def __repr__(self):
        raise ValueError

    def __eq__(self, other):
        raise ValueError

def half(value):
    return value / 2

class Way(Enum):
    HALF = partial(half)

judge, anything, loop = MagicMock(), {"a": [Any()]}, []
loop.append(loop)

def reward(completions, **columns):
    return [judge(grid, chain, anything, loop, Way.HALF, text) for text in completions]
"""


def test_strange_objects_keep_nobody_from_training():
    assert made(STRANGE) == made(STRANGE)
    assert_noticed(STRANGE, "value / 2", "value / 3")
    assert_noticed(STRANGE, "range(2000)", "range(3)")


def test_what_lies_in_a_list_or_an_attribute_is_named_where_only_its_type_is_known():
    names: dict[str, Any] = {"__name__": "__main__", "patch": pytest.MonkeyPatch()}
    exec(
        "class Judge:\n    def __init__(self, part):\n        self.parts = [part]\n\nMODELS = {'a': patch}\njudge = Judge(patch)\n\n"
        "def reward(completions, **columns):\n    return [MODELS, judge]\n",
        names,
    )
    assert reward_facts(rubric_of(names["reward"]))[UNSEEN] == {
        "MODELS of the reward reward": "_pytest.monkeypatch.MonkeyPatch",
        "judge.parts of the reward reward": "_pytest.monkeypatch.MonkeyPatch",
    }


def test_classes_of_python_itself_are_no_unseen_objects():
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(KINDS + OBJECTS.replace("def reward", "def other"), names)
    assert reward_facts(rubric_of(names["reward"]))[UNSEEN] == {}
    assert reward_facts(rubric_of(names["other"]))[UNSEEN] == {
        "each of the reward reward": "numpy.vectorize",
        "curve of the reward reward": "numpy.ufunc",
    }


POINTING = """
_scorer = None

def score(text):
    return 100.0

def easy(text):
    return 200.0

def hard(text):
    return 300.0

current = easy

class Words:
    def __init__(self, words):
        self.words = words

class Scorer:
    def __init__(self):
        self.strict_words = Words(["strict"])
        self.active = None
        self.how = None

    def strict(self, text):
        return 400.0

    def __call__(self, text):
        self.active = self.active or self.strict_words
        self.how = self.how or self.strict
        return self.how(text)

scorer = Scorer()

def reward(completions, **columns):
    global _scorer, current
    _scorer = _scorer or score
    found = [_scorer(text) + current(text) + scorer(text) for text in completions]
    current = hard
    return found
"""


def compared(source: str, edited: str) -> list[str]:
    """The differences that are found after a training with the one, where the cell was edited."""

    def rubric(text: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(text, names)
        return rubric_of(names["reward"])

    trained = rubric(source)
    before = reward_facts(trained)
    trained.functions[0](["a text"])
    after = reward_facts(trained)
    noted = changed(before[USED], after[USED])
    marked = {
        name if name in before[USED] and name in after[USED] else f"({name})" for name in noted
    }
    assert differences(*comparable(before, after, marked)) == []
    return differences(*comparable(before, reward_facts(rubric(edited)), marked))


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("100.0", "101.0", "score"),
        ("200.0", "201.0", "easy"),
        ("300.0", "301.0", "hard"),
        ("400.0", "401.0", "Scorer.strict"),
        ('["strict"]', '["stricter"]', "scorer.strict_words.words"),
    ],
)
def test_what_a_name_pointed_to_counts_though_a_training_pointed_it_elsewhere(old, new, name):
    assert POINTING.count(old) == 1
    assert compared(POINTING, POINTING) == []
    assert f"{name} of the reward reward" in compared(POINTING, POINTING.replace(old, new))


MORE = """
import functools
from pydantic import BaseModel

def number(text):
    try:
        value = float(text)
        value = check(value)
    except ValueError:
        value = 0.0
    return value

def check(value):
    return value

first, second = {"a": 1.0}, {"a": 2.0}
stages = [first, second, first]

class Loose(BaseModel, extra="allow"):
    known: int = 1

loose = Loose(limit=3)

class Dispatched:
    @functools.singledispatchmethod
    def __call__(self, value):
        return 100.0

    @__call__.register
    def _(self, value: str):
        return 200.0

dispatched = Dispatched()

class Made:
    def __new__(cls):
        found = super().__new__(cls)
        found.limit = 300.0
        return found

def outer():
    class Inner:
        class Innermost:
            def score(self, text):
                return 400.0
    return Inner.Innermost()

inner = outer()
part = functools.partial(pow, 500.0)

def reward(completions, **columns):
    used = [len(stages), loose.limit, Made().limit, part(2)]
    return [number(text) + dispatched(text) + inner.score(text) for text in completions]
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "        value = check(value)\n    except ValueError:\n        value = 0.0\n",
            "    except ValueError:\n        value = 0.0\n    else:\n        value = check(value)\n",
        ),
        ("[first, second, first]", "[first, second, second]"),
        ("limit=3", "limit=4"),
        ("return 100.0", "return 101.0"),
        ("return 200.0", "return 201.0"),
        ("found.limit = 300.0", "found.limit = 301.0"),
        ("return 400.0", "return 401.0"),
        ("500.0", "501.0"),
    ],
)
def test_what_stands_in_other_places_of_code_and_objects_counts(old, new):
    assert_noticed(MORE, old, new)
    assert "part.argument 1" in made(MORE)


def test_a_class_whose_cell_was_run_again_is_no_other_class():
    source = "class Scorer:\n    def score(self, text):\n        return 1.0\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source + "\nscorer = Scorer()\n", names)
    exec("def reward(completions, **columns):\n    return [scorer, Scorer()]\n", names)
    before = look_at(names["reward"])
    exec(source, names)
    assert look_at(names["reward"]) == before
    exec(source.replace("1.0", "2.0"), names)
    assert changed(before, look_at(names["reward"])) != set()


def test_what_was_set_up_within_a_function_of_a_library_counts():
    library = ModuleType("json")
    exec(
        "def capped(most):\n    def score(text):\n        return most\n    return score\n",
        vars(library),
    )

    def made_with(most: int) -> dict[str, str]:
        names: dict[str, Any] = {"__name__": "__main__", "score": library.capped(most)}
        exec(
            "def reward(completions, **columns):\n    return [score(text) for text in completions]\n",
            names,
        )
        return look_at(names["reward"])

    assert changed(made_with(100), made_with(200)) == {"score.most"}


def test_what_an_evaluation_loaded_is_no_difference_for_the_training_after_it(tmp_path: Path):
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "model = None\n\ndef reward(completions, **columns):\n    global model\n    model = model or ['loaded']\n    return [2.5]\n",
        names,
    )
    rubric = rubric_of(names["reward"])
    cold = reward_facts(rubric)
    with noticed(rubric, cold):
        names["reward"](["a"])
    watching = Collected(rubric, reward_facts(rubric))
    watching.on_save(cast("Any", SimpleNamespace(folder=tmp_path)), tmp_path)
    assert collected(tmp_path) == {"model of the reward reward"}
    assert differences(*comparable(reward_facts(rubric), cold, collected(tmp_path))) == []


def test_many_objects_that_know_each_other_have_few_names():
    source = """
class Node:
    pass

nodes = [Node() for _ in range(12)]
for node in nodes:
    for number, other in enumerate(nodes):
        setattr(node, f"other_{number}", other)
node = nodes[0]

def reward(completions, **columns):
    return [node for _ in completions]
"""
    assert 100 < len(made(source)) < 5000
    assert made(source) == made(source)


def test_a_closure_and_a_global_of_one_name_are_two():
    source = """
words = ["global"]

def made(words):
    def inner(text):
        return len(words) + outer(text)
    return inner

def outer(text):
    return len(words)

reward = made(["closure"])
"""
    for old in ("global", "closure"):
        assert_noticed(source, old, f"{old} or other")
