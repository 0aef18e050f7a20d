"""What makes two trainings the same: rows, marks and the code of the rewards, but not what functions collect."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from decimal import Decimal
from enum import Enum
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

# Cells with a reward in each: what it uses has to count, whatever it is and wherever it stands.

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
DATA = """
import numpy as np
WORDS = ["therefore", "so"]
WEIGHTS = {"a": 1.0}
PAIRS = (["x"], 2)
TABLE = np.array([1.0, 2.0])
def first(text): return 1.0
RULES = [first]

def made(words):
    def inner(text): return sum(word in text for word in words)
    return inner

inside = made(["x"])

class Scorer:
    def __init__(self, terms):
        self.terms, self.seen = terms, []
    def score(self, text):
        self.seen.append(text)
        return sum(term in text for term in self.terms)

SCORER = Scorer(["p"])

def reward(completions, kept=[], **columns):
    kept.append(1)
    found = len(WORDS) + WEIGHTS["a"] + len(PAIRS) + TABLE[0]
    return [found + RULES[0](text) + inside(text) + SCORER.score(text) for text in completions]
"""
IN_DEPTH = """
import re
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
CHECKS = [("digits", lambda text: 1.0)]
TABLES = {"a": {"b": [len, lambda text: 2.0]}}
PATTERNS = [re.compile("[a-z]")]
LEAST, SHARE, RANGE = Decimal("1.5"), Fraction(1, 3), range(4)
FROZEN, NAMES = MappingProxyType({"a": 5}), SimpleNamespace(weight=6)

class Part:
    def __init__(self, rules):
        self.rules = rules

PARTS = [Part([("x", lambda text: 7.0)])]

class Counter:
    def __init__(self, start):
        self.start, self.calls = start, 0
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
KINDS = """
import math
import re
from enum import Enum
from functools import cached_property
from html.parser import HTMLParser
from operator import itemgetter
from typing import NamedTuple
import numpy as np
from pydantic import BaseModel

def contains(words):
    def check(text): return any(word in text for word in words)
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
    def value(self): return self.least + 20

class Kind(Enum):
    ONE = "one"
    def value_of(self): return 30

class Table(dict):
    def value(self): return 40

class Parser(HTMLParser):
    def handle_data(self, data): self.found = len(data) + 50

class Late:
    model = None
    @cached_property
    def words(self): return ["sixty"]
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
OBJECTS = """
import functools
from collections import defaultdict, deque
from typing import NamedTuple
import numpy as np
from pydantic import BaseModel, Field, PrivateAttr

class Short:
    def score(self, text): return 100.0

class Long:
    def score(self, text): return 200.0

class Words:
    def __init__(self, words, weight):
        self.words, self.weight = words, weight
    def score(self, text): return self.weight * sum(word in text for word in self.words)

class Sum:
    def __init__(self, *parts):
        self.first, self.second, self.third, self.fourth = parts
        self.last = None
    def __call__(self, text):
        self.last = Words([text], 0.0)
        return self.first.score(text) + self.second.score(text) + self.third.score(text) + self.fourth.score(text)

def has(words):
    def check(text): return sum(word in text for word in words)
    return check

good = has(["yes"])
bad = has(["no"])

class Between:
    def __init__(self, above, below):
        self.above, self.below = above.__call__, below.__call__

def one(text): return 1.0
def two(text): return 2.0

class Kept(NamedTuple):
    words: list

class Hidden(BaseModel):
    _words: list = PrivateAttr(default_factory=lambda: ["hidden"])
    listed: tuple = Field(default_factory=lambda: ("listed",))

@functools.singledispatch
def worth(value): return 300.0

@worth.register
def _(value: str): return 400.0

class Guarded:
    @property
    def limit(self): return 500.0
    @limit.setter
    def limit(self, value): self.kept = value + 600.0

@np.vectorize
def each(value): return value + 700.0

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

def check(value): return value

first, second = {"a": 1.0}, {"a": 2.0}
stages = [first, second, first]

class Loose(BaseModel, extra="allow"):
    known: int = 1

loose = Loose(limit=3)

class Dispatched:
    @functools.singledispatchmethod
    def __call__(self, value): return 100.0
    @__call__.register
    def _(self, value: str): return 200.0

