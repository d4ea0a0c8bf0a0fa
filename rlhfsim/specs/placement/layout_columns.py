"""Layouts as columns, for formulas that price many of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from rlhfsim.specs.placement.layout import EngineLayout, Layout, RolloutLayout

FIELDS = tuple(field.name for field in fields(Layout))
_row_of = attrgetter(*FIELDS)
_OBJECTS = frozenset(
    {"dispatcher", "ep_overlap", "shards", "recompute", "offload_optimizer", "offload_params"}
)
"""Fields that are no numbers, or may be None."""
_ABSENT = frozenset({"pack_tokens", "score_micro_batch", "score_pack_tokens"})
"""Sizes that a layout may lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutLayouts(EngineLayout):
    """Fields of rollout layouts that store weights in one format: arrays with an entry a layout, and what
    all of them share."""

    tp: Any
    pp: Any
    dp: Any
    ep: Any
    attention_dp: Any
    precision: str
    bf16_attention: bool
    bf16_layers: int


DEGREES, FORMAT = ("tp", "pp", "dp", "ep", "attention_dp"), ("precision", "bf16_attention", "bf16_layers")
format_of = attrgetter(*FORMAT)
"""What a rollout layout stores weights in."""


def rollout_columns_of(layouts: Sequence[RolloutLayout]) -> RolloutLayouts:
    """The columns of some rollout layouts, at least one, that store weights in one format."""
    columns: dict[str, Any] = {name: getattr(layouts[0], name) for name in FORMAT}
    columns |= {name: np.array([getattr(layout, name) for layout in layouts]) for name in DEGREES}
    return RolloutLayouts(**columns)


def columns_of(layouts: Iterable[Layout]) -> Layouts:
    """The columns of some layouts, at least one."""
    columns = zip(FIELDS, zip(*map(_row_of, layouts), strict=True), strict=True)
    return Layouts(**{name: array_of(name, column) for name, column in columns})


def all_of(parts: Sequence[Layouts]) -> Layouts:
    """The layouts of some tables, one after the other."""
    return Layouts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS})


def array_of(name: str, values: Sequence[Any]) -> Any:
    """Values of a field as the column that `Layouts` has of it."""
    if name not in _OBJECTS:
        return np.array([value or 0 for value in values])
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
