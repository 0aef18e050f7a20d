import ast
import pickle
from pathlib import Path

from groupwise.api.schemas.problems import KINDS, FieldError, Problem, Refusal

ROOT = Path(__file__).resolve().parents[4]


def test_a_refusal_becomes_problem_json_and_comes_back() -> None:
    refusal = Refusal("too_busy", "9 groups wait", retry_after=1.2)
    problem = refusal.problem("/completions")
    assert refusal.headers == {"Retry-After": "2"}
    assert (problem.type, problem.status) == ("urn:groupwise:problem:too_busy", 429)
    assert Problem.model_validate_json(problem.model_dump_json()) == problem


def test_refusals_cross_processes() -> None:
    refusal = Refusal("invalid_request", errors=[FieldError(field="a", message="b")])
    again = pickle.loads(pickle.dumps(refusal))
    assert again.problem() == refusal.problem()


def test_every_code_that_is_raised_stands_in_the_table() -> None:
    used = {
        node.args[0].value
        for path in (ROOT / "groupwise").rglob("*.py")
        if path.parent.name != "runner"  # it stands alone, with refusals of its own
        and "Refusal(" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "Refusal" and node.args and isinstance(node.args[0], ast.Constant)
    }
    assert used - set(KINDS) == set()
