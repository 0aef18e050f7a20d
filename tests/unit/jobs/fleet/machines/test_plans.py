"""What is asked for becomes a plan with a name, or is refused in words."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.machines import plans
from groupwise.jobs.fleet.machines.locks import Lock
from groupwise.jobs.fleet.machines.packing import Packed
from groupwise.jobs.fleet.machines.plans import PrepareOptions, plan_of

PACKED = Packed("1.0", b"a wheel")
LOCK = Lock(("six==1.17.0",))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is packed, and the installation of the tests is not read."""
    monkeypatch.setattr(plans, "pack", lambda: PACKED)
    monkeypatch.setattr(plans, "lock_of_this_installation", lambda *_: LOCK)


def wheel(folder: Path, name: str = "own-1.0-py3-none-any.whl", content: str = "x") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(content)
    return path


def test_the_same_has_the_same_name_and_anything_else_another(tmp_path: Path) -> None:
    own = wheel(tmp_path / "a")
    plan = plan_of(PrepareOptions())
    names = {
        plan.name, dataclasses.replace(plan, lock=Lock(("six==1.16.0",))).name,
        dataclasses.replace(plan, packed=Packed("1.0", b"another")).name, dataclasses.replace(plan, wheels=(own,)).name,
        dataclasses.replace(plan, wheelhouse=(own,)).name, dataclasses.replace(plan, pythons=("python3.12",)).name,
        dataclasses.replace(plan, index_url="https://x/simple").name,
    }  # fmt: skip
    assert len(names) == 7
    assert plan_of(PrepareOptions()).name == plan.name
    assert len(plan.name) == 20
    other = wheel(tmp_path / "b", content="y")
    one, two = (dataclasses.replace(plan, wheels=(path,)).name for path in (own, other))
    assert one != two


def test_secrets_are_in_neither_name_nor_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_INDEX", "https://me:hush@index/simple")
    plan = plan_of(PrepareOptions(secrets={"PIP_INDEX_URL": "env:MY_INDEX"}))
    assert plan.secrets == {"PIP_INDEX_URL": "https://me:hush@index/simple"}
    assert plan.name == plan_of(PrepareOptions()).name
    assert "hush" not in f"{plan!r} {plan.order('/x')}"
    assert plan.order("/x")["secrets"] == ["PIP_INDEX_URL"]


@pytest.mark.parametrize(("asked", "why"), [
    ({"lock": Path("x"), "extras": ["train"]}, "--extra and --with are for a lock"),
    ({"wheelhouse": Path("x"), "index_url": "https://x"}, "have no effect"),
    ({"index_url": "https://me:hush@x/simple"}, "--secret PIP_INDEX_URL=env:NAME"),
    ({"extra_index_urls": ["https://hush@x/simple"]}, "--secret PIP_INDEX_URL=env:NAME"),
    ({"index_url": "pypi.org"}, "the address of a package index is expected"),
    ({"index_url": "https://a/b c"}, "the address of a package index is expected"), ({"index_url": "https://[/"}, "this is not an address"),
    ({"index_url": "https://x", "environment": {"PIP_INDEX_URL": "y"}}, "give one"), ({"python": "bin/python"}, "its whole path"),
    ({"python": "--version"}, "its whole path"), ({"python": ""}, "its whole path"), ({"python": "/a\0b"}, "NUL"),
    ({"environment": {"LD_PRELOAD": "x"}}, "not for jobs to set"), ({"environment": {"A": "x\0y"}}, "NUL"),
    ({"wheels": [Path("/nowhere/own-1-py3-none-any.whl")]}, "there is no such file"),
    ({"wheelhouse": Path("/nowhere")}, "there is no such folder"),
    ({"secrets": {"PIP_INDEX_URL": "env:THAT_NOBODY_SET"}}, "no text that can be read"),
    ({"secrets": {"PIP_INDEX_URL": "env:*"}}, "no pattern"),
])  # fmt: skip
def test_invalid_prepare_options_are_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(PrepareOptions(**asked))
    assert why in str(refused.value)
    assert "hush" not in str(refused.value)
