"""What `rlhfsim prices` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim.present.tables import WORDS, grid
from rlhfsim.present.terminal.console import WIDTH, drawn, labelled, within
from rlhfsim.specs.hardware.hardware import Price
from rlhfsim.specs.hardware.prices import DEFAULT, MARKETS, Market, Prices

SCHEMA = "rlhfsim.prices/1"
NOTE = (
    "USD per GPU-hour, in brackets the range of public offers; on-demand is what is charged unless --price "
    "says otherwise (a number, reserved or spot); rlhfsim prices NAME shows sources"
)


def ranged(price: Price | None) -> str:
    """`3 (1.99-5)`."""
    if price is None:
        return "-"
    return f"{price.value:g}" + (f" ({price.low:g}-{price.high:g})" if price.low < price.high else "")


def listing(known: Prices, width: int = WIDTH) -> Sequence[RenderableType]:
    """A line a GPU."""
    titles = ("GPU", *(f">{market}" for market in MARKETS), "date")
    rows = [
        (gpu, *(ranged(markets.get(m)) for m in MARKETS), markets[DEFAULT].date if DEFAULT in markets else "")
        for gpu, markets in sorted(known.items())
    ]
    fit = dict.fromkeys(titles[1:-1], WORDS)  # a narrow terminal breaks before a range and cuts no figure
    return drawn(within(grid(titles, rows, fit=fit, spare=("date",)), width), None), Text(NOTE)


def sheet(gpu: str, markets: Mapping[Market, Price]) -> Sequence[RenderableType]:
    """One GPU with the source of each price."""
    rows = {str(m): f"{ranged(markets[m])} USD/h, {markets[m].date}: {markets[m].source}" for m in markets}
    return Text(gpu, style="bold"), labelled(rows)


def prices_dict(known: Prices) -> dict[str, Any]:
    """The same content: profile -> market -> value, low, high (USD per GPU-hour), date, source."""
    prices = {gpu: {m: asdict(p) for m, p in markets.items()} for gpu, markets in sorted(known.items())}
    return {"schema": SCHEMA, "prices": prices}
