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
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from groupwise.notebook import Criterion, Rubric, Session, TrainingConfig, identity
from groupwise.notebook.fingerprint import FunctionDescription, digest
from groupwise.notebook.identity import (
    Collected,
    collected_names,
    comparable,
    differences,
    reward_facts,
)
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


def using(names: str, setup: str = "") -> str:
    """The source of a cell: the set-up, then a reward that uses these names."""
    return f"{IMPORTS}{setup}\n\ndef reward(completions, **columns):\n    return [{names}]\n"


IMPORTS = """
import functools, math, re
from collections import defaultdict, deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from html.parser import HTMLParser
from operator import itemgetter
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple
import numpy as np
from pydantic import BaseModel, Field, PrivateAttr
"""
NUMBER = """
def number(text):
    try:
        value = float(text)
        value = check(value)
    except ValueError:
        value = 0.0
    return value

def check(value): return value
"""
WORDS = """
class Words:
    def __init__(self, words, weight): self.words, self.weight = words, weight
    def score(self, text): return self.weight * sum(word in text for word in self.words)

class Other(Words):
    def score(self, text): return 200.0

class Sum:
    def __init__(self, *parts): self.first, self.second, self.last = *parts, None
    def __call__(self, text):
        self.last = Words([text], 0.0)
        return self.first.score(text) + self.second.score(text)

total = Sum(Words(["so"], 1.0), Words(["thus"], 0.25))
"""
CLOSURES = """
def has(words):
    def check(text): return any(word in text for word in words)
    return check

good, bad = has(["yes"]), has(["no"])

class Between:
    def __init__(self, above, below): self.above, self.below = above.__call__, below.__call__

between = Between(good, bad)
"""
COUNTER = """
class Counter:
    def __init__(self, start): self.start, self.calls = start, 0
    def value(self):
        self.calls += 1
        self.start = self.start * 1
        return self.start

counter = Counter(8)
"""
CLASSES = """
class Pair(NamedTuple):
    least: int
    def value(self): return self.least + 20

class Kept(NamedTuple):
    words: list

class Kind(Enum):
    ONE = "one"
    def value_of(self): return 30

class Table(dict):
    def value(self): return 40

class Parser(HTMLParser):
    def handle_data(self, data): self.found = len(data) + 50

pair, table, parser, kept = Pair(1), Table(a=2), Parser(), Kept(["kept"])
"""
FUNCTIONS = """
def one(text): return 1.0
def two(text): return 2.0
one.least = 800.0
chosen = {"score": one}
"""
EDITS = [
    ('checks = [("digits", lambda text: 1.0)]', "checks", [("1.0", "1.5")]),
    ('tables = {"a": {"b": [len, lambda text: 2.0]}}', "tables", [("2.0", "2.5")]),
    ('patterns = [re.compile("[a-z]")]', "patterns", [("a-z", "0-9")]),
    ('least, share, most = Decimal("1.5"), Fraction(1, 3), range(4)', "least, share, most",
     [("1.5", "2.5"), ("1, 3", "2, 3"), ("range(4)", "range(5)")]),
    ('frozen, names = MappingProxyType({"a": 5}), SimpleNamespace(weight=6)', "frozen, names", [("5", "6"), ("weight=6", "weight=7")]),
    ("parts = [SimpleNamespace(rules=[('x', lambda text: 7.0)])]", "parts[0].rules", [("7.0", "7.5")]),
    (COUNTER, "counter.value()", [("Counter(8)", "Counter(9)"), ("start * 1", "start * 2")]),
    (CLOSURES, "good(completions[0]), bad, between",
     [('["yes"]', '["yes", "ok"]'), ('["no"]', '["never"]'), ("(good, bad)\n", "(bad, good)\n")]),
    ('find, price, pick = re.compile("[0-9]").search, {"a": 1.5}.get, itemgetter("b")', 'find("1"), price("a"), pick',
     [("0-9", "a-z"), ("1.5", "2.5"), ('"b"', '"c"')]),
    ("root, upper, curve = math.sqrt, str.upper, {'of': np.tanh}", "root, upper, curve",
     [("sqrt", "exp"), ("upper, {", "lower, {"), ("np.tanh", "np.exp")]),
    (CLASSES, 'pair.value(), Kind.ONE.value_of(), table.value(), parser.feed("x"), kept',
     [("+ 20", "+ 21"), ("Pair(1)", "Pair(2)"), ("return 30", "return 31"), ("return 40", "return 41"), ("Table(a=2)", "Table(a=3)"),
      ("+ 50", "+ 51"), ('["kept"]', '["kept", "more"]')]),
    ('objects, factor = np.array(["eighty", None], dtype=object), 1j', "objects, factor", [("eighty", "eighty-one"), ("1j", "2j")]),
    ('allowed = frozenset({frozenset({"ninety", "other"}), frozenset({"third"})})', "allowed", [("ninety", "ninety-one")]),
    (WORDS, "total(completions[0])",
     [('Sum(Words(["so"]', 'Sum(Other(["so"]'), ('["thus"], 0.25', '["thus"], 0.5'), ('["so"], 1.0', '["so"], 2.0')]),
    (FUNCTIONS, "one, two, chosen", [('"score": one', '"score": two'), ("800.0", "801.0")]),
    ("missing, window = defaultdict(lambda: 900.0), deque([1.0], maxlen=10)", "missing, window",
     [("900.0", "901.0"), ("maxlen=10", "maxlen=20")]),
    ('grades = {"great": 1.0, "good": 0.5}', "grades", [('"great": 1.0, "good": 0.5', '"good": 0.5, "great": 1.0')]),
    ("@np.vectorize\ndef each(value): return value + 700.0", "each", [("700.0", "701.0")]),
    (NUMBER, "number(completions[0])", [("        value = check(value)\n    except ValueError:\n        value = 0.0\n",
     "    except ValueError:\n        value = 0.0\n    else:\n        value = check(value)\n")]),
    ("first, second = {'a': 1.0}, {'a': 2.0}\nstages = [first, second, first]", "stages", [("second, first]", "second, second]")]),
    ("part = functools.partial(pow, 500.0)", "part(2)", [("500.0", "501.0")]),
]  # fmt: skip
"""What a reward may use, how it does, and edits of each that make it another reward."""
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
OBJECT = """
import functools
import re
WORD = re.compile("[a-z]+")

@functools.cache
def helper(text): return len(WORD.findall(text))

class Base:
    @staticmethod
    def bounded(value): return max(value, 0)

class Reward(Base):
    def __init__(self, limit=400):
        self.limit, self.calls = limit, 0
    def __call__(self, completions, **columns):
        self.calls += 1
        return [self.bounded(helper(text) / self.limit) for text in completions]

reward = Reward()
"""
METHOD = OBJECT + "reward = reward.__call__"
SCALED = """
import functools

def scaled(by):
    def around(function):
        @functools.wraps(function)
        def inner(*arguments, **columns):
            return [by * value for value in function(*arguments, **columns)]
        return inner
    return around

@scaled(3.0)
def reward(completions, **columns):
    return [float(len(each)) for each in completions]
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


def cell(source: str, **names: Any) -> dict[str, Any]:
    """The names of a kernel after this cell."""
    found = {"__name__": "__main__", **names}
    exec(source, found)
    return found


def rubric_of(names: dict[str, Any]) -> Any:
    return SimpleNamespace(names=["reward"], weights=[1.0], functions=[names["reward"]])


def look_at(reward: Any) -> dict[str, str]:
    return FunctionDescription(reward).fingerprints


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
    return collected_names(folder)


@pytest.mark.parametrize(
    ("source", "edits"),
    [
        *((using(use, setup), edits) for setup, use, edits in EDITS),
        (LOADED, [("return 1.0", "return 2.0")]),
        (OBJECT, [("limit=400", "limit=800"), ("= limit, 0", "= limit + 1, 0"), ('"[a-z]+"', '"[a-z0-9]+"'),
                  ("max(value, 0)", "max(value, 1)"), ("findall(text))", "findall(text)) + 1"),
                  ("reward = Reward()", "reward = Reward(300)")]),
        (METHOD, [("limit=400", "limit=800"), ("max(value, 0)", "max(value, 1)")]),
        (SCALED, [("@scaled(3.0)", "@scaled(2.0)"), ("by * value", "by + value"), ("float(len(each))", "2.0 * len(each)")]),
    ],
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
        (BEGIN, {"seen", "calls"}), (using("counter.value()", COUNTER), {"counter.calls"}),
        (using("total(completions[0])", WORDS), {"total.last", "total.last.words", "total.last.weight"}), (KEEPING, {"kept"}),
        (OBJECT, {"calls"}), (METHOD, {"self.calls"}), (LOADED, {"state", "parts"}),
    ],
)  # fmt: skip
def test_objects_changed_by_a_run_are_reported_by_name(source: str, names: set[str]) -> None:
    assert changed(made(source), made(source, calls=1)) == names


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


def test_collections_of_rewards_are_found_by_the_changes_of_a_run(tmp_path: Path) -> None:
    names = cell(BEGIN)
    rubric = rubric_of(names)
    before = reward_facts(rubric)
    assert comparable(before, before, collected_names(tmp_path)) == (before, before)
    note(rubric, before, tmp_path)
    assert not (tmp_path / identity.COLLECTED_FILE).exists()
    names["reward"](["a text"])
    known = {"seen of the reward reward", "calls of the reward reward"}
    assert note(rubric, before, tmp_path) == known
    after = reward_facts(rubric)
    assert set(differences(before, after)) == known
    kept = comparable(before, after, known)
    assert differences(*kept) == []
    assert kept[0][identity.USED]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import json\nimport of_user.words\n"
         "def reward(completions, **columns):\n    return [of_user.words.score(text) for text in map(json.dumps, completions)]",
         "of_user.words.score"),
        ("def reward(completions, **columns):\n    from of_user.words import score\n    import json\n"
         "    return [score(json.dumps(text)) for text in completions]", None),
        ("def reward(completions, **columns):\n    from of_user import words\n    return [words.score(text) for text in completions]",
         "of_user.words.score"),
    ],
    ids=["dotted", "name_when_it_runs", "module_when_it_runs"],
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
    train, test = [{"question": "a", "answer": "1"}], [{"question": "b", "answer": "2"}]
    session = Session(config, train, test)
    rubric = rubric_of(cell(using("len(session.config)"), session=session))
    before = reward_facts(rubric)
    session.folder = Path("somewhere")
    assert reward_facts(rubric) == before
    assert not before[identity.UNSEEN]


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
    assert before[identity.UNSEEN] == {
        f"{name} of the reward reward": kind
        for name in ("MODELS", "judge.parts", "patch", "method.self")
    }
    patch.extra = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert reward_facts(rubric_of(names)) == before


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


def fingerprints() -> str:
    """Of all that is edited here, and of a row."""
    found = [made(using(use, setup)) for setup, use, _ in EDITS]
    return repr((found, digest([{"keywords": {"a", "b", "c", "d"}}])))


def test_a_fingerprint_is_the_same_with_other_hashes() -> None:
    code = "from tests.unit.notebook.test_identity import fingerprints; print(fingerprints())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == fingerprints()


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


def test_objects_that_use_each_other_are_each_told_once() -> None:
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
        name if name in before[identity.USED] and name in after[identity.USED] else f"({name})"
        for name in changed(before[identity.USED], after[identity.USED])
    }
    assert differences(*comparable(before, after, marked)) == []
    return differences(*comparable(before, reward_facts(rubric_of(cell(edited))), marked))


@pytest.mark.parametrize(("old", "new", "name"), [
    ("100.0", "101.0", "score"), ("200.0", "201.0", "easy"), ("300.0", "301.0", "hard"), ("400.0", "401.0", "Scorer.strict"),
    ('["strict"]', '["stricter"]', "scorer.strict_words.words"),
])  # fmt: skip
def test_the_original_value_of_a_rebound_name_counts(old: str, new: str, name: str) -> None:
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


MODEL = """
model = None

