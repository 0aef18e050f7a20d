"""Collects in `build/vllm` a vLLM for a machine with a GPU and no package index: `make gpu-bundle VLLM=1`.

vLLM's wheel has 244 MB, because it holds machine code for many GPUs. Here only that for one architecture stays, and of its dependencies
what serving text needs and an image with torch, transformers and their usual company lacks. The result is a few files that together are
a `tar.xz`; on the other machine

    cat build/vllm/part* | tar -xJ -C /tmp
    GROUPWISE_VLLM_PYTHON=/tmp/vllm/bin/python make gpu WHEELS=build/gpu PYTHON=python3.12

where `VLLM_BASE_PYTHON` names the Python with torch, if it is not `python3`. FlashAttention 2, FlashMLA, DeepGEMM, flashinfer and
bitsandbytes are left out. So reduced, it was seen to compute, sleep and wake on an H200 with torch 2.11.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "vllm"
RELEASE = "0.20.0"
"""Made for torch 2.11."""
NEEDED = """
    annotated-types==0.8.0 anthropic==0.125.0 apache-tvm-ffi==0.1.9 astor==0.8.1 blake3==1.0.8 cachetools==7.2.0 cbor2==5.9.0
    compressed-tensors==0.15.0.1 depyf==0.20.0 dill==0.4.1 diskcache==5.6.3 distro==1.9.0 dnspython==2.8.0 docstring_parser==0.18.0
    email-validator==2.3.0 fastapi==0.136.3 gguf==0.19.0 httptools==0.8.0 httpx-sse==0.4.3 ijson==3.5.0 importlib-metadata==8.7.1
    interegular==0.3.3 jiter==0.17.0 jmespath==1.1.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2
    llguidance==1.3.0 lm-format-enforcer==0.11.3 loguru==0.7.3 mcp==1.30.0 mistral_common==1.12.0
    model-hosting-container-standards==0.1.15 msgspec==0.22.0 openai==2.54.0 openai-harmony==0.0.8 opentelemetry-api==1.41.1
    opentelemetry-sdk==1.41.1 opentelemetry-semantic-conventions==0.62b1 outlines_core==0.2.14 partial-json-parser==0.2.1.1.post7
    prometheus-fastapi-instrumentator==7.1.0 pybase64==1.4.3 pycountry==26.2.16 pydantic==2.13.5 pydantic_core==2.46.5
    pydantic-extra-types==2.11.1 pydantic-settings==2.15.0 PyJWT==2.15.1 python-dotenv==1.2.4 python-json-logger==4.2.0
    python-multipart==0.0.32 pyzmq==27.2.0 referencing==0.37.0 rpds-py==2026.6.3 setproctitle==1.3.7 sniffio==1.3.1
    sse-starlette==3.3.4 starlette==0.52.1 supervisor==4.3.0 typing-inspection==0.4.4 uvicorn==0.46.0 watchfiles==1.2.0
    websockets==16.1.1 xgrammar==0.2.1
"""
"""What serving text imports, beside what images with torch and transformers have."""
LEFT_OUT = re.compile(
    r"vllm/(vllm_flash_attn/_vllm_fa2_C|_flashmla\w*_C|third_party/deep_gemm/)|xgrammar/(lib|include)/"
    r"|pycountry/locales/|mistral_common/data/|\.data/|.*\.(pyi|jpg|js|css)$"
)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (35, 28, 27, 26, 24, 17, 5)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)
PART_BYTES = 44_000_000
"""Such machines are often reached by what carries little more than the checkout."""
PYTHON = """\
#!/bin/sh
# A Python with vLLM: what starts a server of its own drops PYTHONPATH, so it is set here.
here=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
export PYTHONPATH="$here" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
exec "${VLLM_BASE_PYTHON:-python3}" "$@"
"""
CONTAINER, MACHINE_CODE, PTX = 0xBA55ED50, 2, 1
"""Of NVIDIA's container for machine code, which has no documentation: its first word, and the kinds of its entries."""


def main() -> int:
    """Download, reduce, pack, say what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of the Python that is there")
    parser.add_argument("--architecture", type=int, default=90, help="of its GPU: 90 is Hopper's")
    given = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheels, site = FOLDER / "wheels", FOLDER / "vllm"
    download(wheels, given.python)
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as packed:
            members = [name for name in packed.namelist() if not LEFT_OUT.search(name)]
            packed.extractall(site, members)
    for library in (site / "vllm").rglob("*.so"):
        library.write_bytes(reduced(library.read_bytes(), given.architecture))
    (site / "bin").mkdir()
    python = site / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    whole = FOLDER / "whole.tar.xz"
    with tarfile.open(whole, "w:xz", preset=6) as archive:
        archive.add(site, "vllm")
    parts = split(whole)
    for unneeded in (wheels, site):
        shutil.rmtree(unneeded)
    sizes = ", ".join(f"{part.stat().st_size / 1e6:.1f}" for part in parts)
    print(f"{FOLDER.relative_to(ROOT)}: vLLM {RELEASE} in {len(parts)} parts of {sizes} MB")
    return 0


def download(folder: Path, python: str) -> None:
    """The wheels for that Python, whatever runs here."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", python, "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, f"vllm=={RELEASE}", *NEEDED.split()], cwd=ROOT, check=True)


def reduced(library: bytes, architecture: int) -> bytes:
    """The library with machine code for one architecture; where there is none, with the newest PTX that the driver can translate.

    Containers stay in their places. What is kept moves to the beginning of its container; the rest is zeros, which packing removes. A
    container of which nothing would stay keeps its smallest entry, which no such GPU runs, for it must not be empty.
    """
    result = bytearray(library)
    for start, size in containers(library):
        entries = [*entries_of(library, start, size)]
        fitting = [
            code for kind, number, code in entries if (kind, number) == (MACHINE_CODE, architecture)
        ]
        if not fitting:
            texts = [
                (number, code)
                for kind, number, code in entries
                if kind == PTX and number <= architecture
            ]
            fitting = [max(texts)[1]] if texts else [min((code for *_, code in entries), key=len)]
        kept = b"".join(fitting)
        result[start : start + size] = kept + bytes(size - len(kept))
        struct.pack_into("<Q", result, start - 8, len(kept))
    return bytes(result)


def containers(library: bytes) -> Iterator[tuple[int, int]]:
    """Where the entries of each container begin, and how many bytes they are; before them is its header: a word, release, length, size."""
    place, word = -1, struct.pack("<I", CONTAINER)
    while (place := library.find(word, place + 1)) >= 0:
        _, header, size = struct.unpack_from("<HHQ", library, place + 4)
        if header == 16 and size < len(library) - place:
            yield place + header, size


def entries_of(library: bytes, start: int, size: int) -> Iterator[tuple[int, int, bytes]]:
    """Kind, architecture and bytes of each entry of a container, its header included."""
    place = start
    while place < start + size:
        kind, _, header, payload = struct.unpack_from("<HHIQ", library, place)
        (architecture,) = struct.unpack_from("<I", library, place + 28)
        yield kind, architecture, library[place : place + header + payload]
        place += header + payload


def split(whole: Path) -> list[Path]:
    """The archive as files of at most `PART_BYTES`."""
    data, parts = whole.read_bytes(), list[Path]()
    for begin in range(0, len(data), PART_BYTES):
        parts.append(FOLDER / f"part{len(parts) + 1}")
        parts[-1].write_bytes(data[begin : begin + PART_BYTES])
    whole.unlink()
    return parts


if __name__ == "__main__":
    sys.exit(main())
