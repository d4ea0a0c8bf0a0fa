"""Layouts as columns, for formulas that price many of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.layout import EngineLayout, Layout, RolloutLayout

FIELDS = tuple(field.name for field in fields(Layout))
_row_of = attrgetter(*FIELDS)
_OBJECTS = frozenset(
    {"dispatcher", "ep_overlap", "shards", "recompute", "offload_optimizer", "offload_params"}
)
"""Fields that are no numbers, or may be None."""
_ABSENT = frozenset({"pack_tokens", "score_micro_batch", "score_pack_tokens"})
"""Sizes that a layout may lack."""


@frozen
class Layouts:
    """Fields of `Layout`, each an array with an entry a layout; sizes that a layout lacks are 0."""

    tp: Any
    pp: Any
    dp: Any
    cp: Any
    ep: Any
    etp: Any
    dispatcher: Any
    ep_overlap: Any
    vp: Any
    zero: Any
    shards: Any
    sequence_parallel: Any
    micro_batch: Any
    pack_tokens: Any
    score_micro_batch: Any
    score_pack_tokens: Any
    recompute: Any
    offload_optimizer: Any
    offload_fraction: Any
    offload_params: Any

    def __len__(self) -> int:
        return len(self.tp)

    def only(self, rows: Any) -> Layouts:
        """Some of them."""
        return Layouts(**{name: getattr(self, name)[rows] for name in FIELDS})

    def at(self, row: int) -> Layout:
        """One of them, as a layout."""
        values: dict[str, Any] = {name: getattr(self, name).item(row) for name in FIELDS}
        values |= {name: values[name] or None for name in _ABSENT}
        return Layout(**values | {"sequence_parallel": bool(values["sequence_parallel"])})

    def columns(self, names: Iterable[str]) -> tuple[Any, ...]:
        """Some of the fields."""
        return tuple(getattr(self, name) for name in names)

    @property
    def gpus(self) -> Any:
        """GPUs that each of them fills."""
        return self.tp * self.pp * self.cp * self.dp

    def sequences(self, *, scoring: bool) -> Any:
        """Sequences of a micro-batch, as `Layout.sequences`."""
        own = self.score_micro_batch
        return np.where(own > 0, own, self.micro_batch) if scoring else self.micro_batch

    def pack(self, *, scoring: bool) -> Any:
        """Most tokens of a pack, as `Layout.pack`; 0 where micro-batches count sequences."""
        own = self.score_pack_tokens
        return (np.where(own > 0, own, self.pack_tokens) if scoring else self.pack_tokens) * self.cp


AnyLayout: TypeAlias = Layout | Layouts
"""A layout, or columns of them: the same formulas price both."""


@frozen
class RolloutLayouts(EngineLayout):
    """Fields of rollout layouts: degrees and limits as arrays with an entry a layout, of the others what all
    of them share, or an array of objects."""

    tp: Any
    pp: Any
    dp: Any
    prefill: Any
    ep: Any
    engine: Any
    attention_dp: Any
    dispatcher: Any
    max_num_seqs: Any
    memory_utilization: Any
    max_batched_tokens: Any
    cuda_graphs: Any
    precision: Any
    bf16_attention: Any
    bf16_layers: Any
    kv_precision: Any
    speculation: Any

    def over(self, axes: int) -> RolloutLayouts:
        """Columns that broadcast against a grid of so many axes."""
        shape = -1, *(1,) * axes
        return replace(self, **{name: getattr(self, name).reshape(shape) for name in NUMBERS})


NUMBERS = (
    *("tp", "pp", "dp", "prefill", "ep", "attention_dp"),
    *("max_num_seqs", "memory_utilization", "max_batched_tokens"),
)
"""Fields of a rollout layout that are arrays in columns."""
_ROLLOUT = tuple(field.name for field in fields(RolloutLayout))
_rollout_row_of = attrgetter(*_ROLLOUT)
format_of = attrgetter("precision", "bf16_attention", "bf16_layers")
"""What a rollout layout stores weights in."""
kind_of = attrgetter(*(name for name in _ROLLOUT if name not in NUMBERS))
"""What picks the formulas that price a rollout layout."""
AnyRolloutLayout: TypeAlias = RolloutLayout | RolloutLayouts


class ManyRoles(NamedTuple):
    """Trained or scoring roles that differ in their layouts alone, as `RolePlacement`."""

    layout: Layouts
    residency: Any
    offload_between: bool


class RolloutRoles(NamedTuple):
    """Rollouts as columns, as `RolloutPlacement`."""

    layout: RolloutLayouts
    sleep_level: Any
    residency: Any


def rollout_columns_of(layouts: Sequence[RolloutLayout]) -> RolloutLayouts:
    """The columns of some rollout layouts, at least one."""
    columns = dict(zip(_ROLLOUT, zip(*map(_rollout_row_of, layouts), strict=True), strict=True))
    arrays = {name: np.array(columns.pop(name)) for name in NUMBERS}
    return RolloutLayouts(**arrays, **{name: _shared(values) for name, values in columns.items()})


def _shared(values: Sequence[Any]) -> Any:
    """The value of all, or an array of objects."""
    return values[0] if values.count(values[0]) == len(values) else _objects(values)


def columns_of(layouts: Iterable[Layout]) -> Layouts:
    """The columns of some layouts, at least one."""
    columns = zip(FIELDS, zip(*map(_row_of, layouts), strict=True), strict=True)
    return Layouts(**{name: array_of(name, column) for name, column in columns})


def all_of(parts: Sequence[Layouts]) -> Layouts:
    """The layouts of some tables, one after the other."""
    return Layouts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS})


def array_of(name: str, values: Sequence[Any]) -> Any:
    """Values of a field as the column that `Layouts` has of it."""
    return _objects(values) if name in _OBJECTS else np.array([value or 0 for value in values])


def _objects(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
