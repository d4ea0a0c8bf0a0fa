"""Layouts of a role as fields, those together that differ in the micro-batch alone, or in DP too.

Objects are made when they are needed: of most layouts the fields suffice.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from rlhfsim.memory.states import CUT
from rlhfsim.specs.placement.layout import Layout, Offload, Recompute
from rlhfsim.specs.placement.layout_columns import Layouts, array_of

Fields = dict[str, Any]
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Layout)}
_cut_of = itemgetter(*CUT)


class ModelCut(NamedTuple):
    """How a model is cut, and among what its shapes choose: the same on many numbers of GPUs."""

    tp: int
    pp: int
    cp: int
    experts: tuple[int, ...]
    alone: bool
    """A single rank: no other one holds the same parameters."""
    copies: tuple[int | None, ...]


@dataclass(frozen=True)
class Shapes:
    """Fields of the layouts of one `ModelCut`, but DP and the micro-batch; searches share them."""

    fields: tuple[Fields, ...]
    refused: Counter[str]
    """Why others are never run -> how many."""
    homes: Counter[tuple[int, Offload, Offload, int]]
    """Virtual stages, where optimizer states and parameters lie, ZeRO stage -> how many."""
    recomputed: bool
    """Whether all of them run the whole forward again."""

    @cached_property
    def leanest(self) -> Fields:
        """The one that holds least on a GPU between its passes."""
        return max(self.fields, key=_leanness)


def joined(parts: Sequence[Shapes]) -> Shapes:
    """Shapes of cuts that differ in their expert parallelism alone."""
    return Shapes(
        fields=tuple(chain.from_iterable(part.fields for part in parts)),
        refused=sum((part.refused for part in parts), Counter()),
        homes=sum((part.homes for part in parts), Counter()),
        recomputed=all(part.recomputed for part in parts),
    )


def _leanness(fields: Fields) -> tuple[object, ...]:
    away = fields["offload_params"] != "none", fields["offload_optimizer"] != "none"
    return fields["shards"] is None, *away, fields["zero"], fields["ep"], fields["offload_fraction"]


class LayoutShape(NamedTuple):
    """Layouts that differ in the micro-batch alone, smallest first; objects are made when they are needed."""

    fields: Fields
    sizes: Sequence[Fields]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All of them."""
        return tuple(Layout(**self.fields, **size) for size in self.sizes)

    @property
    def cut(self) -> tuple[Any, ...]:
        """What decides their states, as `memory.states.cut` of each."""
        fields: tuple[Any, ...] = _cut_of({"etp": 1, **self.fields})
        return fields


def columns_of_shapes(shapes: Sequence[LayoutShape]) -> Layouts:
    """All layouts of some shapes."""
    counts = [len(shape.sizes) for shape in shapes]
    sizes = [size for shape in shapes for size in shape.sizes]
    columns = {
        name: np.repeat(array_of(name, [shape.fields.get(name, default) for shape in shapes]), counts)
        for name, default in DEFAULTS.items()
    }
    columns |= {
        name: array_of(name, [size.get(name, DEFAULTS[name]) for size in sizes])
        for name in {name: None for size in sizes for name in size}
    }
    return Layouts(**columns)


class CutShapes(NamedTuple):
    """Shapes of one `ModelCut` on a number of GPUs."""

    dp: int
    shapes: Shapes
    sizes: Mapping[int, Sequence[Fields]]
    """Virtual stages -> sizes of a micro-batch that have work."""

    @property
    def filled(self) -> Iterator[LayoutShape]:
        """All shapes with a layout."""
        for fields in self.shapes.fields:
            if sizes := self.sizes[fields["vp"]]:
                yield LayoutShape({**fields, "dp": self.dp}, sizes)

    @property
    def outlines(self) -> Iterator[Layout]:
        """The cut and recomputation with every size of a micro-batch that has work in one of the shapes."""
        if not self.shapes.fields:
            return
        one = self.shapes.fields[0]
        cut = {name: one[name] for name in ("tp", "pp", "cp")} | {"dp": self.dp}
        recompute: Recompute = "full" if self.shapes.recomputed else "none"
        sizes = {tuple(size.items()): size for sizes in self.sizes.values() for size in sizes}
        for size in sizes.values():
            yield Layout(**cut, **size, recompute=recompute)


@dataclass(frozen=True, slots=True)
class Space:
    """Shapes that may compete and why others may not."""

    blocks: tuple[CutShapes, ...]
    dropped: Counter[str]
    """Reason -> number of layouts."""

    @property
    def shapes(self) -> Iterator[LayoutShape]:
        """All shapes with a layout."""
        return chain.from_iterable(block.filled for block in self.blocks)

    @property
    def layouts(self) -> Iterator[Layout]:
        """All layouts, those of one shape together."""
        return chain.from_iterable(shape.layouts for shape in self.shapes)

    @property
    def homes(self) -> Counter[tuple[Offload, Offload, int]]:
        """Where optimizer states and parameters lie, ZeRO stage -> number of layouts."""
        total: Counter[tuple[Offload, Offload, int]] = Counter()
        for block in self.blocks:
            for (vp, optimizer, params, zero), count in block.shapes.homes.items():
                total[optimizer, params, zero] += count * len(block.sizes[vp])
        return total
