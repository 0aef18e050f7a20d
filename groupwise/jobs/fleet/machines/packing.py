"""Groupwise itself as a wheel, packed from this installation, so that a machine runs exactly the code of its control plane.

No package index is used: a package of our name there may not be ours. Nor is anything built: the wheel of a pure Python package is its
files, the metadata of its installation and a list of both, and these exist here whether it was installed from a wheel or from a source
tree. Equal files make equal bytes, so the name of an environment changes with the code and not with the date.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from groupwise.core.errors import UsageError

NAME = "groupwise"
PACKAGE = Path(__file__).parents[3]
"""The folder of the running code."""
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
METADATA = ("METADATA", "entry_points.txt")
WHEEL = "Wheel-Version: 1.0\nGenerator: groupwise\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can represent."""
PLAIN_FILE = 0o100644 << 16


@dataclass(frozen=True, slots=True)
class Packed:
    """A wheel, in memory: a few megabytes."""

    version: str
    data: bytes

    @property
    def file_name(self) -> str:
        """The wheel's file name."""
        return f"{NAME}-{self.version}-py3-none-any.whl"

    @property
    def sha256(self) -> str:
        """Hash of the whole file."""
        return hashlib.sha256(self.data).hexdigest()


def pack() -> Packed:
    """Pack the running code as a wheel. Raises UsageError if it is not installed, or its metadata belong to another release."""
    package = installation()
    if package.version != version():
        raise UsageError(
            f"the code here is groupwise {version()}, and its metadata say {package.version}: it was updated in place. "
            "Install it again (`pip install -e .` in its folder), so that both fit together."
        )
    info = f"{NAME}-{package.version}.dist-info"
    files = {f"{info}/WHEEL": WHEEL.encode()}
    for path in PACKAGE.rglob("*"):
        relative_path = path.relative_to(PACKAGE)
        is_hidden = any(
            part.startswith(".") or part == "__pycache__" for part in relative_path.parts
        )
        if path.is_file() and not is_hidden:
            files[f"{NAME}/{relative_path.as_posix()}"] = path.read_bytes()
    for name in METADATA:
        text = package.read_text(name)
        if text is not None:
            files[f"{info}/{name}"] = text.encode()
    lines: list[str] = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    record = f"{info}/RECORD"
    files[record] = ("\n".join([*lines, f"{record},,"]) + "\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, PLAIN_FILE
            archive.writestr(entry, files[name])
    return Packed(package.version, buffer.getvalue())


def version() -> str:
    """Version of the running code, read from its source."""
    match = VERSION.search((PACKAGE / "__init__.py").read_text("utf-8"))
    assert match is not None, f"{PACKAGE}/__init__.py says no version"
    return match[1]


def installation() -> Distribution:
    """The interpreter's metadata of groupwise. Raises UsageError if it is not installed."""
    try:
        return distribution(NAME)
    except PackageNotFoundError:
        raise UsageError(
            "groupwise runs here without being installed, so its requirements are unknown: `pip install -e .` in its folder installs it."
        ) from None
