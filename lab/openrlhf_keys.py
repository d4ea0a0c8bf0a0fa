"""Schemas of OpenRLHF's trainers of given data from its wheels: flags and defaults of their parsers, never imported.

    pip download --no-deps openrlhf==0.11.2 -d WHEELS
    python -m lab.openrlhf_keys WHEELS SCHEMAS

`lab.framework_keys SCHEMAS` then writes the tables.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAINERS = ("sft", "dpo", "rm")


def flags_of(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Flag -> its default, of every `add_argument` with a name that begins with two dashes."""
    for node in ast.walk(ast.parse(text)):
        called = node.func if isinstance(node, ast.Call) else None
        if not (isinstance(node, ast.Call) and isinstance(called, ast.Attribute)) or not node.args:
            continue
        name = node.args[0]
        if called.attr == "add_argument" and isinstance(name, ast.Constant) and str(name.value)[:2] == "--":
            given = {word.arg: word.value for word in node.keywords}
            yield str(name.value), {"default": _default(given.get("default"))}


def _default(node: ast.expr | None) -> Any:
    """A default, as it stands there where it is computed; None where none is given."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def main() -> None:
    """Write `openrlhf_RELEASE_TRAINER.json` of every wheel of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("schemas", type=Path)
    asked = parser.parse_args()
    for path in sorted(asked.wheels.glob("openrlhf-*.whl")):
        release, wheel = path.name.split("-")[1], zipfile.ZipFile(path)
        for trainer in TRAINERS:
            script = next(name for name in wheel.namelist() if name.endswith(f"cli/train_{trainer}.py"))
            flags = dict(flags_of(wheel.read(script).decode()))
            (asked.schemas / f"openrlhf_{release}_{trainer}.json").write_text(json.dumps(flags))


if __name__ == "__main__":
    main()
