"""The contract of the reward for code.

1. Code is found where a reader would look for it, and tests are found in every form in which data sets have them.
2. Honest code gets the share of tests that it passes, whatever objects it works with.
3. Code that does not pass gets nothing for it, whatever it does to its process, to Python, and to the line to the tests.
4. What is not the code's fault is a failure with a reason, and no 0.
"""

import asyncio
import base64
import json
import math
import pickle
import textwrap
import time
import zlib
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from groupwise.core.errors import SandboxError, TaskError
from groupwise.core.reward_call.call import Failed
from groupwise.tasks.rewards import python_tests
from groupwise.tasks.rewards.python_tests import (
    Case,
    PythonTests,
    RowTests,
    Verdict,
    code_in,
    verdict,
)
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rewards.sandbox import Limits, Result

LIMITS = Limits(seconds=20)


async def judged(code: str, tests, entry_point=None, limits=LIMITS) -> Verdict:
    row = RowTests.of({"tests": tests, "entry_point": entry_point})
    return await verdict(textwrap.dedent(code), row, limits)


async def share(code: str, tests, entry_point=None, limits=LIMITS) -> tuple[int, int]:
    found = await judged(code, tests, entry_point, limits)
    return found.passed, found.of


# 1. code and tests


@pytest.mark.parametrize(("text", "code"), [
    ("x = 1", "x = 1"), ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"), ("```\nx = 1\n```", "x = 1\n"),
    ("```py\nx = 1\n```\nor\n```python3\nx = 2\n```\n```bash\nls\n```", "x = 2\n"), ("  ```python\n  x\n    y\n  ```", "x\n  y\n"),
    ("1. Do:\n\n   ```python\n   if x:\n\n       y\n   ```\n2. Done.", "if x:\n\n    y\n"), ("- ```python\n  x = 1\n  ```", "x = 1\n"),
    ("  ```python\nif x:\n  y\n  ```", "if x:\n  y\n"),  # the fence alone is indented
    ("```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"), ("```\nx = 1\n```\nor\n```\nx = 2\n```", "x = 2\n"),
    ("```\n1\n```\n```Python\nx = 1", "x = 1"), ("```python\nx = 1\n```\nor\n```python\nx =", "x = 1\n"),  # not what was cut off
    ("```bash\nls\n```\n", "```bash\nls\n```\n"), ("```python\nx = 1\ny = 2```\nThat is it.", "x = 1\ny = 2\n"),
    ("```python\nx = 1```\n```\n1\n```", "x = 1\n"), ('```python\n"""As ```\nx"""\ny```', '"""As ```\nx"""\ny\n'),
    ("~~~python\nx = 1\n~~~\nDone.", "x = 1\n"), ("~~~~py\ns = '~~~'\n```\n~~~~", "s = '~~~'\n```\n"),
    ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"), ("<think>```python\nx\n```</think>\ny = 2", "\ny = 2"),
    ("```python\nx\n```\n<answer>y = 3</answer>", "y = 3"), ("<answer>\n```python\ny = 3\n```\n</answer>", "y = 3\n"),
    ("Look:\n```python\nx = 1\ny =", "x = 1\ny ="), ("```python\ns = '''\n```inside\n'''\n```", "s = '''\n```inside\n'''\n"), ("", ""),
])  # fmt: skip
def test_code_is_found(text, code):
    assert code_in(text) == code


def test_the_block_that_defines_what_is_tested_is_the_code():
    text = "```python\nclass Solution:\n    def add(self): ...\n```\nUse:\n```python\nSolution().add()\n```"
    assert code_in(text, names={"add"}) == "class Solution:\n    def add(self): ...\n"
    assert code_in(text, names={"sub"}) == code_in(text) == "Solution().add()\n"
    assert RowTests.of({"tests": "assert add(1, 2) == abs(-3)"}).names == {"add"}
    assert RowTests.of({"tests": "assert f(1)", "entry_point": "g"}).names == {"g"}


PROGRAM = RowTests(of_program=(Case("1", "2"),))
OF_LIVE_CODE_BENCH = replace(PROGRAM, common_imports=True)
CASE = {"input": "1", "output": "2"}
TABLE = {"inputs": ["1"], "outputs": ["2"]}
CALL = {"input": "[1]\n2", "output": "[3]", "testtype": "functional"}
CALLS = RowTests.of({"test_cases": {"fn_name": "f", "inputs": [[[1], 2]], "outputs": [[3]]}})


