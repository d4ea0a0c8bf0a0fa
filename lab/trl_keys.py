"""Schemas of TRL's releases from their wheels: names and defaults of its configuration classes, never imported.

    pip download --no-deps trl==1.4.0 -d WHEELS
    python -m lab.trl_keys WHEELS SCHEMAS 1.16.0

What the classes inherit from transformers is taken from the schema of a release that was read by importing it;
`lab.framework_keys SCHEMAS` then writes the tables.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BASE = "trl/trainer/base_config.py"
CLASSES = {
    "grpo": ("trl/trainer/grpo_config.py", "GRPOConfig"),
    "rloo": ("trl/trainer/rloo_config.py", "RLOOConfig"),
    "dpo": ("trl/trainer/dpo_config.py", "DPOConfig"),
    "kto": ("trl/trainer/kto_config.py", "KTOConfig"),
    "sft": ("trl/trainer/sft_config.py", "SFTConfig"),
    "reward": ("trl/trainer/reward_config.py", "RewardConfig"),
    "async_grpo": ("trl/experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig"),
}
"""Schema -> file and class."""


def defaults_of(read: Callable[[str], str], trainer: str) -> dict[str, str]:
    """Field -> default, in words, of a trainer's class and its bases within TRL."""
    file, name = CLASSES[trainer]
    bodies = (ast.parse(read(path)).body for path in (file, BASE))
    known = {node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)}
    return _fields(name, known)


def _fields(name: str, known: Mapping[str, ast.ClassDef]) -> dict[str, str]:
    if name not in known:
        return {}
    found: dict[str, str] = {}
    for base in known[name].bases:
        found |= _fields(ast.unparse(base).rpartition(".")[2], known)
    for node in known[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _default(node.value)
    return {field: value for field, value in found.items() if not field.startswith("_")}


def _default(node: ast.expr | None) -> str:
    """A default as `str` shows it; None where a factory makes it, as in schemas that are read by importing."""
    if isinstance(node, ast.Call):
        node = {keyword.arg: keyword.value for keyword in node.keywords}.get("default")
    try:
        return str(None if node is None else ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node) if node else "None"


def schema(
    read: Callable[[str], str], trainer: str, whole: Mapping[str, Any], own: set[str]
) -> dict[str, Any]:
    """Keys of one release: its own fields, and those that another release (`whole`, `own` its own) inherits."""
    inherited = {key: value for key, value in whole.items() if key not in own}
    return inherited | defaults_of(read, trainer)


def main() -> None:
    """Write `trl_RELEASE_TRAINER.json` of every wheel of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("recorded", help="release whose schemas are in the folder, as 1.16.0; its wheel too")
    asked = parser.parse_args()
    releases = {path.name.split("-")[1]: zipfile.ZipFile(path) for path in asked.wheels.glob("trl-*.whl")}
    for trainer in CLASSES:
        reads = {
            release: lambda name, wheel=wheel: wheel.read(name).decode()
            for release, wheel in releases.items()
        }
        whole = json.loads((asked.schemas / f"trl_{asked.recorded}_{trainer}.json").read_text())
        own = set(defaults_of(reads[asked.recorded], trainer))
        for release in sorted(reads.keys() - {asked.recorded}):
            found = schema(reads[release], trainer, whole, own)
            (asked.schemas / f"trl_{release}_{trainer}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
