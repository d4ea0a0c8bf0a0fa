"""Hashes of what settings name but do not hold: rows of data, weights of models, code of the user."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from executor.resolve import Job
from executor.tasks.files import FileSource
from executor.tasks.prompts import ProblemSource
from rlhfsim.provenance import content_hash

BLOCK_BYTES, BLOCKS = 4 * 2**20, 16
"""Size and number of the blocks of a file that are hashed, spread evenly: all of one of up to 64 MiB."""
PARTS = ("loss", "advantages", "sampler", "filter")
MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}


def contents(job: Job, sources: Sequence[ProblemSource]) -> dict[str, str]:
    """Part of the inputs -> hash of what it names."""
    settings = job.settings
    named = [settings.critic_model, settings.reward_model, *settings.references]
    folders = [job.model, *(folder or "" for folder in named)]
    rules = (*job.rules, *(settings.evaluation.rewards or ()))
    targets = [rule.target for rule in rules if rule.target]
    if settings.environment is not None and ":" in settings.environment.kind:
        targets.append(settings.environment.kind)
    own = [part.target for name in PARTS if (part := getattr(settings.custom, name)) is not None]
    return {
        "settings": content_hash([_of_code(target) for target in own]),
        "data": content_hash([s.content for s in sources if isinstance(s, FileSource)]),
        "model": content_hash([_of_model(Path(folder)) for folder in folders if folder]),
        "rewards": content_hash([_of_code(target) for target in targets]),
    }


def _of_model(folder: Path) -> str:
    """Names, sizes and blocks of its files; of weights that were trained on, every block is another."""
    digest = hashlib.blake2b(digest_size=16)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        if path.suffix in MODEL_FILES and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
                    file.seek(start)
                    digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _of_code(target: str) -> str:
    """Hash of the source of `module:function`, of which nothing runs here; what is not found has none."""
    sources = [path for path in _sources(target.partition(":")[0]) if path.is_file()]
    return hashlib.blake2b(sources[0].read_bytes(), digest_size=16).hexdigest() if sources else ""


def _sources(module: str) -> Iterator[Path]:
    """Where the source of a module may be, as a worker looks for it: the working directory first."""
    top, *inner = module.split(".")
    found = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if found is None or found.origin is None:
        return
    if not inner:
        yield Path(found.origin)
    for folder in found.submodule_search_locations or ():
        yield Path(folder, *inner).with_suffix(".py")
        yield Path(folder, *inner, "__init__.py")
