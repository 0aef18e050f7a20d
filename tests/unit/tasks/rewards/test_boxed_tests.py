"""What counts as a test, and which names come from the solution; how they run is tested with the reward itself."""

import ast

import pytest

from groupwise.tasks.rewards.boxed_tests import BrokenTests, Plan


def plan(tests, entry_point=None) -> Plan:
    return Plan.of(tests, entry_point)


def texts(tests, entry_point=None) -> list[str]:
    return [step.text for step in plan(tests, entry_point).tests]


@pytest.mark.parametrize(("text", "entry_point", "found"), [
    ("assert f(1)\nx = 1\nassert f(x)", None, ["assert f(1)", "assert f(x)"]),
    ("def test_a():\n    assert f(1)\ntest_b = 3", None, ["test_a()"]),
    ("def helper():\n    assert f(1)\nhelper()", None, ["helper()"]),
    ("def a(x): assert x\ndef b(x): a(x)\nfor y in f(1): b(y)", None, ["for y in f(1): b(y)"]),
    ("import unittest\nt = unittest.TestCase()\nt.assertEqual(f(1))", None, ["t.assertEqual(f(1))"]),
    ("def check(c): assert c(1)", "f", ["check(f)"]), ("def check(c): assert c(1)\ncheck(f)", None, ["check(f)"]),
    ("def check(c): pass\ncheck(f)\nassert f(1)", "f", ["assert f(1)"]),
    ("try:\n    f(1)\n    assert 0\nexcept E:\n    pass", None, [...]),
    ("for x in a:\n    assert f(x)", None, ["for x in a:\n    assert f(x)"]),
    ("if f(1) != 1:\n    raise E", None, [...]),
    (["assert a", "assert b\nassert c"], None, ["assert a", "assert b\nassert c"]),
    (["x = 1", "assert x"], None, ["assert x"]), (["random.seed(0)", "assert f(1)"], None, ["assert f(1)"]),
    (["def test_a(): assert f(1)"], None, ["def test_a():\n    assert f(1)\ntest_a()"]),
])  # fmt: skip
def test_tests_are_found(text, entry_point, found):
    wanted = [text if each is ... else each for each in found]
    assert texts(text, entry_point) == [_plainly(each) for each in wanted]


def _plainly(text: str) -> str:
    return ast.unparse(ast.parse(text))


@pytest.mark.parametrize(("tests", "problem"), [
    ("assert f(", "the tests are not Python"), ("x = '\0'", "the tests are not Python"),
    ("def check(candidate): assert candidate(1)", "no entry_point"),
    ("def test_a(tmp_path): assert f(1)", "test_a takes arguments"),
    ("def test_a(x=1, *, y=2, **z): pass\ndef test_b(x, y=1): pass", "test_b takes arguments"),
    ("import unittest\nclass T(unittest.TestCase): pass", "classes of unittest"),
    ("def test_c(*, tmp_path): pass", "test_c takes arguments"), ("def run(): assert f(1)", "nothing is checked"),
    ("if False:\n    assert f(1)", "nothing is checked"), ("assert (f(1) == 2, 'no')", "nothing is checked"),
    ("assert True", "nothing is checked"), ("g = lambda: run()\ndef run(): assert f(1)", "nothing is checked"),
    (["f(1)", "f(2)"], "nothing is checked"), ("def test_a(): f(1) == 2", "test_a checks nothing"),
    (["def test_a(): assert f(1)", "def test_b(): print(f(1))"], "test_b checks nothing"),
    ("f(1) == 2\nassert f(2)", "no assert before `f\\(1\\) == 2`"),
    ("assert_equal(f(1), 2)", "need `assert_equal`"), ("assert is_equal(f(1), 2)", "need `is_equal`"),
    ("assert almost_equal(r, f(1))", "need `almost_equal`"), ("assert x and not differ(f(1), 2)", "need `differ`"),
    ("assert same(f(1), 2) is True", "need `same`"),
    ("np.testing.assert_allclose(f(1), 2)", "need `np`"), ("assert np.all(f(1) == x)", "need `np`"),
    ("import numpy\nassert f(1)", "import numpy"), ("def g():\n    from numpy import a\nassert f(1)", "import numpy"),
    (["import math", "assert f("], "the tests are not Python"), (["import math"], "nothing is checked"),
])  # fmt: skip
def test_tests_that_would_pass_without_running_are_refused(tests, problem):
    with pytest.raises(BrokenTests, match=problem):
        plan(tests)


def test_names_are_the_solutions_unless_they_serve_as_modules():
    read = plan("assert math.isclose(f(copy), copy.copy(x)) and g.h(bisect(1)) == 3")
    assert read.names == {"f", "x", "g", "bisect"}
    assert read.modules == {"math", "copy"}
    assert plan("assert entry(f(1))\ndef f(x): return x", "entry").names == {"entry"}
    assert plan("assert isclose(1, 2) is False").names == {"isclose"}, "it is what is tested"
    optional = "try:\n    import numpy\nexcept ImportError: pass\nassert isclose(f(1), 2)"
    assert plan(optional).library == {"isclose": "math"}
    assert plan("from unittest import TestCase\nTestCase().assertEqual(f(1), 2)").names == {"f"}
    assert plan("assert product([1]) == 1 and f(1)").names == {"product", "f"}, (
        "named as another is"
    )