def packed(value):
    """As LiveCodeBench has its private cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize(("row", "expected"), [
    ({"tests": "assert f()"}, RowTests("assert f()")), ({"tests": ["a", "b"], "entry_point": ""}, RowTests(("a", "b"))),
    ({"tests": '["a", "b"]', "entry_point": "f"}, RowTests(("a", "b"), "f")),
    ({"tests": "[f(x) for x in y]"}, RowTests("[f(x) for x in y]")),
    ({"tests": np.array(["a", "b"], dtype=object)}, RowTests(("a", "b"))), ({"tests": '"""Doc."""'}, RowTests('"""Doc."""')),
    ({"test_list": ["a"], "test_setup_code": "", "test_imports": ["import m"]}, RowTests(("import m", "a"))),
    ({"test_list": ["a"], "test_setup_code": "x = 1", "test": ""}, RowTests(("x = 1", "a"))),
    ({"test": "def check(candidate): ...", "entry_point": "f"}, RowTests("def check(candidate): ...", "f")),
    ({"tests": "a", "test": "b", "input_output": TABLE}, RowTests("a")), ({"tests": json.dumps([CASE])}, PROGRAM),
    ({"tests": None, "test_cases": [CASE]}, PROGRAM), ({"test_cases": json.dumps(json.dumps(TABLE))}, PROGRAM),
    ({"input_output": json.dumps(TABLE)}, PROGRAM), ({"input_output": {"inputs": [["1"]], "outputs": [["2"]]}}, PROGRAM),
    ({"input_output": {key: np.array(value) for key, value in TABLE.items()}}, PROGRAM), ({"official_tests": [CASE]}, PROGRAM),
    ({"test_cases": {"input": ["1"], "output": ["2"]}}, PROGRAM), ({"official_tests": [CASE], "input_mode": "stdio"}, PROGRAM),
    ({"verification_info": {"language": "python", "test_cases": [{**CASE, "type": "stdin_stdout", "fn_name": None}]}}, PROGRAM),
    ({"public_test_cases": json.dumps([CASE]), "private_test_cases": "[]", "metadata": "{}"}, OF_LIVE_CODE_BENCH),
    ({"public_test_cases": "[]", "private_test_cases": packed(json.dumps([CASE]))}, OF_LIVE_CODE_BENCH),
    ({"tests": [{**CASE, "testtype": "stdin"}]}, OF_LIVE_CODE_BENCH), ({"test_cases": ["x", "assert f"]}, RowTests(("x", "assert f"))),
    ({"public_tests": {"input": ["1"], "output": ["2"]}, "private_tests": {"input": [], "output": []}}, PROGRAM),
    ({"ground_truth": json.dumps(TABLE), "reward_model": {"ground_truth": TABLE}}, PROGRAM), ({"test_cases": CASE}, PROGRAM),
    ({"test_cases": {"input": 1, "output": 2}}, PROGRAM),
    ({"public_tests": {"inputs": [[[1], 2]], "outputs": [[3]], "fn_name": "f"}}, CALLS),
    ({"reward_model": {"ground_truth": json.dumps(TABLE), "style": "rule"}}, PROGRAM), ({"ground_truth": "2", "test": "a"}, RowTests("a")),
    ({"test": "a", "entry_point": "Solution().f"}, RowTests("a", "f")), ({"test_cases": [{"input": 1, "output": "2"}]}, PROGRAM),
    ({"public_test_cases": [CALL], "starter_code": "# def g(self):\nclass Solution:\n    def f(self, x: int):"}, CALLS),
    *(({"verification_info": {"test_cases": [{"fn_name": "f", **given}]}}, CALLS) for given in (
        {"input": "[[1], 2]", "output": "[3]", "type": "function_call"}, {"input": [[1], 2], "output": [3]})),
    ({"test_cases": {"fn_name": "Solution().f", "inputs": ["[1]\n2"], "outputs": [[3]]}}, CALLS),
    ({"public_test_cases": json.dumps([CALL]), "metadata": '{"func_name": "f"}'}, CALLS),
    ({"tests": [{**CALL, "metadata": {"func_name": "f"}}]}, CALLS),
    ({"test_cases": [{**CALL, "type": "functional"}], "entry_point": "f"}, CALLS),
    ({"input_output": json.dumps({"inputs": ["[1]\n2"], "outputs": ["[3]"], "fn_name": "f"})}, CALLS),
])  # fmt: skip
def test_rows_say_what_to_run(row, expected):
    assert RowTests.of(row) == expected


@pytest.mark.parametrize(("row", "problem"), [
    ({}, "has no tests"), ({"tests": [], "test_cases": None}, "has no tests"),
    ({"tests": ["a"], "test_cases": [{}]}, "has both"), ({"tests": ["a", 3]}, "that are not text"),
    ({"tests": " "}, "that are not text"), ({"tests": "a", "entry_point": "f()"}, "name of a function"),
    ({"test_cases": [{"input": "1"}]}, "expected {input: text, output: text}"),
    ({"test_cases": {"inputs": ["1"], "outputs": []}}, "two lists of equal length"),
    ({"test_cases": {"inputs": 1}}, "two lists of equal length"),
    ({"test_cases": {"inputs": [], "outputs": []}}, "two lists of equal length"),
    ({"test_cases": {"input": "1"}}, "two lists of equal length"),
    ({"test_list": ["a"], "input_output": TABLE}, "has both `test_list` and `input_output`"),
    ({"test_cases": "1 2"}, "neither JSON nor"), ({"test": True}, "`test` that are not text"),
    ({"test_cases": [{"input": 1, "output": "2"}], "entry_point": "f"}, "expected {input"),
    ({"reward_model": {"ground_truth": "2"}}, "has no tests"), ({"test_cases": [{"input": True, "output": "2"}]}, "expected {input"),
    ({"test_cases": [{"fn_name": "f", "input": [1]}]}, "expected `input` and `output`"),
    ({"public_test_cases": [CALL], "starter_code": "def f(x): ...\ndef g(x): ..."}, "with one `fn_name`"),
    ({"private_test_cases": packed(Case)}, "more than a text"),
    ({"private_test_cases": base64.b64encode(zlib.compress(b"K\x01r\xff\xff\xff\xff.")).decode()}, "more than a text"),
    ({"private_test_cases": packed("[]")[:-9]}, "cannot be read"), ({"private_test_cases": 3}, "not a list"),
    ({"official_tests": [CASE], "generated_checker": "x"}, "`generated_checker` 'x', and that"),
    ({"official_tests": [CASE], "input_mode": "file"}, "standard input alone"),
    ({"test_cases": {"inputs": ["1"], "outputs": ["2"], "func": "f"}}, "with the key 'func'"),
    ({"test_cases": {"inputs": [None], "outputs": [2], "fn_name": "f"}}, "a list of arguments"),
    ({"test_cases": {"inputs": [[1]], "outputs": [2], "fn_name": "f()"}}, "of a function"),
    ({"test_cases": {"inputs": [[1]], "outputs": [{1}], "fn_name": "f"}}, "that are not JSON"),
    ({"test_cases": {"inputs": [[1]], "outputs": [], "fn_name": "f"}}, "lists of equal length"),
    ({"test_cases": [{"input": "1", "output": "2", "testtype": "functional"}]}, "with one `fn_name`, or an `entry_point`"),
    ({"test_cases": [{"input": "x y", "output": "2", "testtype": "functional"}], "entry_point": "f"}, "lines are not JSON"),
    ({"test_cases": {"language": "rust", "test_cases": []}}, "only Python"),
    ({"test_cases": [{"input": "1", "output": "2", "type": "file"}]}, "expected {input"),
])  # fmt: skip
def test_rows_that_say_nothing_are_refused(row, problem):
    with pytest.raises(ValueError, match=problem.replace("{", r"\{")):
        RowTests.of(row)
    with pytest.raises(ValueError, match=problem.replace("{", r"\{")):
        PythonTests().check_row(row)


@pytest.mark.parametrize(("tests", "entry_point", "problem"), [
    (["f(1) == 2"], None, "no assert before"), ("f(1)", None, "nothing is checked"),
    ("def check(candidate): assert candidate(1)", None, "no entry_point"),
    ("assert f(1) == 2\nx = " + "+".join(["1"] * 5000), None, "nested too deep|not Python"),
])  # fmt: skip
def test_tests_that_any_code_would_pass_are_refused_before_the_run(tests, entry_point, problem):
    row = {"tests": tests, "entry_point": entry_point}
    with pytest.raises(ValueError, match=problem):
        PythonTests().check_row(row)


async def test_calls_of_a_table_are_tests():
    table = {"fn_name": "sum", "inputs": [[1, 2], [[3], None], [5, 5]], "outputs": [3, [3, 4], 10]}
    wrapped = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]}
    as_text = [{"fn_name": "f", "input": [x], "output": f"[{x}]"} for x in (1, 2)]
    own_sum = "def sum(a, b): return (3, 4) if b is None else a + b if a < 5 else 0"
    cases = (
        (table, own_sum, 2),
        (table, "x = 1", 0),  # Python's own is not meant
        (wrapped, "def f(x): return x", 2),
        (wrapped, "def f(x): return [x]", 2),
        (wrapped, "def f(x): return [[x]]", 0),
        *((as_text, f"def f(x): return {found}", 2) for found in ("x", "[x]", "str([x])")),
    )
    rows = [RowTests.of({"test_cases": json.dumps(given)}) for given, _, _ in cases]
    rows[0].check()
    found = await three_at_once(
        verdict(code, row, LIMITS) for (_, code, _), row in zip(cases, rows, strict=True)
    )
    assert [each.passed for each in found] == [passed for _, _, passed in cases]
    assert [each.of for each in found] == [3, 3, *[2] * 6]


UNIMPORTED = """
    gcd = lambda *numbers: 5
    class Solution:
        @cache
        def f(self, x):
            counts = defaultdict(int, {x: math.gcd(4, 6)})
            return counts[x] + gcd(4, 6) + pow(2, 3, 5) + len(Counter("ab")) + (x < inf)
    print(Solution().f(1))
