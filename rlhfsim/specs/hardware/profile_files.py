"""Where profiles lie: the user's folders first, then the shipped one; names and aliases.

Search order: `hardware_profiles/` of the working directory, then `$RLHFSIM_PROFILES`, then the
shipped folder; last, `NAME.yaml` in the working directory itself and files that call themselves so (`name:`).
Names and aliases are in the first lines of each file, so finding one reads no file whole.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhfsim import resources
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.hardware.names import meant

COMMON = "common"
"""The file of coefficients that all profiles share."""
PRICES = "prices"
"""The file of prices (`specs.hardware.prices`)."""
MEASURED = "local"
"""Name under which `rlhfsim profile measure` writes."""
HEAD_BYTES = 4096
"""Name, title, vendor and aliases are within the first so many bytes of a profile."""
_NAME = re.compile(r"^name:[ \t]*(\S+)", re.MULTILINE)
_ALIASES = re.compile(r"^aliases:\s*\[(.*?)\]", re.MULTILINE | re.DOTALL)


def folders() -> list[Path]:
    """Folders that are searched, the user's own first."""
    users = [Path.cwd() / "hardware_profiles"]
    if named := os.environ.get("RLHFSIM_PROFILES"):
        users += [Path(part) for part in named.split(os.pathsep) if part]
    existing = [folder for folder in [*users, resources.shipped("hardware_profiles")] if folder.is_dir()]
    return list({os.path.realpath(folder): folder for folder in reversed(existing)}.values())[::-1]


def profile_files() -> dict[str, Path]:
    """Every profile by name; a user's file hides a shipped one of the same name."""
    files: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            if path.stem not in (COMMON, PRICES) and path.is_file():
                files.setdefault(path.stem, path)
    return dict(sorted(files.items()))


def profile_names() -> tuple[str, ...]:
    """Names that `load_profile` knows, without aliases."""
    return tuple(profile_files())


def aliases() -> dict[str, str]:
    """Alias to profile name, read from the head of each file; both in canonical spelling."""
    return {alias: name for name, path in profile_files().items() for alias in _aliases_in(path)}


def find_profile(name: str) -> Path:
    """The file of a profile given by name or alias, or as a log writes it (`names`); case does not matter.

    Raises:
        RlhfsimError: no such profile; the message names the nearest ones.
    """
    files = {_canonical(stem): path for stem, path in profile_files().items()}
    wanted = _canonical(name)
    if wanted in files:
        return files[wanted]
    known = {alias: path for path in files.values() for alias in _aliases_in(path)}
    if wanted in known:
        return known[wanted]
    if Path(name).name == name:  # a file of the working folder, such as one of rlhfsim calibrate --out
        beside = [*sorted(Path.cwd().glob("*.yaml")), *files.values()]
        if named := next((p for p in beside if wanted in (_canonical(p.stem), _name_in(p))), None):
            return named
    if found := meant(name, {path: {stem, *_aliases_in(path)} for stem, path in files.items()}):
        return found
    if wanted == MEASURED:
        raise RlhfsimError(
            "not-measured",
            "this machine was not measured: there is no hardware_profiles/local.yaml here",
            help="run: rlhfsim profile measure",
        )
    raise unknown_name("hardware profile", name, [*profile_files(), *known])


def _canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _name_in(path: Path) -> str | None:
    match = _NAME.search(_head(path))
    return _canonical(match[1].strip("'\"")) if match else None


def _head(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return ""


def _aliases_in(path: Path) -> list[str]:
    match = _ALIASES.search(_head(path))
    names = match[1].split(",") if match else []
    return [_canonical(name.strip().strip("'\"")) for name in names if name.strip()]