dispatched = Dispatched()

class Made:
    def __new__(cls):
        found = super().__new__(cls)
        found.limit = 300.0
        return found

def outer():
    class Inner:
        class Innermost:
            def score(self, text): return 400.0
    return Inner.Innermost()

inner = outer()
part = functools.partial(pow, 500.0)

def reward(completions, **columns):
    used = [len(stages), loose.limit, Made().limit, part(2)]
    return [number(text) + dispatched(text) + inner.score(text) for text in completions]
"""
TWO_OF_ONE_NAME = """
words = ["global"]

def made(words):
    def inner(text): return len(words) + outer(text)
    return inner

def outer(text): return len(words)

reward = made(["closure"])
"""
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
    def __getattr__(self, name): return None if name.startswith("__") else self
    def __repr__(self): raise ValueError
    def __eq__(self, other): raise ValueError

def half(value): return value / 2

class Way(Enum):
    HALF = partial(half)

judge, anything, loop = MagicMock(), {"a": [Any()]}, []
loop.append(loop)

def reward(completions, **columns):
    return [judge(grid, chain, anything, loop, Way.HALF, text) for text in completions]
"""
LOADED = """
class Model:
    def forward(self, text): return 1.0

state = {}
parts = []

def reward(completions, **columns):
    if "forward" not in state:
        state["forward"] = Model().forward
        parts.append(lambda text: text)
    return [state["forward"](text) for text in completions]
"""
KEEPING = """
class Note:
    def __init__(self, text):
        self.text = text
    def value(self): return len(self.text)

kept = []

def keep(note):
    kept.append(note)
    return note.value()

def made(text): return Note(text)

def reward(completions, **columns):
    return [keep(made(text)) for text in completions]
"""
COUNTING = """
steps = 0

def count():
    global steps
    steps += 1

def reward(completions, **columns):
    count()
    return [float(steps > 0 and path is None) for text in completions]

path = None
"""
NODES = """
class Node: pass

nodes = [Node() for _ in range(10)]
for node in nodes:
    for number, other in enumerate(nodes):
        setattr(node, f"other_{number}", other)
node = nodes[0]

def reward(completions, **columns):
    return [node for _ in completions]
"""
RECURSIVE = """
RULES = []
def first(text): return len(RULES)
RULES.append(first)

def reward(completions, **columns):
    return [first(text) for text in completions]
"""


def cell(source: str, **names: Any) -> dict[str, Any]:
    """The names of a kernel after this cell."""
    found = {"__name__": "__main__", **names}
    exec(source, found)
    return found


def using(names: str, **given: Any) -> dict[str, Any]:
    """After a cell whose reward uses these names."""
    return cell(f"def reward(completions, **columns):\n    return [{names}]\n", **given)


def rubric_of(names: dict[str, Any]) -> Any:
    return SimpleNamespace(names=["reward"], weights=[1.0], functions=[names["reward"]])


def look_at(reward: Any) -> dict[str, str]:
    return Look(reward).found


def made(source: str, calls: int = 0) -> dict[str, str]:
    """The fingerprints of what the reward of a cell uses, by name; its own under an empty one."""
    reward = cell(source)["reward"]
    for _ in range(calls):
        reward(["a text"])
    return look_at(reward)


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def note(rubric: Any, before: Any, folder: Path) -> set[str]:
    """What a run's checkpoint notes that its rewards have collected."""
    Collected(rubric, before).on_save(cast("Any", SimpleNamespace(folder=folder)), folder)
    return collected(folder)


@pytest.mark.parametrize(
    ("source", "old", "new", "name"),
    [
        (BEGIN, "LIMIT = 3", "LIMIT = 4", "LIMIT"),
        (BEGIN, "len(text) >", "len(text) >=", "helper"),
        (BEGIN, "scale=2.0", "scale=3.0", "scale"),
        (BEGIN, "* scale for", "+ scale for", ""),
        (DATA, '"so"]', '"so", "hence"]', "WORDS"),
        (DATA, '"a": 1.0', '"a": 2.0', "WEIGHTS"),
        (DATA, '["x"], 2', '["y"], 2', "PAIRS"),
        (DATA, "[1.0, 2.0]", "[1.0, 3.0]", "TABLE"),
        (DATA, 'made(["x"])', 'made(["y"])', "inside.words"),
        (DATA, 'Scorer(["p"])', 'Scorer(["q"])', "SCORER.terms"),
        (DATA, "return 1.0", "return 2.0", "first"),
        (DATA, "sum(term in text", "2 * sum(term in text", "Scorer.score"),
    ],
)
def test_a_change_is_known_by_its_name(source: str, old: str, new: str, name: str) -> None:
    assert source.count(old) == 1
    assert changed(made(source), made(source.replace(old, new))) == {name}


