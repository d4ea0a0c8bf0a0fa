"""Reading hardware profiles by name, alias or path, and building a cluster of them.

A profile is laid over `common.yaml` (coefficients only) or over the profile it `extends`:
`coefficients` merge by name, every other key replaces.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlhfsim import units
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.hardware.hardware import MAX_GPUS, Cluster, Fabric, NodeGroup, Price, Profile
from rlhfsim.specs.hardware.prices import given, market_price, price_of
from rlhfsim.specs.hardware.profile_files import COMMON, aliases, find_profile, folders, profile_names
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.loading import Source, convert, parse_yaml, read_text
from rlhfsim.specs.quantities import Bandwidth, Coefficient, CoefficientText

__all__ = [
    "aliases",
    "coefficients_of",
    "common_coefficients",
    "find_profile",
    "load_profile",
    "node_group",
    "parse_cluster",
    "profile_from_text",
    "profile_hash",
    "profile_names",
    "profile_yaml",
]
MEASURED_LATER = ("biases", "workload")
"""Keys that only a calibration fills: a profile without them keeps its hash."""
MAX_DEPTH = 5
"""Profiles in one `extends` chain."""


def load_profile(name: str | Path) -> Profile:
    """A profile by name (`h100_sxm`), alias (`h100`) or path of a YAML file.

    Raises:
        RlhfsimError: unknown name, unreadable file, or the first thing wrong in it with its place.
    """
    path = Path(name)
    is_path = isinstance(name, Path) or path.suffix in (".yaml", ".yml", ".json")
    return _load(path if is_path else find_profile(str(name)), ())


def profile_from_text(text: str, name: str = "profile.yaml") -> Profile:
    """A profile from YAML text; `name` is what errors call the file."""
    return _profile(_parse(text, name), ())


def profile_yaml(profile: Profile) -> str:
    """A profile as YAML text in base units, curves last; reading it gives the same profile."""
    data = {key: value for key, value in json.loads(json.dumps(asdict(profile))).items() if value is not None}
    curves = data.pop("curves", None)
    data = {key: value for key, value in data.items() if value or key not in MEASURED_LATER}
    text = yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False, width=100, allow_unicode=True)
    return text if curves is None else f"{text}curves: {json.dumps(curves)}\n"


def profile_hash(profile: Profile) -> str:
    """SHA-256 of what predicts time and memory: neither layout, comments, units nor price change it.

    Computed once for profiles that differ in the price alone, which share the rest.
    """
    return _hash_of(_Priceless(profile))


class _Priceless:
    """A profile hashed by the identity of everything but its price: profiles hold dicts."""

    __slots__ = ("parts", "profile")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.parts = tuple(id(getattr(profile, f.name)) for f in fields(Profile) if f.name != "price")

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Priceless) and other.parts == self.parts


@lru_cache(maxsize=64)
def _hash_of(key: _Priceless) -> str:
    data = asdict(replace(key.profile, price=None))
    if data["calibration"] is None:  # a profile that was never calibrated keeps its hash
        del data["calibration"]
    data = {key: value for key, value in data.items() if value or key not in MEASURED_LATER}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def common_coefficients() -> dict[str, Coefficient]:
    """Coefficients shared by all profiles: the shipped ones, then those of the user's folders."""
    return dict(_coefficients_in(_common_texts()))


def coefficients_of(path: Path) -> dict[str, Coefficient]:
    """Coefficients of a file that holds nothing else."""
    return dict(_coefficients_in(((read_text(path), str(path)),)))


def _common_texts() -> tuple[tuple[str, str], ...]:
    """(text, name) of every file of shared coefficients; later ones win."""
    paths = [folder / f"{COMMON}.yaml" for folder in reversed(folders())]
    return tuple((read_text(path), str(path)) for path in paths if path.is_file())


@lru_cache(maxsize=16)
def _coefficients_in(texts: tuple[tuple[str, str], ...]) -> Mapping[str, Coefficient]:
    """Those of files: every profile is laid over them."""
    merged: dict[str, Coefficient] = {}
    for text, name in texts:
        merged |= _coefficients(parse_yaml(text, name))
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
    text = read_text(path)
    resolved = Path(os.path.realpath(path))
    if resolved in seen or len(seen) >= MAX_DEPTH:
        raise RlhfsimError(
            "circular-extends",
            f"profile {path.stem!r} extends itself or more than {MAX_DEPTH} others",
            help="let it extend a profile that needs no other",
        )
    return _profile(_parse(text, str(path)), (*seen, resolved))


def _profile(source: Source, seen: tuple[Path, ...]) -> Profile:
    data = dict(_mapping(source))
    base = data.pop("extends", None)
    if base is None:
        profile = _alone(source.text, source.name, _common_texts())
    else:
        parent = _parent(base, source, seen)
        beneath = {
            field.name: getattr(parent, field.name)
            for field in fields(parent)
            if field.name not in {*data, "name", "aliases", "coefficients"}
        }
        profile = _laid_over(parent.coefficients, convert(Profile, source, {**beneath, **data}), source)
    return profile if "price" in data else replace(profile, price=price_of(profile.name) or profile.price)


@lru_cache(maxsize=64)
def _alone(text: str, name: str, common: tuple[tuple[str, str], ...]) -> Profile:
    """A profile that extends none: the same texts are one object, which one command asks for many times."""
    source = _parse(text, name)
    own = {key: value for key, value in _mapping(source).items() if key != "extends"}
    return _laid_over(_coefficients_in(common), convert(Profile, source, own), source)


def _laid_over(shared: Mapping[str, Coefficient], profile: Profile, source: Source) -> Profile:
    """The profile with the coefficients that it does not say itself."""
    own = {name: _like(shared, name, value, source) for name, value in profile.coefficients.items()}
    return replace(profile, coefficients={**shared, **own})


