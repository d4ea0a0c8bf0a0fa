"""What a GPU costs for an hour: `hardware_profiles/prices.yaml`, by kind of GPU and market.

A user's file replaces single entries: `$RLHFSIM_PRICES` first, then `prices.yaml` of each profile folder, the
user's own before the shipped one. An entry is a price with its range, date and source, or a number alone:

    h100_sxm: {on-demand: 2.20 USD/h}

A profile that states its own `price` keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.hardware.hardware import Price, Profile
from rlhfsim.specs.hardware.profile_files import PRICES, folders
from rlhfsim.specs.loading import convert, parse_yaml, read_text

Market = Literal["on-demand", "reserved", "spot"]
MARKETS: tuple[Market, ...] = get_args(Market)
DEFAULT: Market = "on-demand"
GIVEN = "given"
"""Date of a price that no list quotes."""
ENVIRONMENT = "RLHFSIM_PRICES"


def given(usd_per_hour: float | str, source: str = "given by the user") -> dict[str, Any]:
    """A price without a range."""
    return {"value": usd_per_hour, "low": usd_per_hour, "high": usd_per_hour, "date": GIVEN, "source": source}


def _with_range(data: object) -> object:
    return given(data) if isinstance(data, str | int | float) and not isinstance(data, bool) else data


def at_price(profile: Profile, price: Price | None) -> Profile:
    """The profile at a price that a plan was made with; as it is where none is said."""
    return profile if price is None else replace(profile, price=price)


Prices = dict[str, dict[Market, Annotated[Price, BeforeValidator(_with_range)]]]
"""Profile -> market -> price."""


def prices() -> Prices:
    """Every price that is known.

    Raises:
        RlhfsimError: a file that cannot be read, or the first thing wrong in it with its place.
    """
    return prices_over(os.environ.get(ENVIRONMENT))


def prices_over(own: str | Path | None) -> Prices:
    """Every price, entries of a file of one's own before all others.

    Raises:
        RlhfsimError: as `prices`.
    """
    files = [path for folder in folders() if (path := folder / f"{PRICES}.yaml").is_file()]
    merged: Prices = {}
    for path in reversed([*([Path(own)] if own else []), *files]):
        for gpu, markets in _prices_in(read_text(path), str(path)).items():
            merged[gpu] = {**merged.get(gpu, {}), **markets}
    return merged


def price_of(gpu: str, market: Market = DEFAULT) -> Price | None:
    """Rent of a GPU by the name of its profile; None where no public offer is known."""
    return prices().get(gpu, {}).get(market)


def market_of(gpu: str, price: Price | None) -> Market | None:
    """The market that lists this price now; None where none does."""
    listed = prices().get(gpu, {})
    return next((market for market in MARKETS if price is not None and listed.get(market) == price), None)


def market_price(gpu: str, market: str) -> Price:
    """Rent on a market that was asked for.

    Raises:
        RlhfsimError: an unknown market, or no public offer is known there.
    """
    known = prices().get(gpu, {})
    for name, price in known.items():
        if name == market:
            return price
    if market not in MARKETS:
        raise unknown_name("market", market, MARKETS)
    others = [f"--price {m}" for m in MARKETS if m in known]
    raise RlhfsimError(
        "unknown-price",
        f"no {market} price of {gpu} is known",
        help=f"give --price USD_PER_GPU_HOUR{', or ' + ' or '.join(others) if others else ''}",
    )


@lru_cache(maxsize=16)
def _prices_in(text: str, name: str) -> Mapping[str, Mapping[Market, Price]]:
    source = parse_yaml(text, name)
    if source.data is None:
        return {}
    return convert(Prices, source)
