"""Everything that a check needs and a machine with torch and transformers lacks, in one archive.

Checks and their code (`FOLDERS`), and under `site/` the wheels of `WANTED` with what they require, for the
Python of that machine. Versions are those of this environment. What has no wheel (DeepSpeed) is built from its
sources, without compiled operators. Packages of `LIKELY` are not carried.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import requires, version
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB, MIB = 64.0, 2**20
PRESET = 3
"""Ray takes half a minute so, and a few per cent more than with 6."""
File = tuple[str, bytes]
"""Its name in the archive and what it holds."""
LIKELY = (
    *("torch", "transformers", "numpy", "pyyaml", "jinja2", "tqdm", "packaging", "filelock", "fsspec"),
    *("huggingface-hub", "safetensors", "tokenizers", "regex", "setuptools", "typing-extensions"),
)
"""What machines for deep learning have: torch, transformers and what both require (docs/gpu.md)."""
WANTED = (
    *("pydantic", "blake3", "simpy", "psutil", "click", "rich", "scipy", "deepspeed"),
    *("pytest", "pytest-xdist", "pytest-timeout", "accelerate", "ray"),
)
"""In this order, as far as they fit."""
UNUSED = (
    "ray/jars/",
    "ray/cpp/",
    "ray/rllib/",
    "ray/dashboard/client/",
    "ray/serve/",
    "ray/data/",
    "ray/llm/",
    *(f"scipy/{part}/" for part in ("integrate", "interpolate", "io", "ndimage", "signal", "stats")),
)
"""Parts of a wheel that no check imports."""
FOLDERS = ("lab", "executor", "rlhfsim", "hardware_profiles", "tests/executor")
FILES = ("pyproject.toml", "reports/accuracy.json")
KINDS = (".py", ".yaml", ".json", ".csv", ".jsonl", ".html", ".css", ".js", ".txt", ".toml", ".typed")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


def pack(archive: Path, python: str, limit_mib: float = LIMIT_MIB) -> list[str]:
    """Write the archive; lines that say what is in it and what was left out.

    Raises:
        SystemExit: not even the code fits.
    """
    code, lines, carried = _packed(_code()), list[str](), set[str]()
    parts, room = [code], limit_mib - len(code) / MIB
    if room < 0:
        raise SystemExit(f"the code alone takes {len(code) / MIB:.1f} MiB, more than {limit_mib:g}")
    with TemporaryDirectory() as folder:
        for wanted in WANTED:
            names = [name for name in closure(wanted) if name not in carried]
            part = _packed(file for name in names for file in _unpacked(wheel(name, python, Path(folder))))
            if len(part) / MIB > room:
                lines.append(f"left out, {len(part) / MIB:.1f} MiB: {wanted}")
                continue
            lines.append(
                f"{len(part) / MIB:5.1f} MiB {', '.join(f'{name} {version(name)}' for name in names)}"
            )
            parts, room, carried = [*parts, part], room - len(part) / MIB, carried | set(names)
    archive.write_bytes(b"".join([*parts, lzma.compress(bytes(tarfile.RECORDSIZE))]))
    there = f"taken to be there: {', '.join(LIKELY)}"
    return [*lines, there, f"{archive}: {archive.stat().st_size / MIB:.1f} MiB of {limit_mib:g}"]


def closure(name: str) -> list[str]:
    """A package with all that it requires, without `LIKELY`, in order of names."""
    found, left = set[str](), [name]
    while left:
        current = left.pop().lower().replace("_", "-")
        if current not in found and current not in LIKELY:
            found.add(current)
            asked = map(Requirement, requires(current) or ())
            left += [r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    return sorted(found)


def wheel(name: str, python: str, folder: Path) -> Path:
    """The wheel of a package as it is installed here, for another Python; built where none is published."""
    into = folder / name
    if not into.is_dir():
        into.mkdir()
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        exact = f"{name}=={version(name)}"
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        there = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
        fetched = [*pip, "download", "--no-deps", *there, "-d", str(into), exact]
        if subprocess.run(fetched, capture_output=True, check=False).returncode:
            built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(into), exact]
            subprocess.run(built, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    return next(into.glob("*.whl"))


def _packed(files: Iterable[File]) -> bytes:
    """A piece of a tar.xz: pieces after each other, and zeros, are one."""
    piece = bytearray()
    for name, content in files:
        entry = tarfile.TarInfo(f"first-contact/{name}")
        entry.size, entry.mode = len(content), 0o755
        piece += entry.tobuf() + content + bytes(-len(content) % tarfile.BLOCKSIZE)
    return lzma.compress(piece, preset=PRESET)


def _code() -> Iterator[File]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in KINDS and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path.read_bytes()
    for name in FILES:
        yield name, (ROOT / name).read_bytes()


def _unpacked(path: Path) -> Iterator[File]:
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            if not name.endswith("/") and not name.startswith(UNUSED):
                inside = name.split(".data/purelib/")[-1].split(".data/platlib/")[-1]
                yield f"site/{inside}", file.read(name)
