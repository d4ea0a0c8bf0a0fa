"""From a scenario's patches to design questions: every point, checked, with the place of each value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache, lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.clusters import cluster_from
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.loading import Source, convert
from rlhfsim.units import GB, format, significant
from rlhfsim.what_if.dotted_paths import Keys, check_known, dimension, factor, keys, put, value_at
from rlhfsim.what_if.scenarios.document import Base, Document
from rlhfsim.what_if.scenarios.question import request_of

BASE = "base"
GENERIC = frozenset({"value", "mean", "sigma", "max", "min", "std", "kind", "model"})
"""Last parts of paths that say nothing without the part before."""
IN_PROFILE = {
    "price": "price.value",
    "nic": "nic.value",
    "storage": "node.shared_storage.value",
    "gpus_per_node": "node.gpus",
}
"""Fields of a node group that its profile has where the scenario is silent."""
MAX_POINTS = 2000
"""Points whose plans are kept in memory; more are answered as a table that grows (`scenarios.sweep`)."""
BITS = 8
"""Bits of a byte."""
COMMAND_LINE = Place(file="command line")


@frozen
class PointQuestion:
    """One point as a question that can be designed."""

    name: str
    changes: Mapping[str, Any]
    before: Mapping[str, Any]
    """What the base has at the same paths."""
    request: Request
    base: Base
    """The patched base."""
    located: Located


class Located(Source):
    """A patched base that knows which part of the file, or of the command line, each value comes from."""

    def __init__(self, source: Source, data: Any, patches: Sequence[tuple[Keys, Place]] = ()) -> None:
        """`patches`: path below the base, and where it was said; later ones win."""
        super().__init__(source.name, "", {BASE: data})
        self.source, self.patches = source, tuple(patches)

    def place(self, path: Keys = ()) -> Place:
        """Place of the patch that set the value, or is to blame for what lies around it; else of the base."""
        inside = _without_kinds(self.data, path)[1:]
        for where, place in reversed(self.patches):
            if inside[: len(where)] == where:
                return place
        for where, place in reversed(self.patches):
            if where[: len(inside)] == inside:
                return place
        return self.source.place((BASE, *inside))

    def with_patch(self, where: Keys, value: Any, place: Place, base: Base) -> Located:
        """One value replaced; where the document is silent, among the defaults of `base`."""
        data = put(_spelled_out(self.data[BASE], where, base), where, value, place)
        return Located(self.source, data, (*self.patches, (where, place)))


def _spelled_out(data: Any, where: Keys, base: Base) -> Any:
    """The document with the first part of a path that it leaves to a default written out."""
    for end in range(1, len(where)):
        default = value_at(base, where[:end])
        if value_at(data, where[:end]) is None and is_dataclass(default):
            return put(data, where[:end], asdict(default))  # type: ignore[arg-type]  # an instance
    return data


def _without_kinds(data: Any, path: Keys) -> Keys:
    """A path without the parts that name a kind of a union, which no document has."""
    trail: list[int | str] = []
    for i, key in enumerate(path):
        below = value_at(data, (key,)) if isinstance(data, Mapping | list) else None
        last = i == len(path) - 1
        if below is None and not last and not (isinstance(data, Mapping) and key in data):
            continue
        trail.append(key)
        data = below
    return tuple(trail)


class Patch(NamedTuple):
    """A point before it is made."""

    name: str
    given: Mapping[str, Any]
    """What it sets, by dotted path."""
    where: Mapping[str, Place]


class Cases:
    """The points of one document."""

    def __init__(self, document: Document, source: Source, settings: Mapping[str, Any] | None = None) -> None:
        """`settings`: patches of the base, from the command line.

        Raises:
            RlhfsimError: a setting that does not fit.
        """
        self.document, self.source = document, source
        self._profile = cache(load_profile)
        self.base = self._case(BASE, {}, Located(source, source.data[BASE]))
        for path, value in (settings or {}).items():
            check_known(path, Base, COMMAND_LINE)
            number = _resolved(path, value, self.base, COMMAND_LINE)
            self.base = self._case(
                BASE, {}, self.base.located.with_patch(keys(path), number, COMMAND_LINE, self.base.base)
            )

    def _case(self, name: str, given: Mapping[str, Any], located: Located) -> PointQuestion:
        base = convert(Base, located, located.data[BASE], (BASE,))
        cluster = cluster_from(located, located.data[BASE]["cluster"], (BASE, "cluster"), self._profile)
        request = request_of(base, cluster, located)
        before = {} if name == BASE else {path: standing(self.base, path) for path in given}
        numbers = {path: _scalar(value_at(base, keys(path))) for path in given}
        return PointQuestion(
            name=name,
            changes={
                path: value if numbers[path] is None else numbers[path] for path, value in given.items()
            },
            before=before,
            request=request,
            base=base,
            located=located,
        )

    def patched(
        self, name: str, given: Mapping[str, Any], where: Mapping[str, Place], on: PointQuestion | None = None
    ) -> PointQuestion:
        """A case (default: the base) with values replaced.

        Raises:
            RlhfsimError: an unknown path, or a value that does not fit there.
        """
        under = on or self.base
        located = under.located
        for path, value in given.items():
            check_known(path, Base, where[path])
            number = _resolved(path, value, under, where[path])
            located = located.with_patch(keys(path), number, where[path], under.base)
        return self._case(name, {**under.changes, **given}, located)

    @property
    def count(self) -> int:
        """Points of the scenario, the base left out."""
        grid = self.document.grid
        return len(self.document.points) + (prod(map(len, grid.values())) if grid else 0)

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that some point sets."""
        named = (path for point in self.document.points for path in point.set)
        return tuple(dict.fromkeys([*named, *self.document.grid]))

    def points(self, wanted: Callable[[str], bool] | None = None) -> Iterator[PointQuestion]:
        """Named points, then every combination of the grid, each made when it is asked for; `wanted` by name.

        Raises:
            RlhfsimError: a name that is used twice, or a point that cannot be asked.
        """
        for patch in self._patches():
            if wanted is None or wanted(patch.name):
                yield self.patched(*patch)

    def names(self) -> Iterator[str]:
        """The names of all points, none of which is made.

        Raises:
            RlhfsimError: a name that is used twice.
        """
        return (patch.name for patch in self._patches())

    def _patches(self) -> Iterator[Patch]:
        names = {BASE}
        for patch in chain(self._named(), self._grid()):
            if patch.name in names:
                raise self._twice(patch.name)
            names.add(patch.name)
            yield patch

    def _twice(self, name: str) -> RlhfsimError:
        named = [point.name for point in self.document.points]
        return RlhfsimError(
            "name-twice",
            f"two points are named {name!r}",
            place=self.source.place(("points", named.index(name), "name") if name in named else ("grid",)),
            help="give each its own name; the base is named base",
        )

    def _named(self) -> Iterator[Patch]:
        for i, point in enumerate(self.document.points):
            where = {path: self.source.place(("points", i, "set", path)) for path in point.set}
            yield Patch(point.name, point.set, where)

    def few(self, count: int) -> list[PointQuestion]:
        """Some combinations of the grid, the first and the last among them: others take about as long."""
        last = prod(map(len, self.document.grid.values())) - 1
        rows = {round(i * last / (count - 1)) for i in range(count)}
        return [self.patched(*patch) for patch in self._grid(rows)] if last > 0 else []

    def _grid(self, rows: Iterable[int] | None = None) -> Iterator[Patch]:
        """Combinations by their number, the last path varies fastest; None: all."""
        grid = self.document.grid
        if not grid:
            return
        short, count = short_names(tuple(grid)), prod(map(len, grid.values()))
        where = {path: self.source.place(("grid", path)) for path in grid}
        for row in range(count) if rows is None else sorted(rows):
            given = {}
            for path, values in reversed(grid.items()):
                row, i = divmod(row, len(values))
                given[path] = values[i]
            given = {path: given[path] for path in grid}
            yield Patch(", ".join(f"{short[p]} {worded(p, v)}" for p, v in given.items()), given, where)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Each path by its last part, or by as many as tell it from the others."""
    names = {}
    for path in paths:
        parts = path.split(".")
        least = 2 if parts[-1] in GENERIC else 1
        tails = [".".join(parts[-count:]) for count in range(least, len(parts) + 1)] or [path]
        alone = (t for t in tails if sum(f".{other}".endswith(f".{t}") for other in paths) == 1)
        names[path] = next(alone, tails[-1])
    return names


def worded(path: str, value: Any) -> str:
    """A value as people read it: `2.5 USD/h`, `32,768`, `h200`."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int | float) and path.endswith(".nic"):  # networks are known by their bits
        return f"{significant(BITS * value / GB)} Gbit/s"
    if isinstance(value, int | float) and path.endswith(".per_version"):
        return f"{significant(100 * value)} %"
    if isinstance(value, int | float):
        unit = dimension(path)
        return significant(value, 6) if unit in ("1", "token") else format(value, unit)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {worded(k, v)}" for k, v in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


# --- the value at a path ----------------------------------------------------------------------------


def standing(case: PointQuestion, path: str) -> Any:
    """The value of a case at a path; of a pool also what its profile says."""
    where = keys(path)
    value = _scalar(value_at(case.base, where))
    if value is None and where[:2] == ("cluster", "node_groups") and len(where) == 4:
        gpu, inside = value_at(case.base, (*where[:3], "gpu")), IN_PROFILE.get(str(where[3]))
        return value_at(_profile(gpu), keys(inside)) if gpu and inside else None
    raw = value_at(case.located.data[BASE], where)
    return raw if value is None else value


def _scalar(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else None


_profile = lru_cache(maxsize=64)(load_profile)


def _resolved(path: str, value: Any, under: PointQuestion, place: Place) -> Any:
    """The value itself, or so many times what the case has there.

    Raises:
        RlhfsimError: there is no number to multiply.
    """
    times = factor(value)
    if times is None:
        return value
    number = standing(under, path)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RlhfsimError(
            "no-number", f"{value} of {path}: there is no number", place=place, help="give the value itself"
        )
    product = number * times
    return int(product) if isinstance(number, int) and float(product).is_integer() else product
