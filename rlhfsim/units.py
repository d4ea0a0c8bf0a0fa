"""The only place where units are read and written; inside the package everything is SI floats.

Dimensions and their base units: `byte`, `byte/s`, `flop`, `flop/s`, `s`, `usd`, `usd/h`, `W`,
`J`, `token`, `1` (a plain number). Decimal prefixes are powers of ten (GB = 1e9 bytes), binary
ones powers of two (GiB = 2**30 bytes); network rates may be given in bits (400 Gbit/s).
"""

from __future__ import annotations

import math
import re
from typing import Literal

from rlhfsim.errors import RlhfsimError

Dimension = Literal["byte", "byte/s", "flop/s", "s", "usd", "usd/h", "W", "J", "token", "1"]

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{p}i": 2.0 ** (10 * (i + 1)) for i, p in enumerate("KMGTPE")}

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
MB, GB, TB = 1e6, 1e9, 1e12
MICROSECOND, MILLISECOND, MINUTE, HOUR, DAY = 1e-6, 1e-3, 60.0, 3600.0, 86400.0
TERA = 1e12
BILLION, MILLION = 1e9, 1e6
JOULE_PER_KWH = 3.6e6


def _unit_table() -> dict[Dimension, dict[str, float]]:
    size = {f"{p}B": f for p, f in (_PREFIXES | _BINARY).items()}
    bits = {f"{p}bit": f / 8 for p, f in _PREFIXES.items()}
    return {
        "byte": size,
        "byte/s": {f"{u}/s": f for u, f in (size | bits).items()}
        | {f"{p}bps": f / 8 for p, f in _PREFIXES.items()},
        "flop/s": {f"{p}{u}": f for p, f in _PREFIXES.items() for u in ("FLOP/s", "flop/s")},
        "s": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
        "usd": {"USD": 1.0, "$": 1.0, "kUSD": 1e3, "k$": 1e3, "MUSD": 1e6, "M$": 1e6},
        "usd/h": {"USD/h": 1.0, "$/h": 1.0},
        "W": {f"{p}W": f for p, f in _PREFIXES.items()},
        "J": {f"{p}J": f for p, f in _PREFIXES.items()} | {"kWh": JOULE_PER_KWH},
        "token": {"tok": 1.0, "tokens": 1.0, "k": 1024.0},
        "1": {"%": 0.01},
    }


_UNITS = _unit_table()
_NUMBER = re.compile(r"^\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*$")
MAX_TEXT = 200
"""Characters of a quantity; more is none."""


def parse(value: str | float | int, dimension: Dimension) -> float:
    """A quantity in SI base units from `3.35 TB/s`, `80 GiB`, `12 us` or a bare number of base units.

    Raises:
        RlhfsimError: not a number, not finite, or a unit of another dimension.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RlhfsimError("bad-quantity", f"{value!r} is not a quantity", help=hint(dimension))
    if isinstance(value, int | float):
        return _finite(_as_float(value), value, dimension)
    match = _NUMBER.match(value) if len(value) <= MAX_TEXT else None
    if not match:
        raise RlhfsimError(
            "bad-quantity", f"{value[:MAX_TEXT]!r} is not a number with a unit", help=hint(dimension)
        )
    number, unit = float(match[1]), match[2]
    if unit and unit not in _UNITS[dimension]:
        raise RlhfsimError("unknown-unit", f"unknown unit {unit!r} in {value!r}", help=hint(dimension))
    return _finite(_scaled(number, _UNITS[dimension].get(unit, 1.0)), value, dimension)


def _scaled(number: float, factor: float) -> float:
    """`number * factor`, so that 10 us is 1e-05 and not 9.999999999999999e-06."""
    return number * factor if factor >= 1 else number / round(1 / factor)


def parse_any(value: str) -> tuple[float, Dimension]:
    """A quantity and its dimension, read from the unit; a bare number has dimension `1`.

    Raises:
        RlhfsimError: not a number, not finite, or a unit that no dimension knows.
    """
    match = _NUMBER.match(value[:MAX_TEXT])
    unit = match[2] if match else ""
    owners = [dim for dim, table in _UNITS.items() if unit in table and dim != "token"]
    dimension: Dimension = owners[0] if owners else "1"
    return parse(value, dimension), dimension


def _as_float(value: float | int) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _finite(number: float, shown: object, dimension: Dimension) -> float:
    if not math.isfinite(number):
        raise RlhfsimError("bad-quantity", f"{shown!r:.60} is not a finite quantity", help=hint(dimension))
    return number


def hint(dimension: Dimension) -> str:
    """How a quantity of this dimension is written, for the help line of an error."""
    examples = {
        "byte": "80 GB, 141 GiB",
        "byte/s": "3.35 TB/s, 400 Gbit/s",
        "flop/s": "989 TFLOP/s",
        "s": "10 us, 3 ms, 2 s, 1 h",
        "usd": "12.5 USD",
        "usd/h": "2.50 USD/h",
        "W": "700 W",
        "J": "1 kWh",
        "token": "1024, 8k",
        "1": "0.85, 85 %",
    }
    return f"write it like {examples[dimension]}"


def _scales(prefixes: str, unit: str) -> tuple[tuple[float, str], ...]:
    """The unit with each of the prefixes, the largest first, and without one."""
    return tuple((_PREFIXES[prefix], f"{prefix}{unit}") for prefix in (*prefixes, ""))


_SCALES: dict[Dimension, tuple[tuple[float, str], ...]] = {
    "byte": _scales("PTGMk", "B"),
    "byte/s": _scales("TGMk", "B/s"),
    "flop/s": _scales("EPTG", "FLOP/s"),
    "s": ((86400.0, "d"), (3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "usd": _scales("", "USD"),
    "usd/h": _scales("", "USD/h"),
    "W": _scales("Mk", "W"),
    "J": ((JOULE_PER_KWH, "kWh"), (1.0, "J")),
    "token": _scales("", "tokens"),
    "1": _scales("", ""),
}


def format(value: float, dimension: Dimension, *, digits: int = 3) -> str:
    """A quantity for people: `format(3.35e12, "byte/s")` is `3.35 TB/s`; `digits` are significant."""
    if value == 0:
        return f"0 {_SCALES[dimension][-1][1]}".strip()
    scale, unit = next(
        ((s, u) for s, u in _SCALES[dimension] if abs(value) >= s * (1 - 0.5 * 10**-digits)),
        _SCALES[dimension][-1],
    )
    return f"{significant(value / scale, digits)} {unit}".strip()


def percent(share: float) -> str:
    """`<1 %`, `12 %`, `>99 %`, `150 %`."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.99 < share < 1 else f"{share:.0%}".replace("%", " %")


def likely(probability: float) -> str:
    """A probability from draws: every one of them, or none, is not certainty."""
    return percent(min(max(probability, 1e-4), 1 - 1e-4))


def significant(value: float, digits: int = 3) -> str:
    """A plain decimal with at most `digits` significant digits and thousands separators."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
