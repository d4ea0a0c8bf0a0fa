"""Sensitivities as bars: what the low and the high value of each input make of time and money."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from rlhfsim import units
from rlhfsim.present.terminal.bars import FULL, LIGHT, Bar, Piece
from rlhfsim.present.terminal.words import NARROW, new_table
from rlhfsim.what_if.scenarios.points import short_names
from rlhfsim.what_if.scenarios.result import WhatIf

Ends = tuple[float | None, float | None, float | None]
"""Low, base, high."""


def tornado_table(answer: WhatIf, width: int) -> Table:
    """One row an input; bars share an axis: light below the base, full above."""
    short = short_names([bar.path for bar in answer.tornado])
    times = [(b.low_s, b.base_s, b.high_s) for b in answer.tornado]
    money = [(b.low_usd, b.base_usd, b.high_usd) for b in answer.tornado]
    by_money = _spread(money) >= _spread(times)
    drawn = money if by_money else times
    low, high = _axis(drawn)
    table = new_table(width)
    table.add_column("input", overflow="fold")
    table.add_column("from - to", overflow="fold")
    base = next((ends[1] for ends in drawn if ends[1] is not None), None)
    title = "" if base is None else units.format(base, "usd" if by_money else "s")
    table.add_column(f"bars around {title}", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("USD", justify="right", no_wrap=True)
    for bar, ends, t, m in zip(answer.tornado, drawn, times, money, strict=True):
        cells = [short[bar.path], f"{bar.low_label} - {bar.high_label}", _bar(ends, low, high), _pair(t, "s")]
        table.add_row(*cells, *([_pair(m, "usd")] if width >= NARROW else []))
    return table


def _spread(rows: Sequence[Ends]) -> float:
    """The largest relative swing."""
    return max(
        (abs(e / b - 1) for low, b, high in rows if b for e in (low, high) if e is not None), default=0.0
    )


def _axis(rows: Sequence[Ends]) -> tuple[float, float]:
    found = [x for ends in rows for x in ends if x is not None] or [0.0, 1.0]
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - 1, low + 1)


def _bar(ends: Ends, low: float, high: float) -> Bar | str:
    known = [x for x in ends if x is not None]
    base = ends[1]
    if base is None or len(known) < 2:
        return "nothing fits"
    left, right = min(known), max(known)
    pieces = [
        Piece(amount=base - left, glyph=LIGHT, style="green"),
        Piece(amount=right - base, glyph=FULL, style="red"),
    ]
    return Bar(pieces=pieces, scale=high - low, offset=left - low)


def _pair(ends: Ends, unit: units.Dimension) -> str:
    """What the low and the high value give."""
    shown = [
        ("none" if x is None else units.significant(x) if unit == "usd" else units.format(x, unit))
        for x in (ends[0], ends[2])
    ]
    return " - ".join(shown)