"""


async def test_answers_of_live_code_bench_need_no_imports():
    call = {"input": "1", "output": "13", "testtype": "functional"}
    rows = [{"public_test_cases": [call], "entry_point": "f"}, {"test_cases": [CASE | {"output": "13"}]},
        {"tests": "assert f(1) == 13"}]  # fmt: skip
    found = [await verdict(textwrap.dedent(UNIMPORTED), RowTests.of(row), LIMITS) for row in rows]
    assert [each.why for each in found] == [None] * 3
    bare = "print(gcd(4, int(input())) + 1)"
    rows = [{name: [CASE]} for name in ("public_test_cases", "test_cases")]
    assert [(await verdict(bare, RowTests.of(row), LIMITS)).passed for row in rows] == [1, 0]


LEETCODE = """
class Solution:
    def __init__(self):
        self.calls = 0
    def pairs(self, numbers: List[int], target: Optional[int]) -> Tuple[int, ...]:
        return tuple(n for n in numbers if n != target)
"""


async def test_answers_in_the_way_of_leetcode_pass_tests_of_functions():
    """A method of the class Solution stands for a function, and typing need not be imported."""
    of_live_code_bench = [
        {"input": "[1, 2, 3]\n2", "output": "[1, 3]", "testtype": "functional"},
        {"input": "[]\nnull", "output": "[0]", "testtype": "functional"},
    ]
    of_open_r1 = [{"fn_name": "pairs", "input": [[4], 4], "output": [[]], "type": "function_call"}]
    rows = [
        RowTests.of({"test_cases": json.dumps(of_live_code_bench), "entry_point": "pairs"}),
        RowTests.of({"test_cases": of_open_r1}),
        RowTests.of({"tests": "assert Solution().pairs([1], 2) == (1,)"}),
    ]
    for row in rows:
        row.check()
    found = await three_at_once(verdict(LEETCODE, row, LIMITS) for row in rows)
    assert [(each.passed, each.of) for each in found] == [(1, 2), (1, 1), (1, 1)]
    program = RowTests.of({"test_cases": [{"input": "3\n4", "output": "7"}]})
    used = f"{LEETCODE}\nprint(Solution().pairs([int(input())], 2))"
    assert (await verdict(used, rows[1], LIMITS)).passed == 1  # there is no input here
    reads = "def total(xs: List[str]) -> int:\n    return sum(map(int, xs))\nprint(total([input(), input()]))"
    assert (await verdict(reads, program, LIMITS)).passed == 1


FORMS = """
import math
from solution import *
LIMIT = 3
assert f(1) == 2
def helper(x):
    return f(x)
