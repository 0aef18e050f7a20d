"""Locks: made from an invented installation, and read from files."""

import json
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import groupwise
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.machines.locks import (
    lock_of_this_installation,
    parse_lock,
    read_lock,
)

HASH = "sha256:" + "0" * 64


class Site:
    """Distributions that are installed, as far as anybody may see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str,
        version: str = "1.0",
        *needs: str,
        extras: tuple[str, ...] = (),
        origin: object = None,
    ) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {need}" for need in needs]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if origin is not None:
            (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    made = Site(folder)

    def distributions(cls: object, **wanted: str) -> Iterator[Distribution]:
        name = wanted["name"].replace("-", "_")
        yield from (Distribution.at(path) for path in folder.glob(f"{name}-*.dist-info"))

    monkeypatch.setattr(Distribution, "discover", classmethod(distributions))
    return made


def lines(extras: tuple[str, ...] = ("train",), *also: str, without: set[str] | None = None):
    return list(lock_of_this_installation(extras, also, without or set()).lines)


def test_all_that_is_needed_and_nothing_else(site: Site) -> None:
    needs = ("rich>=1", 'torch<3; extra == "train"', 'fastapi; extra == "server"')
    site.add("groupwise", "0.1.0", *needs, extras=("train", "server"))
    site.add("rich", "15.0", "markdown-it-py>=2", 'docs-only; extra == "docs"')
    site.add("markdown-it-py", "4.0", 'mdurl ; python_version >= "3"')
    site.add("mdurl", "0.1")
    site.add("docs-only")
    site.add("torch", "2.13.0+cpu")
    site.add("fastapi")
    site.add("stranger")
    pins = ["markdown-it-py==4.0", "mdurl==0.1", "rich==15.0"]
    assert lines(("train",)) == [*pins, "torch==2.13.0"]
    assert lines(("train", "server")) == ["fastapi==1.0", *pins, "torch==2.13.0"]
    assert "stranger==1.0" in lines(("train",), "stranger")


# Files


def test_a_lock_is_read_as_pip_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "lock.txt"
    file.write_text(
        "# made by somebody\n"
        "six==1.17.0 \\\n"
        f"    --hash={HASH} \\\n"
        f"    --hash={HASH}\n"
        "    # via dateutil\n"
        f"Tomli == 2.0 ; python_version < '3.11' --hash={HASH}\n"
        f"a[x,y] === 1.0+cpu --hash {HASH}  # a note\n"
    )
    lock = read_lock(file)
    assert lock.hashed
    assert lock.lines == (
        f"six==1.17.0 --hash={HASH} --hash={HASH}",
        f"Tomli== 2.0 ; python_version < '3.11' --hash={HASH}",
        f"a[x,y]=== 1.0+cpu --hash={HASH}",
    )


def test_groupwise_in_a_lock_is_left_to_the_wheel() -> None:
    tree = Path(groupwise.__file__).parent.parent
    text = (
        "groupwise==0.0.1\n"
        f"-e {tree}\n"
        "-e git+ssh://git@host/x@abc#egg=groupwise\n"
        "groupwise @ file:///x\n"
        "Own_Thing==1\n"
        "six==1\n"
    )
    assert parse_lock(text, "l", {"own-thing"}).lines == ("six==1",)


def test_lock_lines_without_one_exact_release_are_refused() -> None:
    one = "each line of a lock names one release"
    for line, why in (
        *((each, one) for each in ("six>=1", "six", "six==1.*", "./six.whl")),
        ("six @ file:///tmp/six", one),
        ("--index-url https://x", "options are not read from a lock"),
        ("-r other.txt", "options are not read from a lock"),
        ("-e /home/me/own", "--wheel"),
        ("six==1 --hash=md5:abc", "--hash=sha256"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            parse_lock(f"# first\n{line}\n", "lock.txt")
        assert "lock.txt:2" in str(refused.value)
    with pytest.raises(UsageError, match="some lines have hashes"):
        parse_lock(f"a==1 --hash={HASH}\nb==2\n", "l")