def reward(completions, **columns):
    global model
    model = model or ["loaded"]
    return [2.5]
"""


@pytest.mark.parametrize("evaluated", [False, True])
def test_lazily_loaded_objects_do_not_count_as_a_difference(
    evaluated: bool, tmp_path: Path
) -> None:
    """By the training before in this process, or by an evaluation."""
    names = cell(MODEL)
    rubric = rubric_of(names)
    cold = reward_facts(rubric)
    if evaluated:
        with identity.note_changes(rubric, cold):
            names["reward"](["a"])
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        watching = Collected(rubric, reward_facts(rubric))
        names["reward"](["a"])
        watching.on_save(cast("Any", SimpleNamespace(folder=folder)), folder)
        assert collected_names(folder) == {"model of the reward reward"}
        assert differences(*comparable(reward_facts(rubric), cold, collected_names(folder))) == []


def test_state_of_used_objects_does_not_count_as_changed_code() -> None:
    source = using('late["a"]', LATE)
    found = changed(made(source), made(source, calls=1))
    assert {"late.words", "late.model"} <= found
    assert "" not in found


def test_rubrics_by_their_content() -> None:
    def reward(word: str) -> dict[str, str]:
        criteria = [Criterion(name="order", description="d", keywords=[word])]
        return look_at(Rubric(name="steps", criteria=criteria).reward())

    assert reward("first") == reward("first") != reward("second")


LATE = """
class Judge(BaseModel):
    words: tuple[str, ...] = ("so",)
    calls: int = 0
    def score(self, text):
        self.calls += 1
        return len(text) + 10

class Late:
    model = None
    @functools.cached_property
    def words(self): return ["sixty"]
    def __getitem__(self, name):
        self.model = self.model or Judge()
        return self.model.score(name) + len(self.words) + 70

late = Late()
"""


@pytest.mark.parametrize(("source", "old", "new", "name"), [
    (BEGIN, "LIMIT = 3", "LIMIT = 4", "LIMIT"), (BEGIN, "len(text) >", "len(text) >=", "helper"),
    (BEGIN, "scale=2.0", "scale=3.0", "scale"), (BEGIN, "* scale for", "+ scale for", ""),
    (using("good('x')", CLOSURES), '["yes"]', '["yes", "ok"]', "good.words"),
    (using("counter.value()", COUNTER), "Counter(8)", "Counter(9)", "counter.start"),
    (using("counter.value()", COUNTER), "start * 1", "start * 2", "Counter.value"),
])  # fmt: skip
def test_a_change_is_known_by_its_name(source: str, old: str, new: str, name: str) -> None:
    assert source.count(old) == 1
    assert changed(made(source), made(source.replace(old, new))) == {name}