def _like(
    shared: Mapping[str, Coefficient], name: str, coefficient: Coefficient, source: Source
) -> Coefficient:
    """A profile's own coefficient: its name must be known, and its unit that of the shared one."""
    where = ("coefficients", name)
    if name not in shared:
        raise unknown_name("coefficient", name, shared, place=source.place(where))
    dimension = shared[name].dimension
    if coefficient.dimension not in ("1", dimension):
        raise RlhfsimError(
            "wrong-unit",
            f"coefficient {name!r} is in {coefficient.dimension}, not in {dimension}",
            place=source.place(where),
            help=units.hint(dimension),
        )
    return replace(coefficient, dimension=dimension)


def _parent(base: object, source: Source, seen: tuple[Path, ...]) -> Profile:
    if not isinstance(base, str):
        place = source.place(("extends",))
        raise RlhfsimError(
            "bad-value", "extends must name one profile", place=place, help="as in extends: h100_sxm"
        )
    path = Path(base)
    try:
        by_path = path.suffix in (".yaml", ".yml", ".json")
        return _load(Path(source.name).parent / path if by_path else find_profile(base), seen)
    except RlhfsimError as error:
        raise error.at(source.place(("extends",))) from error


@lru_cache(maxsize=16)
def _parse(text: str, name: str) -> Source:
    """The document; a `curves` section written as JSON (which is YAML) is read by the faster parser."""
    head, mark, tail = text.partition("\ncurves:")
    if not mark or not tail.lstrip().startswith("{"):
        return parse_yaml(text, name)
    try:
        curves = json.loads(tail, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return parse_yaml(text, name)
    data = _mapping(parse_yaml(head, name))
    return Source(name, text, {**data, "curves": curves})


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _mapping(source: Source) -> Mapping[Any, Any]:
    if not isinstance(source.data, Mapping):
        raise RlhfsimError(
            "not-a-mapping",
            "the file must hold one mapping of keys to values",
            place=source.place(),
            help="see docs/hardware.md",
        )
    return source.data


def parse_cluster(
    gpus: int | None = None,
    gpu: str | Path | Profile = "h100_sxm",
    *,
    gpus_per_node: int | None = None,
    rollout_gpus: int | None = None,
    rollout_gpu: str | Path | Profile | None = None,
    oversubscription: float = 1.0,
    fabric: Fabric | None = None,
    price: float | str | None = None,
) -> Cluster:
    """A cluster of one pool, or of a training pool (first) and a rollout pool.

    `gpus` are those of the first pool, `gpus_per_node` by default the profile's; `fabric` and `price` (USD
    per GPU-hour, or a market) replace the profiles'. `node_group` takes nodes and another NIC.
    """
    own: dict[str, Any] = {"fabric": fabric, "price": price}
    first = node_group(gpu, gpus, gpus_per_node=gpus_per_node, **own)
    if rollout_gpus is None and rollout_gpu is not None:
        raise RlhfsimError(
            "missing-value",
            f"the rollout pool of {rollout_gpu} has no size",
            help="give the number of rollout GPUs",
        )
    pools = [first]
    if rollout_gpus is not None:
        second = gpu if rollout_gpu is None else rollout_gpu
        shared = gpus_per_node if rollout_gpu is None else None
        pools.append(node_group(second, rollout_gpus, gpus_per_node=shared, **own))
    return Cluster(node_groups=tuple(pools), oversubscription=oversubscription)


def node_group(
    gpu: str | Path | Profile,
    gpus: int | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    nic: float | None = None,
    fabric: Fabric | None = None,
    wan: WanLink | None = None,
    price: float | str | None = None,
) -> NodeGroup:
    """Nodes of one profile; `nic`, `fabric` and `price` replace its own, `wan` leads to another region."""
    profile = gpu if isinstance(gpu, Profile) else load_profile(gpu)
    per_node = profile.node.gpus if gpus_per_node is None else gpus_per_node
    _positive("gpus_per_node", per_node)
    if nodes is not None:
        _positive("nodes", nodes)
    if gpus is None and nodes is None:
        raise RlhfsimError(
            "missing-value", "the cluster has no size", help="give gpus, or nodes and gpus_per_node"
        )
    count = _positive("gpus", gpus if gpus is not None else (nodes or 0) * per_node)
    if nodes is not None and -(-count // per_node) != nodes:
        raise RlhfsimError(
            "gpus-against-nodes",
            f"{count} GPUs do not make {nodes} nodes of {per_node}",
            help=f"give gpus: {nodes * per_node}, or leave one of the two out",
        )
    priced = _priced(profile, nic, price)
    return NodeGroup(profile=priced, gpus=count, gpus_per_node=per_node, fabric=fabric, wan=wan)


def _priced(profile: Profile, nic: float | None, price: float | str | None) -> Profile:
    if nic is not None:
        if not (math.isfinite(nic) and nic >= 1):
            raise RlhfsimError("bad-value", f"nic bandwidth is {nic}", help=units.hint("byte/s"))
        profile = replace(profile, nic=Bandwidth(value=nic, source="given by the user"))
    if isinstance(price, str):
        return replace(profile, price=market_price(profile.name, price))
    if price is not None:
        if not (math.isfinite(price) and price >= 0):
            raise RlhfsimError("bad-value", f"price is {price}", help=units.hint("usd/h"))
        profile = replace(profile, price=Price(**given(price)))
    return profile


def _positive(name: str, count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_GPUS:
        raise RlhfsimError(
            "bad-value", f"{name} is {count}", help=f"give a whole number from 1 to {MAX_GPUS}"
        )
    return count