@pytest.mark.parametrize(
    ("source", "edits"),
    [
        (IN_DEPTH, [("text: 1.0", "text: 1.5"), ("text: 2.0", "text: 2.5"), ("[a-z]", "[0-9]"), ('"1.5"', '"2.5"'),
                    ("Fraction(1, 3)", "Fraction(2, 3)"), ("range(4)", "range(5)"), ('"a": 5', '"a": 6'), ("weight=6", "weight=7"),
                    ("text: 7.0", "text: 7.5"), ("self.rules = rules", "self.rules = rules[:1]"), ("Counter(8)", "Counter(9)")]),
        (KINDS, [('["yes"]', '["yes", "ok"]'), ('["no"]', '["no", "never"]'), ('compile("[0-9]")', 'compile("[a-z]")'),
                 ('"a": 1.5', '"a": 2.5'), ('itemgetter("a")', 'itemgetter("b")'), ("math.sqrt", "math.exp"),
                 ("len(text) + 10", "len(text) + 11"), ('= ("so",)', '= ("hence",)'), ("self.least + 20", "self.least + 21"),
                 ("Pair(1)", "Pair(2)"), ("return 30", "return 31"), ("return 40", "return 41"), ("Table(a=2)", "Table(a=3)"),
                 ("len(data) + 50", "len(data) + 51"), ('["sixty"]', '["sixty", "more"]'), ("len(self.words) + 70", "len(self.words) + 71"),
                 ('"eighty"', '"eighty-one"'), ('"ninety"', '"ninety-one"'), ("1j * 1.0", "2j * 1.0")]),
        (OBJECTS, [("return 100.0", "return 101.0"), ("Sum(Short()", "Sum(Long()"), ('["thus"], 0.25', '["thus"], 0.5'),
                   ('["hence"], 0.5', '["hence"], 1.0'), ("Between(good, bad)", "Between(bad, good)"), ('{"score": one}', '{"score": two}'),
                   ("lambda: 900.0", "lambda: 901.0"), ("maxlen=10", "maxlen=20"),
                   ('{"great": 1.0, "good": 0.5}', '{"good": 0.5, "great": 1.0}'), ('Kept(["kept"])', 'Kept(["kept", "more"])'),
                   ('["hidden"]', '["seen"]'), ('("listed",)', '("listed", "more")'), ("return 300.0", "return 301.0"),
                   ("return 400.0", "return 401.0"), ("value + 600.0", "value + 601.0"), ("value + 700.0", "value + 701.0"),
                   ("one.least = 800.0", "one.least = 801.0"), ("str.upper", "str.lower"), ("np.tanh", "np.exp")]),
        (MORE, [("        value = check(value)\n    except ValueError:\n        value = 0.0\n",
                 "    except ValueError:\n        value = 0.0\n    else:\n        value = check(value)\n"),
                ("[first, second, first]", "[first, second, second]"), ("limit=3", "limit=4"), ("return 100.0", "return 101.0"),
                ("return 200.0", "return 201.0"), ("found.limit = 300.0", "found.limit = 301.0"), ("return 400.0", "return 401.0"),
                ("500.0", "501.0")]),
        (TWO_OF_ONE_NAME, [("global", "global or other"), ("closure", "closure or other")]),
        (STRANGE, [("value / 2", "value / 3"), ("range(2000)", "range(3)")]),
        (LOADED, [("return 1.0", "return 2.0")]),
    ],
    ids=["in_depth", "kinds", "objects", "more", "two_of_one_name", "strange", "loaded"],
)  # fmt: skip
def test_an_edit_makes_another_reward_and_no_edit_does_not(
    source: str, edits: list[tuple[str, str]]
) -> None:
    before = made(source)
    assert made(source) == before
    for old, new in edits:
        assert source.count(old) == 1
        assert made(source.replace(old, new)) != before, old


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (BEGIN, {"seen", "calls"}),
        (IN_DEPTH, {"COUNTER.calls"}),
        (KEEPING, {"kept"}),
        (LOADED, {"state", "parts"}),
        (COUNTING, {"steps"}),
    ],
)
def test_what_a_run_collects_is_known_by_its_name(source: str, names: set[str]) -> None:
    assert changed(made(source), made(source, calls=1)) == names