def test_a():
    assert helper(LIMIT) == 4
def test_b():
    assert math.isclose(f(1), 1)
assert f(0) == 0
for x in (1, 2):
    assert f(x) == x + 1
"""


async def test_tests_in_a_text_are_counted_one_by_one_and_check_gets_the_entry_point():
    assert await share("def f(x): return x + 1", FORMS) == (3, 5)
    check = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9"
    assert await share("def square(x): return x * x", check, "square") == (1, 1)
    assert await share("def other(x): return x * x", check, "square") == (0, 1)


@pytest.mark.parametrize(("tests", "problem"), [
    (["import numpy", "assert f(1)"], "they import numpy"),
    ("class A: pass\nassert f(A())", r"cannot go over to it \(A\)"), ("assert f(", "the tests are not Python"),
])  # fmt: skip
async def test_tests_that_cannot_be_run_are_not_the_codes_fault(tests, problem):
    with pytest.raises(ValueError, match=problem):
        await judged("def f(x): return x", tests)


# 2. honest code


HONEST = """
    from dataclasses import dataclass
    from collections import Counter, namedtuple
    from fractions import Fraction
    import math

    class Full(Exception):
        def __init__(self, size):
            super().__init__(size)

    class Stack:
        def __init__(self, limit=9):
            self.items, self.limit = [], limit
        def push(self, x):
            if len(self.items) == self.limit:
                raise Full(self.limit)
            self.items.append(x)
            return self
        def pop(self): return self.items.pop()
        def __len__(self): return len(self.items)
        def __iter__(self): return iter(self.items)
        def __getitem__(self, i): return self.items[i]

    @dataclass
    class Vector:
        x: float
        y: float
        def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)

    class Node:
        def __init__(self, value, next=None): self.value, self.next = value, next

    Point = namedtuple("Point", "x y")
    TABLE = {"a": (1, [2.5])}

    def same(x): return x
    def sort(items): items.sort()
    def first_row(grid): grid[0][0] = 9; return grid[0]
    def count(text): return Counter(text)
    def pairs(n):
        for i in range(n):
            yield i, str(i)
    def apply(f, *args, **named): return f(*args, **named)
    def length(node): return 0 if node is None else 1 + length(node.next)
    def half(n): return Fraction(n, 2)
    def factorial(n): return math.factorial(n)
    def bisect(x): return x // 2
    def sum(a, b): return a - b
    def caught(f):
        try: return f()
        except KeyError as error: return error.args[0]
    def text(): return "\\ud800 and é\\0"
