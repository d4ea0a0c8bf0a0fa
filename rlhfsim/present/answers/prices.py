"""What `rlhfsim prices` answers: a GPU-hour by market, with range, date and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlhfsim.present.answers.tree import Column, Page, Tile, answer, table_of
from rlhfsim.present.tables import RANGED, WORDS
from rlhfsim.specs.hardware.hardware import Price
from rlhfsim.specs.hardware.prices import DEFAULT, MARKETS, Market, Prices

SCHEMA = "rlhfsim.prices/1"
NOTE = (
    "USD per GPU-hour, in brackets the range of public offers; on-demand is what is charged unless --price "
    "says otherwise (a number, reserved or spot); rlhfsim prices NAME shows sources"
)


def listing(known: Prices) -> Page:
    """A line a GPU."""
    table = table_of(
        "",
        sorted(known.items()),
        Column("GPU", 0),
        *(Column(m, lambda item, m=m: _ends(item[1].get(m)), RANGED, fit=WORDS) for m in MARKETS),
        Column("date", lambda item: item[1][DEFAULT].date if DEFAULT in item[1] else "", spare=1),
        notes=(NOTE,),
    )
    return answer(SCHEMA, table, data=_data(known))


def _ends(price: Price | None) -> tuple[float, float, float] | None:
    return (price.value, price.low, price.high) if price else None


def sheet(gpu: str, markets: Mapping[Market, Price]) -> Page:
    """One GPU with the source of each price."""
    tiles = [
        Tile(m, _ends(p), kind=RANGED, detail=f"USD/h, {p.date}: {p.source}") for m, p in markets.items()
    ]
    return answer(SCHEMA, title=gpu, tiles=tuple(tiles), data=_data({gpu: markets}))


def _data(known: Mapping[str, Mapping[Market, Price]]) -> dict[str, Any]:
    """Profile -> market -> value, low, high (USD per GPU-hour), date, source."""
    return {"prices": {gpu: {m: asdict(p) for m, p in of.items()} for gpu, of in sorted(known.items())}}