def test_what_objects_hold_after_they_were_used_is_no_other_code() -> None:
    found = changed(made(KINDS), made(KINDS, calls=1))
    assert {"late.words", "late.model"} < found
    assert "" not in found
    found = changed(made(OBJECTS), made(OBJECTS, calls=1))
    assert {name.partition(".")[2].partition(".")[0] for name in found} == {"last"}


def test_remarks_descriptions_and_names_of_other_cells_are_nothing() -> None:
    assert made(BEGIN.replace("global calls", "global calls  # a remark")) == made(BEGIN)
    one, other = (
        made(BEGIN.replace("    global", f'    "{words}"\n    global'))
        for words in ("What it is for.", "In other words.")
    )
    assert one == other
    names = cell(
        "def reward(completions, **columns):\n    return [text.path for text in completions]"
    )
    before = look_at(names["reward"])
    names["path"] = "a name of another cell"
    assert look_at(names["reward"]) == before


def test_what_rewards_collect_is_found_by_what_a_run_has_changed(tmp_path: Path) -> None:
    names = cell(DATA)
    rubric = rubric_of(names)
    before = reward_facts(rubric)
    assert comparable(before, before, collected(tmp_path)) == (before, before)
    note(rubric, before, tmp_path)
    assert not (tmp_path / FILE).exists()
    names["reward"](["a text"])
    known = {"kept of the reward reward", "SCORER.seen of the reward reward"}
    assert note(rubric, before, tmp_path) == known
    after = reward_facts(rubric)
    assert set(differences(before, after)) == known
    kept = comparable(before, after, known)
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
def helper(text): return len(WORD.findall(text))

class Base:
    least = 1
    @staticmethod
    def bounded(value): return max(value, 0)