"""
FINE = [
    "assert same(1) == 1 and same('a') == 'a' and same(None) is None and same((1, [2])) == (1, [2])",
    "assert isinstance(same([1]), list) and isinstance(same(2.0), float) and same({1, 2}) == {2, 1}",
    "xs = [3, 1, 2]\nassert sort(xs) is None\nassert xs == [1, 2, 3]",
    "grid = [[1, 2], [3]]\nassert first_row(grid) is grid[0]\nassert grid == [[9, 2], [3]]",
    "board = [[0] * 2] * 2\nfirst_row(board)\nassert board == [[9, 0], [9, 0]]",
    "s = Stack()\ns.push(1).push(2)\nassert (len(s), list(s), s[0], s.pop(), s.items) == (2, [1, 2], 1, 2, [1])",
    "assert Vector(1, 2) + Vector(1, 1) == Vector(2, 3)\nassert Vector(1, 2) != Vector(1, 3)",
    "v = Vector(1, 2)\nv.x = 5\nassert (v.x, str(v)) == (5, 'Vector(x=5, y=2)')\nassert isinstance(v, Vector)",
    "assert Point(1, 2) == (1, 2) and count('aab') == {'a': 2, 'b': 1} and TABLE == {'a': (1, [2.5])}",
    "assert list(pairs(2)) == [(0, '0'), (1, '1')]\ng = pairs(9)\nassert next(g) == (0, '0')\nassert next(g)[0] == 1",
    "g = pairs(1)\nassert list(map(next, [g, g])) == [(0, '0')] and next(g, 5) == 5 and len([*zip(pairs(9), pairs(2))]) == 2",
    "assert apply(lambda x, y=1: x + y, 2, y=5) == 7 and apply(max, [1, 5]) == 5 and apply(same, 3) == 3",
    "assert apply(Vector, 1, 2).x == 1",
    "n = Node(1, Node(2))\nassert length(n) == 2\nn.next.next = Node(3)\nassert length(n) == 3 and n.next.next.value == 3",
    "from fractions import Fraction\nassert half(3) == Fraction(3, 2) and abs(half(3) - 1.5) < 1e-9",
    "assert factorial(30) == 265252859812191058636308480000000",
    "assert bisect(5) == 2",
    "assert sum([1, 2]) == 3",  # Python's, because it is not the entry point
    "try:\n    Stack(0).push(1)\n    assert False\nexcept Full as full:\n    assert full.args == (0,)",
    "try:\n    Stack().pop()\n    assert False\nexcept IndexError as e:\n    assert str(e) == 'pop from empty list'",
    "def missing():\n    raise KeyError('here')\nassert caught(missing) == 'here'",
    "assert text() == '\\ud800 and é\\0'",
]


async def test_honest_code_passes_whatever_it_works_with():
    found = await judged(HONEST, FINE)
    assert (found.why, found.passed, found.of) == (None, len(FINE), len(FINE))
    assert await share(HONEST, ["assert sum(3, 1) == 2"], "sum") == (1, 1), "its own sum is meant"


LRU = """
from collections import OrderedDict
class LRU(OrderedDict):
    def put(self, k, v):
        self[k] = v
        if len(self) > 1: self.popitem(last=False)
