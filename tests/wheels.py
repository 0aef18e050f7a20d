"""Small wheels with one line of code, for a real pip that uses no index."""

import base64
import hashlib
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

from groupwise.jobs.fleet.machines.locks import normal


def make_wheel(folder: Path, name: str, release: str, *needs: str) -> Path:
    """A wheel with one module of one line."""
    module, stem = name.replace("-", "_"), f"{name.replace('-', '_')}-{release}"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    info = f"{stem}.dist-info"
    files = {
        f"{module}_of_a_test.py": f"RELEASE = {release!r}\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def fill_wheelhouse(folder: Path) -> Path:
    """Write wheels with the names and releases of groupwise's own dependencies, and two others."""
    folder.mkdir()
    for need in distribution("groupwise").requires or ():
        if "extra ==" not in need:
            name = need.split("<")[0].split(">")[0]
            make_wheel(folder, name, version(name))
    make_wheel(folder, "needed-below", "2.0")
    make_wheel(folder, "own-thing", "1.0", "needed-below>=2")
    return folder


def lock_of(wheelhouse: Path, *, hashes: bool) -> Path:
    lines: list[str] = []
    for wheel in sorted(wheelhouse.glob("*.whl")):
        name, release = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{normal(name)}=={release}" + (f" --hash=sha256:{digest}" if hashes else ""))
    lock = wheelhouse.parent / "lock.txt"
    lock.write_text("\n".join(lines) + "\n")
    return lock