class Reward(Base):
    def __init__(self, limit=400):
        self.limit, self.calls = limit, 0
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
    ("kind", "collects", "edits"),
    [
        ("object", {"calls"}, [("limit=400", "limit=800"), ("made = Reward()", "made = Reward(300)"), ("= limit, 0", "= limit + 1, 0"),
                               ('"[a-z]+"', '"[a-z0-9]+"'), ("max(value, 0)", "max(value, 1)"), ("findall(text))", "findall(text)) + 1")]),
        ("method", {"self.calls"}, [("limit=400", "limit=800"), ("max(value, 0)", "max(value, 1)")]),
        ("kept", set(), [("limit: float = 4.0", "limit: float = 5.0"), ("FACTOR = 2.0", "FACTOR = 3.0"), ("FACTOR *", "FACTOR +")]),
        ("plain", set(), [("@scaled(3.0)", "@scaled(2.0)"), ("by * value", "by + value"), ("float(len(each))", "2.0 * len(each)"),
                          ("answer", "reference")]),
    ],
)  # fmt: skip
def test_objects_and_decorated_functions_are_known_by_all_of_their_code(
    kind: str, collects: set[str], edits: list[tuple[str, str]]
) -> None:
    def made(source: str, calls: int = 0) -> dict[str, str]:
        reward = cell(source)["rewards"][kind]
        for _ in range(calls):
            reward(completions=["a b"], answer=["a"], reference=["a"])
        return look_at(reward)

    assert changed(made(OBJECT), made(OBJECT, calls=2)) == collects
    for old, new in edits:
        assert made(OBJECT) != made(OBJECT.replace(old, new)), old


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import json\nimport of_user.words\n"
         "def reward(completions, **columns):\n    return [of_user.words.score(text) for text in map(json.dumps, completions)]",
         "of_user.words.score"),
        ("from of_user.words import score\n"
         "def reward(completions, **columns):\n    return [score(text) for text in completions]", "of_user.words.score"),
        ("def reward(completions, **columns):\n    from of_user.words import score\n    import json\n"
         "    return [score(json.dumps(text)) for text in completions]", None),
        ("def reward(completions, **columns):\n    from of_user import words\n    return [words.score(text) for text in completions]",
         "of_user.words.score"),
    ],
    ids=["dotted", "name", "name_when_it_runs", "module_when_it_runs"],
)  # fmt: skip
def test_modules_of_the_users_count_and_installed_ones_do_not(
    source: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "of_user"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def fresh(value: int, calls: int = 0) -> dict[str, str]:
        text = f"import of_user\n\ndef score(text):\n    return {value}\n"
        (package / "words.py").write_text(text)
        for each in [each for each in sys.modules if each.startswith("of_user")]:
            del sys.modules[each]
        importlib.invalidate_caches()
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        return made(source, calls)

    assert fresh(1) == fresh(1, calls=1)
    different = changed(fresh(1), fresh(2))
    assert different == {name} if name else different


def test_any_rows_have_a_fingerprint() -> None:
    rows = [{"question": "q", "extra": {(1, 2): "a", "b": np.int64(3)}, "at": Decimal("1.5")}]
    other = [{"question": "q", "extra": {(1, 2): "a", "b": np.int64(4)}, "at": Decimal("1.5")}]
    assert digest(rows) == digest(rows) != digest(other)
    assert digest([object()]) == digest([object()])


def test_a_session_that_a_reward_mentions_is_nothing() -> None:
    config = TrainingConfig(dataset="arithmetic")
    session = Session(config, [{"question": "a"}], [{"question": "b"}])
    rubric = rubric_of(using("len(session.config)", session=session))
    before = reward_facts(rubric)
    session.folder = Path("somewhere")
    assert reward_facts(rubric) == before
    assert not before[UNSEEN]


def test_rubrics_by_their_content() -> None:
    def reward(word: str) -> dict[str, str]:
        criteria = [Criterion(name="order", description="d", keywords=[word])]
        return look_at(Rubric(name="steps", criteria=criteria).reward())

    assert reward("first") == reward("first") != reward("second")


def test_differences_in_words() -> None:
    before = {"marks": "a", "rewards": {"right": "1", "near": "2"}}
    assert differences(before, before) == []
    now = {"marks": "b", "rewards": {"right": "1", "near": "3", "short": "4"}}
    assert differences(before, now) == ["marks", "the reward near", "the reward short"]
    assert differences({}, {"marks": "b"}) == ["marks"]


def test_objects_of_libraries_are_named_where_only_their_type_is_known() -> None:
    kind = "_pytest.monkeypatch.MonkeyPatch"
    patch = pytest.MonkeyPatch()
    names = cell(
        "class Judge:\n    def __init__(self, part): self.parts = [part]\n\nMODELS = {'a': patch}\njudge = Judge(patch)\nLIST = [1]\n\n"
        "def reward(completions, **columns):\n    return [MODELS, judge, patch, method, TABLE, LIST]\n",
        patch=patch,
        method=patch.setattr,
        TABLE=np,
    )
    before = reward_facts(rubric_of(names))
    assert before[UNSEEN] == {
        f"{name} of the reward reward": kind
        for name in ("MODELS", "judge.parts", "patch", "method.self")
    }
    patch.extra = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert reward_facts(rubric_of(names)) == before


def test_classes_of_python_itself_are_no_unseen_objects() -> None:
    assert reward_facts(rubric_of(cell(KINDS)))[UNSEEN] == {}
    assert reward_facts(rubric_of(cell(OBJECTS)))[UNSEEN] == {
        "each of the reward reward": "numpy.vectorize",
        "curve of the reward reward": "numpy.ufunc",
    }


def test_marks_of_a_library_on_functions_of_python_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch marks `Enum.__new__`, so that a reward with an Enum would be another one once torch is imported."""
    names = cell(
        "from enum import Enum\nclass Kind(Enum):\n    RIGHT = 1\n"
        "def reward(completions, **columns):\n    return [Kind.RIGHT.value] * len(completions)"
    )
    before = look_at(names["reward"])
    monkeypatch.setattr(Enum.__new__, "_torchscript_modifier", "another", raising=False)
    assert look_at(names["reward"]) == before


def test_a_fingerprint_is_the_same_with_other_hashes() -> None:
    code = (
        "from tests.unit.notebook.test_identity import KINDS, IN_DEPTH, made;"
        "from groupwise.notebook.fingerprint import digest;"
        "print(made(KINDS), made(IN_DEPTH), digest([{'keywords': {'a', 'b', 'c', 'd'}}]))"
    )
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (each.communicate()[0] for each in begun)
    assert one == other != ""


def test_a_wrapper_around_a_reward_of_the_config_counts() -> None:
    given = create_reward_functions(TrainingConfig(dataset="arithmetic"))[1]

    def wrapped(factor: str) -> dict[str, str]:
        source = (
            "import functools\n\n@functools.wraps(given)\ndef reward(**columns):\n"
            f"    return [value * {factor} for value in given(**columns)]\n"
        )
        return look_at(cell(source, given=given)["reward"])

    assert changed(wrapped("2.0"), wrapped("3.0")) == {""}
    assert wrapped("2.0") == wrapped("2.0")
    assert look_at(given)[""] != wrapped("2.0")[""]


def test_functions_and_objects_that_use_each_other_are_each_told_once() -> None:
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
    assert made(RECURSIVE) == made(RECURSIVE)
    known = made(NODES)
    assert 100 < len(known) < 5000
    assert made(NODES) == known


POINTING = """
_scorer = None
def score(text): return 100.0
def easy(text): return 200.0
def hard(text): return 300.0
current = easy

class Words:
    def __init__(self, words):
        self.words = words

class Scorer:
    def __init__(self):
        self.strict_words = Words(["strict"])
        self.active = None
        self.how = None
    def strict(self, text): return 400.0
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
    trained = rubric_of(cell(source))
    before = reward_facts(trained)
    trained.functions[0](["a text"])
    after = reward_facts(trained)
    marked = {
        name if name in before[USED] and name in after[USED] else f"({name})"
        for name in changed(before[USED], after[USED])
    }
    assert differences(*comparable(before, after, marked)) == []
    return differences(*comparable(before, reward_facts(rubric_of(cell(edited))), marked))


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
def test_what_a_name_pointed_to_counts_though_a_training_pointed_it_elsewhere(
    old: str, new: str, name: str
) -> None:
    assert POINTING.count(old) == 1
    assert compared(POINTING, POINTING) == []
    assert f"{name} of the reward reward" in compared(POINTING, POINTING.replace(old, new))


def test_a_class_whose_cell_was_run_again_is_no_other_class() -> None:
    source = "class Scorer:\n    def score(self, text):\n        return 1.0\n"
    names = cell(source + "\nscorer = Scorer()\n")
    exec("def reward(completions, **columns):\n    return [scorer, Scorer()]\n", names)
    before = look_at(names["reward"])
    exec(source, names)
    assert look_at(names["reward"]) == before
    exec(source.replace("1.0", "2.0"), names)
    assert changed(before, look_at(names["reward"])) != set()


def test_what_was_set_up_within_a_function_of_a_library_counts() -> None:
    library = ModuleType("json")
    exec(
        "def capped(most):\n    def score(text):\n        return most\n    return score\n",
        vars(library),
    )
    one, other = (look_at(using("score(text)", score=library.capped(n))["reward"]) for n in (1, 2))
    assert changed(one, other) == {"score.most"}


MODEL = """
model = None

def reward(completions, **columns):
    global model
    model = model or ["loaded"]
    return [2.5]
"""


@pytest.mark.parametrize("evaluated", [False, True])
def test_what_was_loaded_before_is_no_difference_for_the_training_after_it(
    evaluated: bool, tmp_path: Path
) -> None:
    """By the training before in this process, or by an evaluation."""
    names = cell(MODEL)
    rubric = rubric_of(names)
    cold = reward_facts(rubric)
    if evaluated:
        with noticed(rubric, cold):
            names["reward"](["a"])
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        watching = Collected(rubric, reward_facts(rubric))
        names["reward"](["a"])
        watching.on_save(cast("Any", SimpleNamespace(folder=folder)), folder)
        assert collected(folder) == {"model of the reward reward"}
        assert differences(*comparable(reward_facts(rubric), cold, collected(folder))) == []