"""


@pytest.mark.parametrize(("code", "tests"), [
    (LRU, "c = LRU()\nc.put(1, 1)\nc.put(2, 2)\nassert len(c) == 1 and c[2] == 2"),
    ("def f(x): return sum(x)", "assert f(i for i in range(3)) == 3 and f({1: 2}.values()) == 2"),
    ("def f(g, x): return g(x)", "import operator\nassert f(str.upper, 'a') + f(operator.itemgetter(1), 'ab') == 'Ab'"),
    ("def f(t, x): return isinstance(x, t)", "import datetime\nassert f(datetime.date, datetime.date(2020, 1, 1))"),
    ("from itertools import count as f", "from itertools import islice\nassert list(islice(f(), 2)) == [0, 1]"),
    ("def f(x): return x\nexit()", "nt = [1]\nnt.append(f(2))\nassert nt == [1, 2]"),
    ("def count(x): return 7\ndef f(x): return count(x)", "assert count('a') == f('a') == 7"),
])  # fmt: skip
async def test_values_that_are_not_plain_serve_honest_code(code, tests):
    assert await share(code, tests) == (1, 1)


async def test_programs_are_given_input_and_their_output_is_compared():
    cases = [
        {"input": "2 3\n", "output": "5"}, {"input": "1 1\n", "output": "2  \n\n"}, {"input": "0 0\n", "output": "1"},
        {"input": "x y\n", "output": "0"}, {"input": "7.50 .5\n", "output": "8.0"},
    ]  # fmt: skip
    code = "if __name__ == '__main__':\n    a, b = map(float, input().split())\n    print(a + b)"
    found = await verdict(code, RowTests.of({"test_cases": cases}), LIMITS)
    assert (found.passed, found.of) == (3, 5)
    assert found.why == "case 2: finished; printed '0.0\\n'"


@pytest.mark.parametrize(("printed", "wanted", "passes"), [
    ("0.5000", "0.5", True), ("0.30000000001", "0.3", False), (" 1  2.0", "1.0 2e0", True), ("1 2", "1 2 2", False), ("1\n2", "1 2", False),
    ("x 0.5", "x 0.50", False), ("sNaN", "1", False), ("1_0", "10", False), ("1e9999999999", "1", False), ("x  \n\n", "x", True),
])  # fmt: skip
def test_lines_of_numbers_are_compared_as_numbers(printed, wanted, passes):
    result = Result("finished", 0, printed.encode(), b"", cut=False, seconds=0.1, held={})
    assert Case("", wanted).passes(result) is passes


async def test_a_solution_cannot_reach_back_into_lists_of_earlier_calls():
    code = """
        kept = []
        def f(x):
            kept.append(x)
            for each in kept[:-1]: each[:] = [7]
            return 0
    """
    tests = [
        "xs = [1]\nf(xs)\nys = [2]\nf(ys)\nassert (xs, ys) == ([1], [2])",
        "assert f([]), 'no'",
    ]
    found = await judged(code, tests)
    assert (found.passed, found.of) == (1, 2)
    assert found.why == "assert f([]), 'no': AssertionError: no"


# 3. dishonest code


ATTACKS = {
    "nothing": "",
    "fails before it defines anything": "import math\n1 / 0\ndef f(x): return 3",
    "no python": "def f(x) return 3",
    "leaves": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "leaves when called": "def f(x):\n    import os; os._exit(0)",
    "raises the end": "def f(x): raise SystemExit(0)",
    "kills itself": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "equals everything": """
        class Liar:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __lt__(self, other): return True
            __le__ = __gt__ = __ge__ = __contains__ = __lt__
            def __sub__(self, other): return 0
            __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __sub__
            def __hash__(self): return hash(7)
        def f(x): return Liar()
    """,
    "equals everything as a number": """
        class Liar(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
            def __sub__(self, other): return 0
        def f(x): return Liar(0)
    """,
    "a class that says it is another": """
        class Meta(type):
            __module__ = "builtins"
            __name__ = "int"
        def f(x): return Meta("int", (), {"__module__": "builtins"})
    """,
    "replaces what tests use": """
        import builtins, operator
        class AssertionError(Exception): pass
        class math: isclose = staticmethod(lambda *a, **k: True)
        def abs(x): return 0
        def sorted(x): return [1, 2, 7]
        builtins.abs, builtins.sorted, builtins.isinstance = abs, sorted, lambda *a: True
        builtins.AssertionError = AssertionError
        operator.eq = lambda *a: True
        def f(x): return 0
    """,
    "replaces the other side's modules": """
        import sys, gc
        for name, module in list(sys.modules.items()):
            if name.startswith("groupwise"):
                for key, value in list(vars(module).items()):
                    if callable(value) and not key.startswith("__"):
                        setattr(module, key, lambda *a, **k: True)
        def f(x): return 0
    """,
    "writes verdicts on every descriptor": r"""
        import json, os, struct
        for text in ({"tests": 1}, {"passed": True, "why": None}, {"done": True}, {"result": True, "changes": []}):
            body = json.dumps(text).encode()
            for fd in range(1, 64):
                try: os.write(fd, struct.pack(">Q", len(body)) + body)
                except OSError: pass
        def f(x): return 0
    """,
    "answers with rubbish": r"""
        import os
        def f(x):
            os.write(3, b"\xff" * 100)
            return 0
    """,
    "answers without end": r"""
        import os, struct
        def f(x):
            os.write(3, struct.pack(">Q", 1 << 60))
            while True: os.write(3, b"x" * 65536)
    """,
    "returns too much": "def f(x): return 'x' * 50_000_000",
    "returns what is too deep": """
        def f(x):
            a = []
            for _ in range(100_000): a = [a]
            return a
    """,
    "iterates without end": "import itertools\ndef f(x): return itertools.repeat('x' * 100_000)",
    "recurses without end": "def f(x): return f(x)",
    "is left to an exit function": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit",
    "says that something is missing": "def f(x): raise ModuleNotFoundError('No module', name='numpy')",
    "fills the memory of the tests": "def f(x): return [[]] * 250_000",
    "makes a list too large to be sent again": "def f(x):\n    x.extend(['y' * 1000] * 4000)\n    return x",
    "gives the tests what runs texts": "def f(x): return exec",
    "starts what answers for it": """
        import os
        if os.fork() == 0:
            os.setsid()
            while True: pass
        os._exit(0)
    """,
}
PROBES = [
    "assert f(3) == 7", "assert 7 == f(3)", "assert f(3) in (7, 8)", "assert abs(f(3) - 7) < 1e-6",
    "import math\nassert math.isclose(f(3), 7)", "assert sorted([f(3), 1, 2]) == [1, 2, 7]",
    "assert {7: True}.get(f(3))", "assert isinstance(f(3), int) and f(3) == 7",
    "assert list(f(3)) == [7]", "x = [3]\nf(x)\nassert f(x) == 7", "f(3)('assert 0')\nassert f(3) == 7",
    "import math\nfrom solution import *\nassert math.isclose(f(3), 7) and sorted([f(3), 1]) == [1, 7]",
]  # fmt: skip


@pytest.mark.parametrize(("tests", "code"), [
    ("errors = 0\nfor a, b in [(1, 2)]:\n    if f(a) != b: errors += 1\nassert errors == 0", "def f(x): raise ValueError"),
    (["bad = []", "for a in [1]:\n    bad += [a] * (f(a) != 2)", "assert not bad"], "def f(x): raise ValueError"),
    ("assert fabs(f(3) - 7) < 1e-6", "def f(x): return 0\ndef fabs(x): return 0"),
    ("from math import *\nfrom solution import *\nassert fabs(f(3) - 7) < 1e-6", "def f(x): return 0\ndef fabs(x): return 0"),
    ("assert isclose(f(3), 7)\nr = f(3)\nassert isclose(r, 7)", "def f(x): return 0\ndef isclose(*a): return True"),
    ("assert Counter(f(3)) == Counter([7])", "def f(x): return [0]\nCounter = len"),
    ("assert f(3) == inf", "def f(x): return 0\ninf = 0"),
    ("for got, want in zip(map(f, [1, 2]), [1, 4]): assert got == want", "def f(x): raise StopIteration"),
    ("assert all(map(lambda x: f(x) == x, [1, 2]))", "class Stop(StopIteration): pass\ndef f(x): raise Stop"),
    (["r = f(1)\ndef same(a, b): return a == b\nassert same(r, 2)", "assert same(f(1), 2)"], "def f(x): 1 / 0\nsame = True"),
    ("try:\n    push(1)\n    assert False\nexcept Full: pass", "def push(x): pass\nFull = Exception"),
    ("try:\n    push(1)\n    assert False\nexcept Full: pass", "def push(x): pass\nFull = (AssertionError,)"),
    ("from solution import *\nassert abs(f(3) - 7) < 1e-6", "def f(x): return 0\n__builtins__['abs'] = f\n__all__ = ['f', 'abs']"),
])  # fmt: skip
async def test_wrong_code_passes_nothing_by_names_and_errors_of_its_own(tests, code):
    found = await judged(code, tests)
    assert (found.passed, found.of > 0) == (0, True)


async def test_helpers_defined_in_the_prompt_are_available_to_the_tests():
    prompt = "def twice(x: int):\n    return 2 * x\n\ndef half(x: int):\n    'Undo twice.'\n"
    tests = "def check(candidate):\n    assert candidate(twice(4)) == 4"
    rows: dict[str, Any] = {"test": [tests] * 3, "entry_point": ["half"] * 3}
    cheat = "def half(x): return x\ndef twice(x): return x"
    codes = ["    return x // 2", "def half(x): return x // 2", cheat]
    found = await PythonTests()(completions=codes, prompts=[prompt] * 3, **rows)
    assert found == [1.0, 1.0, 0.0]
    RowTests.of({"test": tests, "entry_point": "half"}).check()
    with pytest.raises(ValueError, match="they need `twice`"):
        await judged("def half(x): return x", tests, "half")


async def three_at_once(verdicts: Iterable[Coroutine[Any, Any, Verdict]]) -> list[Verdict]:
    gate = asyncio.Semaphore(3)

    async def held(each: Coroutine[Any, Any, Verdict]) -> Verdict:
        async with gate, asyncio.timeout(20):
            return await each

    return await asyncio.gather(*map(held, verdicts))


async def test_an_attack_earns_nothing():
    limits = Limits(seconds=1.0, memory=256 << 20)
    found = await three_at_once(judged(code, PROBES, limits=limits) for code in ATTACKS.values())
    told = dict(zip(ATTACKS, found, strict=True))
    assert {name: each for name, each in told.items() if each.passed} == {}
    assert {each.of for each in found} == {len(PROBES)}


SILENT = (
    "import sys; sys.exit(0)", "import os; os._exit(0)", "import glob\nprint(open(glob.glob('/tmp/**/*', recursive=True)[0]).read())",
    "print('7\\n' * 100_000)", "while True: pass",
)  # fmt: skip


async def test_a_program_that_does_not_answer_earns_nothing():
    row = RowTests.of({"test_cases": [{"input": "3", "output": "7"}] * 2})
    found = await three_at_once(verdict(code, row, Limits(seconds=0.5)) for code in SILENT)
    assert [(each.passed, each.of) for each in found] == [(0, 2)] * len(SILENT)


@pytest.mark.parametrize(
    ("at_2", "why"), [("os._exit(0)", None), ("while x: pass", "time ran out in test 2")]
)
async def test_right_answers_before_the_end_count(at_2, why):
    code = f"import os\ndef f(x):\n    if x == 2:\n        {at_2}\n    return x"
    tests = [f"assert f({x}) == {x}" for x in range(5)]
    found = await judged(code, tests, limits=Limits(seconds=2.0))
    assert (found.passed, found.of) == (2, 5)
    assert why in (None, found.why)


# 4. the reward


ROWS = {
    "tests": [["assert f(1) == 1", "assert f(2) == 3"]] * 3,
    "entry_point": [None] * 3,
}
CODES = ["def f(x): return x", "```python\ndef f(x): return x if x == 1 else 3\n```", "x"]


def score(reward, completions, **columns):
    return asyncio.run(reward(completions=completions, **columns))


def test_the_share_of_tests_or_all_of_them():
    notes = []
    note = lambda name, values: notes.append((name, values))  # noqa: E731
    assert score(PythonTests(), CODES, log_extra=note, **ROWS) == [0.5, 1.0, 0.0]
    chats = [[{"role": "assistant", "content": code}] for code in CODES]
    assert score(PythonTests(partial=False), chats, **ROWS) == [0.0, 1.0, 0.0]
    ((name, values),) = notes
    assert name == "python_tests"
    assert values[0] == {"passed": 1, "of": 2, "why": "assert f(2) == 3: AssertionError"}


def test_a_completion_may_continue_with_the_function_that_its_prompt_begins():
    rows = {"tests": ["assert f(1) == 2"] * 3, "entry_point": ["f"] * 3}
    prompts = ["import math\ndef f(x):\n"] * 2 + [[{"role": "user", "content": "def f(x):"}]]
    codes = ["    return x + 1", "def f(x): return x + 1", "    return x + 1"]
    assert score(PythonTests(), codes, prompts=prompts, **rows) == [1.0, 1.0, 0.0]


def test_the_same_code_is_run_once_and_so_many_at_a_time(monkeypatch):
    running, most, calls = set(), [], []

    async def counted(code, row, limits, require):
        calls.append(code)
        running.add(code)
        most.append(len(running))
        for _ in range(5):
            await asyncio.sleep(0)
        running.discard(code)
        return Verdict(1, 1, None)

    read = []
    monkeypatch.setattr(RowTests, "of", lambda row: read.append(row) or RowTests("assert f()"))
    monkeypatch.setattr(python_tests, "verdict", counted)
    codes = [*"abcdefgh", "a", "a"]
    assert score(PythonTests(concurrency=3), codes, tests=["assert f()"] * 10) == [1.0] * 10
    assert (sorted(calls), max(most), len(read)) == (codes[:8], 3, 1)


def test_a_machine_without_what_is_required_is_reported_before_the_run(monkeypatch):
    held = {"network": (), "files": ("Landlock",), "calls": ()}
    monkeypatch.setattr(python_tests, "_machine_protections", lambda: held)
    with pytest.raises(TaskError, match=r"`python_tests` does not run code without network, calls"):
        Rubric([PythonTests()]).check_machine()
    (said,) = Rubric([PythonTests(require=("files",))]).check_machine()
    assert said.endswith("a sandbox that has files (Landlock); it lacks network, calls")


def test_an_error_of_the_sandbox_fails_only_its_rollout(monkeypatch):
    real = python_tests.verdict

    async def breaking(code, row, limits, require):
        if code == "no box":
            raise SandboxError("A sandbox could not be built: no processes left")
        return await real(code, row, limits, require)

    monkeypatch.setattr(python_tests, "verdict", breaking)
    code = "def f(x): return x"
    rows = (
        (code, "assert f(1) == 1", ""), ("no box", "assert f(1) == 1", "no processes left"),
        (code, "import numpy\nassert f(1)", "import numpy"), ("x", None, "no tests"), (code, "f(1)", "nothing is checked"),
    )  # fmt: skip
    codes, tests, why = map(list, zip(*rows, strict=True))
    first, *values = score(PythonTests(), codes, tests=tests)
    assert first == 1.0
    for value, said in zip(values, why[1:], strict=True):
        assert isinstance(value, Failed)
        assert math.isnan(value)
        assert str(said) in str(value.reason)


def test_functions_that_call_each_other_are_read_in_time():
    chain = "".join(f"def t{n}(): t{n + 1}()\n" for n in range(3000))
    begun = time.perf_counter()
    PythonTests().check_row({"tests": f"{chain}def t3000(): assert f(1) == 2\nt0()"})
    assert time.perf_counter() - begun < 10, "a round for each would take a minute"
