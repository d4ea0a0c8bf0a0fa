"""Pieces of a priced step, kept by the coefficients that each had read.

A piece is what `step.iteration.program` prices on its own: the generation, a call with its moves, the
controller. Which coefficients it asks for depends on nothing but their values, so that two sets of values
which agree in all that a piece had read give the same piece, whatever else moved: not nearly, the very same.

Every piece is priced on a device of its own: what is cached for a device that another piece has would hide
what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeVar

from rlhfsim.kernels.devices import device_on, with_engine
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.step.calls import CallSetting

T = TypeVar("T")
KEPT = 256
"""Prices of a piece that are kept for one set of coefficients read; the oldest goes first."""
Read = tuple[str, ...]


class Pieces:
    """The pieces of one run, priced at any coefficients of one profile."""

    def __init__(self, setting: CallSetting, profile: Profile) -> None:
        """`profile`: that of the pools whose coefficients move."""
        self._setting, self._profile = setting, profile
        self._own = {name: c.value for name, c in profile.coefficients.items()}
        self._kept: dict[str, dict[Read, dict[Any, Any]]] = {}
        self._last: dict[str, Read] = {}
        self._values: Mapping[str, float] = self._own
        self._moved: Mapping[str, Coefficient] | None = None

    def at(self, values: Mapping[str, float]) -> Pieces:
        """The pieces with `values` in place of the profile's own."""
        self._values, self._moved = {**self._own, **values}, None
        self._last = {}
        return self

    def __call__(self, name: str, price: Callable[[CallSetting], T], *, after: str | None = None) -> T:
        """One piece; `after`: the piece whose result `price` holds."""
        for read, prices in self._kept.setdefault(name, {}).items():
            at = _at(read, self._values)
            if at in prices:
                self._last[name] = read
                found: T = prices[at]
                return found
        seen: set[str] = set(self._last[after] if after else ())
        priced = price(self._recording(seen))
        read = self._last[name] = tuple(sorted(seen))
        prices = self._kept[name].setdefault(read, {})
        if len(prices) >= KEPT:
            del prices[next(iter(prices))]
        prices[_at(read, self._values)] = priced
        return priced

    @property
    def read(self) -> frozenset[str]:
        """Coefficients that the pieces read where they were priced last."""
        return frozenset().union(*self._last.values())

    def _recording(self, seen: set[str]) -> CallSetting:
        """The setting on a device of its own that notes which coefficients are asked for."""
        profile = copy(self._profile)
        object.__setattr__(profile, "coefficients", _Recorder(self._coefficients(), seen))
        cluster = self._setting.cluster
        pools = tuple(
            replace(p, profile=profile) if p.profile is self._profile else p for p in cluster.node_groups
        )
        setting = replace(self._setting, cluster=replace(cluster, node_groups=pools))
        for i, pool in enumerate(pools):
            if pool.profile is profile:
                device = device_on(setting.cluster, i, setting.placement.backend)
                for one in (device, with_engine(device, setting.engine)):
                    for twin in filter(None, (one, one.inside)):
                        object.__setattr__(twin, "_values", _Values(twin._values, seen))
                if device.profile is not profile:
                    known = _Recorder(device.profile.coefficients, seen)
                    object.__setattr__(device.profile, "coefficients", known)
        return setting

    def _coefficients(self) -> Mapping[str, Coefficient]:
        """Moved ones are taken as exact: only seconds are read off them."""
        if self._moved is None:
            known, own = self._profile.coefficients, self._own
            moved = {k: v for k, v in self._values.items() if v != own[k]}
            exact = {k: replace(known[k], value=v, low=v, high=v) for k, v in moved.items()}
            self._moved = {**known, **exact}
        return self._moved


def _at(read: Read, values: Mapping[str, float]) -> Any:
    return itemgetter(*read)(values) if read else None


class _Recorder(dict[str, Any]):
    """A dict that notes which keys are asked for."""

    def __init__(self, data: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(data)
        self._seen = seen

    def __getitem__(self, key: str) -> Any:
        self._seen.add(key)
        return super().__getitem__(key)


class _Values(dict[str, float]):
    """Values that have been asked for, noted the first time."""

    def __init__(self, data: Mapping[str, float], seen: set[str]) -> None:
        super().__init__()
        self._data, self._seen = data, seen

    def __missing__(self, key: str) -> float:
        self._seen.add(key)
        found = self[key] = self._data[key]
        return found
