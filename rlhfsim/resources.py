"""Where what ships with the package lies: files next to the code or inside a wheel; folders of frameworks."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
FRAMEWORKS = ("specs/frameworks", "interchange")
"""Where a framework may have a folder: for what physics reads of it, and for what it reads and writes."""


def shipped(name: str) -> Path:
    """The shipped folder `name` (`hardware_profiles`, `scenarios`), wheel first, then checkout."""
    packed = _PACKAGE / "data" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


@cache
def frameworks_with(*modules: str) -> tuple[str, ...]:
    """Frameworks of which a folder has one of these modules, or YAML files: its name, `-` for `_`."""
    ways = (f"{top}/*/{module}.[py]*" for top in FRAMEWORKS for module in modules)
    found = {path.parent.name for way in ways for path in _PACKAGE.glob(way)}
    return tuple(sorted(name.replace("_", "-") for name in found.difference(modules)))


def of_framework(name: str, module: str) -> Any:
    """A module of one of `frameworks_with`."""
    folder = name.replace("-", "_")
    top = next(top for top in FRAMEWORKS if (_PACKAGE / top / folder / f"{module}.py").is_file())
    return import_module(f"rlhfsim.{top.replace('/', '.')}.{folder}.{module}")
