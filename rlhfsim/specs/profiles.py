"""Finding and reading hardware profiles: by name, by alias or by path.

Search order: `hardware_profiles/` of the working directory, then `$RLHFSIM_PROFILES`, then the
shipped folder. A profile is laid over `common.yaml` (coefficients only) and over the profile it
`extends`, if any: `coefficients` merge by name, every other key replaces. Aliases stand in the
first lines of each file, so finding one reads no profile whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim import resources
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.hardware import Profile
from rlhfsim.specs.loading import Source, convert, parse_yaml, read_text
from rlhfsim.specs.quantities import Coefficient, CoefficientText

COMMON = "common"
MAX_DEPTH = 5
"""Profiles in one `extends` chain."""
HEAD_BYTES = 4096
"""Name, title, vendor and aliases stand in this much of a profile."""
_ALIASES = re.compile(r"^aliases:\s*\[(.*?)\]", re.MULTILINE | re.DOTALL)


def folders() -> list[Path]:
    """Folders that are searched, the user's own first."""
    own = [Path.cwd() / "hardware_profiles"]
    if named := os.environ.get("RLHFSIM_PROFILES"):
        own += [Path(part) for part in named.split(os.pathsep) if part]
    found = [folder for folder in [*own, resources.shipped("hardware_profiles")] if folder.is_dir()]
    return list({folder.resolve(): folder for folder in reversed(found)}.values())[::-1]


def profile_files() -> dict[str, Path]:
    """Every profile by name; a user's file hides a shipped one of the same name."""
    files: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            if path.stem != COMMON:
                files.setdefault(path.stem, path)
    return dict(sorted(files.items()))


def profile_names() -> tuple[str, ...]:
    """Names that `load_profile` knows, without aliases."""
    return tuple(profile_files())


def aliases() -> dict[str, str]:
    """Alias to profile name, read from the head of each file; both in canonical spelling."""
    return {alias: name for name, path in profile_files().items() for alias in _aliases_in(path)}


def find_profile(name: str) -> Path:
    """The file of a profile given by name or alias; case does not matter, nor - against _.

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
    raise unknown_name("hardware profile", name, [*profile_files(), *known])


def load_profile(name: str | Path) -> Profile:
    """A profile by name (`h100_sxm`), alias (`h100`) or path of a YAML file.

    Raises:
        RlhfsimError: unknown name, unreadable file, or the first thing wrong in it with its place.
    """
    path = Path(name)
    is_path = isinstance(name, Path) or path.suffix in (".yaml", ".yml", ".json")
    return _load(path if is_path else find_profile(str(name)), ())


def profile_from_text(text: str, name: str = "profile.yaml") -> Profile:
    """A profile from YAML text; `name` stands for the file in errors."""
    source = parse_yaml(text, name)
    return _profile(source, ())


def profile_hash(profile: Profile) -> str:
    """SHA-256 of the content, the same for files that differ in layout, comments and units only."""
    return hashlib.sha256(
        json.dumps(asdict(profile), sort_keys=True, separators=(",", ":"), default=str).encode()
    ).hexdigest()


def common_coefficients() -> dict[str, Coefficient]:
    """Coefficients shared by all profiles: the shipped ones, then those of the user's folders."""
    merged: dict[str, Coefficient] = {}
    for folder in reversed(folders()):
        path = folder / f"{COMMON}.yaml"
        if path.is_file():
            merged |= _coefficients(parse_yaml(read_text(path), str(path)))
    return merged


def _coefficients(source: Source) -> dict[str, Coefficient]:
    data = _mapping(source)
    for key in data:
        if key != "coefficients":
            raise RlhfsimError(
                "unknown-key",
                f"unknown key {str(key)!r}",
                place=source.place((key,)),
                help="common.yaml holds only coefficients",
            )
    given = data.get("coefficients", {})
    return convert(dict[str, CoefficientText], source, given, ("coefficients",))


def _load(path: Path, seen: tuple[Path, ...]) -> Profile:
    resolved = path.resolve()
    if resolved in seen or len(seen) >= MAX_DEPTH:
        raise RlhfsimError(
            "circular-extends",
            f"profile {path.stem!r} extends itself or more than {MAX_DEPTH} others",
            help="let it extend a profile that stands on its own",
        )
    return _profile(parse_yaml(read_text(path), str(path)), (*seen, resolved))


def _profile(source: Source, seen: tuple[Path, ...]) -> Profile:
    data = dict(_mapping(source))
    base = data.pop("extends", None)
    beneath: Mapping[str, Any] = {}
    shared: Mapping[str, Coefficient]
    if base is None:
        shared = common_coefficients()
    else:
        parent = _parent(base, source, seen)
        beneath = {key: value for key, value in _fields(parent) if key not in data}
        shared = parent.coefficients
    profile = convert(Profile, source, {**beneath, **data})
    for name, coefficient in shared.items():
        profile.coefficients.setdefault(name, coefficient)
    return profile


def _parent(base: object, source: Source, seen: tuple[Path, ...]) -> Profile:
    place = source.place(("extends",))
    if not isinstance(base, str):
        raise RlhfsimError(
            "bad-value",
            "extends must name one profile",
            place=place,
            help="as in extends: h100_sxm",
        )
    try:
        return _load(find_profile(base), seen)
    except RlhfsimError as error:
        raise error.at(place) from error


def _fields(parent: Profile) -> Iterator[tuple[str, Any]]:
    """What a profile takes over from the one it extends."""
    inherited = [
        "title",
        "vendor",
        "memory",
        "usable_memory",
        "peak",
        "hbm",
        "scale_up",
        "pcie",
        "nic",
        "node",
        "tdp",
        "price",
        "curves",
    ]
    return ((name, getattr(parent, name)) for name in inherited)


def _mapping(source: Source) -> Mapping[Any, Any]:
    if not isinstance(source.data, Mapping):
        raise RlhfsimError(
            "not-a-mapping",
            "the file must hold one mapping of keys to values",
            place=source.place(),
            help="see docs/hardware.md",
        )
    return source.data


def _canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _aliases_in(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            match = _ALIASES.search(file.read(HEAD_BYTES))
    except OSError:
        return []
    names = match[1].split(",") if match else []
    return [_canonical(name.strip().strip("'\"")) for name in names if name.strip()]
