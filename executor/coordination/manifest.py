"""Size and SHA-256 of each file of a folder, and whether they still agree."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import read_text

MANIFEST, MANIFEST_SCHEMA = "manifest.json", "rlhfsim.checkpoint/1"
_THREADS = 4
"""That hash and sync files."""


def write_manifest(folder: Path) -> None:
    """Sync all files and folders to disk, then write the manifest, then sync that."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing and syncing release the interpreter lock
        entries = list(pool.map(_sealed, paths))
    files = {p.relative_to(folder).as_posix(): entry for p, entry in zip(paths, entries, strict=True)}
    for inner in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync(inner)
    write_synced(folder / MANIFEST, json.dumps({"schema": MANIFEST_SCHEMA, "files": files}, indent=1) + "\n")
    sync(folder)


def problems(folder: Path, *, contents: bool = True) -> list[str]:
    """What is wrong with a folder, one line each; empty: whole. Without `contents` only by size."""
    if not (folder / MANIFEST).exists():
        return [f"{MANIFEST} is missing"]
    try:
        manifest = json.loads(read_text(folder / MANIFEST))
        files: dict[str, dict[str, Any]] = dict(manifest["files"])
        entries = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except RlhfsimError as error:
        return [f"{MANIFEST}: {error.message}"]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = pool.map(lambda name: _problem(folder, name, *entries[name], contents), entries)
        return [problem for problem in faults if problem]


def _problem(folder: Path, name: str, size: int, digest: str, contents: bool) -> str | None:
    path = folder / name
    try:
        actual = path.stat().st_size
        if actual != size:
            return f"{name} has {actual:,} bytes, not {size:,}"
        return f"{name} has another checksum" if contents and _digest(path) != digest else None
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {(error.strerror or 'error').lower()}"


def _sealed(path: Path) -> dict[str, Any]:
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
