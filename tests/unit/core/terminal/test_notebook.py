"""What is shown in a notebook: HTML where a kernel draws it, text elsewhere, and nothing of a stranger as markup."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from groupwise.core.errors import UsageError
from groupwise.core.terminal.notebook import Table, one_output, show, shown_while
from tests.processes import wait_until


class Kernel:
    """Stands for `IPython.display`."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def HTML(self, source: str) -> str:
        return source

    def display(self, source: str, *, display_id: bool = False) -> SimpleNamespace:
        self.shown.append(source)
        place = len(self.shown) - 1
        return SimpleNamespace(update=lambda other: self.shown.__setitem__(place, other))


@pytest.fixture
def kernel(monkeypatch):
    """A shell with a kernel."""
    module, display = ModuleType("IPython"), Kernel()
    vars(module)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return display


TABLE = Table("Facts", [("model", "tiny"), ("said", "<b>\x1b[31mno\nyes")])


@pytest.mark.parametrize("shell", [SimpleNamespace, lambda: None])
def test_a_table_is_text_where_nothing_draws(capsys, monkeypatch, shell):
    module = ModuleType("IPython")
    vars(module)["get_ipython"] = shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    show(TABLE)
    assert capsys.readouterr().out == "Facts\n  model  tiny\n  said   <b>␛[31mno⏎yes\n"
    assert str(Table("", [("1", "2")], ("one", "two"))) == "  one  two\n  1    2"
    assert str(Table("None", [])) == "None"
    assert UsageError("Give a list.")._render_traceback_() == ["UsageError: Give a list."]


def test_a_table_is_html_in_a_kernel_and_what_it_holds_is_not(kernel, capsys):
    show(TABLE)
    [shown] = kernel.shown
    assert "&lt;b&gt;␛[31mno\nyes" in shown
    assert "<b>" not in shown
    assert "Facts" in shown
    assert capsys.readouterr().out == ""


def test_the_time_of_long_work_stands_where_its_result_will_be(kernel):
    with one_output():
        with shown_while("evaluating <x>"):
            wait_until(lambda: kernel.shown, "a drawing")
            assert "evaluating &lt;x&gt; · 0 s elapsed" in kernel.shown[0]
        show(TABLE)
    [shown] = kernel.shown
    assert "Facts" in shown
    assert "elapsed" not in shown


def test_outside_a_kernel_long_work_says_nothing(capsys):
    with shown_while("evaluating"):
        pass
    assert capsys.readouterr() == ("", "")
