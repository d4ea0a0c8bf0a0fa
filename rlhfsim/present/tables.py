"""How the values of a column read and share a width, cells that are drawn, and numbers as JSON has them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from rlhfsim.present import words
from rlhfsim.units import GB, Dimension, format, likely, percent, significant

K = TypeVar("K", bound=Hashable)


class Fit(NamedTuple):
    """How a column shares the width of a terminal."""

    overflow: Literal["never", "words", "fold", "cut"] = "never"
    """What happens to text that is too long: the column grows, or lines break, or an ellipsis ends it."""
    ratio: int | None = None
    """Share of the room that is left; None: as wide as its text."""
    width: int | None = None
    max_width: int | None = None


NEVER, WORDS = Fit(), Fit("words")
REST, CUT = Fit("words", ratio=1), Fit("cut", ratio=1)
"""The room that is left, with lines that break, or with an ellipsis."""


# --- kinds of values ---------------------------------------------------------------------------------


class ValueKind(NamedTuple):
    """What a column or a figure holds, and how it reads."""

    text: Callable[[Any], str]
    number: bool = True
    """Whether its values are numbers: they are aligned to the right and a page sorts by them."""
    missing: str = "-"
    """Text in place of None."""
    fit: Fit | None = None
    """How a column of them shares the width of a terminal; None: texts break, figures never."""

    def shown(self, value: Any) -> str:
        """A value for people."""
        return self.missing if value is None or value == "" else self.text(value)

    def where(self, missing: str) -> ValueKind:
        """The kind with another text in place of None."""
        return self._replace(missing=missing)


def kind_of(unit: Dimension) -> ValueKind:
    """Quantities of a dimension, each with its unit."""
    return ValueKind(lambda value: format(value, unit))


def _ends_in(kind: ValueKind, ends: tuple[float, float]) -> str:
    return "-".join(map(kind.text, ends))


def fixed_to(digits: int) -> ValueKind:
    """Seconds with so many decimals."""
    return ValueKind(partial(words.fixed, digits=digits))


TEXT = ValueKind(str, number=False, missing="")
RIGHT = ValueKind(str, missing="")
"""Texts that are aligned to the right."""
NAME, BAR = TEXT._replace(fit=NEVER), TEXT._replace(fit=REST)
"""Names, which do not break; bars and lines, which take the room that is left."""
DASH = TEXT.where("-")
NAMES = ValueKind(lambda names: words.listed(list(names)) or "-", number=False)
LIST = ValueKind(lambda names: ", ".join(names) or "none", number=False)
YES = ValueKind(lambda value: "yes" if value else "no", number=False)
PLAN = ValueKind(words.plan_text, number=False, missing="-")
"""A plan by its kind and layouts."""
STEP = ValueKind(lambda plan: format(plan.prediction.step_s, "s"))
STEP_ENDS = ValueKind(
    lambda plan: f"{significant(plan.prediction.low_s)}-{significant(plan.prediction.high_s)}"
)
"""The step of a plan, and its P10 and P90."""
ALIASES = ValueKind(lambda names: ", ".join(sorted(names, key=len)), number=False)
COUNT = ValueKind(lambda value: f"{value:,.0f}")
NODES = ValueKind(lambda value: f"{value:,}" if value else "-")
SECONDS = ValueKind(lambda value: format(value, "s"))
SHORT_SECONDS = ValueKind(words.short_seconds)
DURATION = ValueKind(words.seconds)
"""Seconds as `2 min 54 s`, `3 h 5 min`."""
BYTES = ValueKind(words.size)
USD = kind_of("usd")
RATE = kind_of("byte/s")
SPEED = kind_of("flop/s")
PARAMETERS = ValueKind(words.parameters)
SHARE = ValueKind(percent)
FINE_SHARE = ValueKind(lambda value: f"{value:.1%}".replace("%", " %"))
"""A share with one decimal."""
PROBABILITY = ValueKind(likely)
FACTOR = ValueKind(lambda value: words.signed(value - 1))
"""A ratio as the change against 1."""
START = ValueKind(lambda value: words.seconds(value) if value else "now")
ERROR = ValueKind(words.error_text)
"""A share with two digits, or so many times."""
NUMBER = ValueKind(significant)
THREE_DIGITS, COARSE = ValueKind("{:.3g}".format), ValueKind("{:.2g}".format)
DECIMALS = tuple(ValueKind(f"{{:,.{digits}f}}".format) for digits in range(5))
"""Numbers with so many decimals."""
DECIMAL_ENDS = tuple(ValueKind(partial(_ends_in, kind), missing="") for kind in DECIMALS)
"""P10 and P90 with so many decimals each."""
THOUSANDTHS = ValueKind("{:+.3f}".format)
GIGABYTES = ValueKind(lambda num_bytes: f"{num_bytes / GB:,.2f}" if num_bytes else "-")
"""Bytes whose unit is in the title."""
FIGURE = ValueKind(partial(significant, digits=4))
"""A number whose unit is in the title of its column."""
DIFFERENCE = ValueKind(lambda value: f"{value:+,.3g}")
CHANGE = ValueKind(words.signed)
FINE_CHANGE = ValueKind(lambda value: f"{value:+.1%}".replace("%", " %"))
TENTHS = ValueKind(lambda value: f"{value:+z,.1f}")
"""A difference with one decimal."""
RATIO = ValueKind(lambda value: f"{value:,.2f}" if value < 100 else f"{value:,.0f}")
MONEY = ValueKind(words.money, missing="unknown")
AMOUNTS = ValueKind(lambda named: ", ".join(f"{k} {v:.3g}" for k, v in named.items()), number=False)
QUANTITY = ValueKind(lambda pair: format(*pair))
"""A value and its dimension."""
QUANTITIES = ValueKind(lambda of: words.span(*(format(end, of[2]) for end in of[:2])))
"""P10, P90 and their dimension."""
PRICE = ValueKind(lambda value: f"{value:.2f}")
ENDS = ValueKind(lambda ends: "-" if None in ends else words.span(*map(significant, ends)))
"""P10 and P90 of a number whose unit is in the title."""
COARSE_ENDS = ValueKind(lambda ends: words.span(*(significant(end, 2) for end in ends)), missing="unknown")
"""P10 and P90 of an amount of money whose unit is in the title."""
GROWTH = ValueKind(
    lambda share: words.signed(share, 1) if share < 1 else f"{significant(share + 1, 2)} times", missing=""
)
"""A change, as a factor from a doubling on."""
RANGED = ValueKind(lambda ends: f"{ends[0]:g}" + f" ({ends[1]:g}-{ends[2]:g})" * (ends[1] < ends[2]))
"""A value with its range."""
COEFFICIENT, COEFFICIENT_ENDS = ValueKind(words.value_text), ValueKind(words.between)
"""A figure with its own unit, and its P10 and P90."""


# --- cells -------------------------------------------------------------------------------------------


class Word(NamedTuple):
    """A text that has the look of what it names."""

    text: str
    look: str
    """A resource, a group of memory, or a mark."""

    def __str__(self) -> str:
        """The text alone."""
        return self.text


class Stretch(NamedTuple):
    """A stretch of a bar."""

    amount: float
    """In the unit of the bar's scale."""
    look: str


class Bar(NamedTuple):
    """Stretches side by side from `start` on."""

    stretches: Sequence[Stretch]
    scale: float
    """Amount that the full width represents."""
    start: float = 0.0
    limit: float | None = None
    """Amount beyond which there is nothing to be had; the title of the column is placed above it."""
    faint: bool = False

    def __str__(self) -> str:
        """Its share of what there is."""
        return percent(sum(stretch.amount for stretch in self.stretches) / (self.limit or self.scale))


class Spark(NamedTuple):
    """Values in a row, between the smallest and the largest."""

    values: Sequence[float]

    def __str__(self) -> str:
        """The first and the last."""
        return " to ".join(map(significant, (self.values[0], self.values[-1])))


class Cell(NamedTuple):
    """One cell of a table."""

    text: Any
    """A string, or what is drawn of a value."""
    value: float | None = None
    """The number behind the text, in the unit of the column, as a figure draws it; None: no number."""


def worth(value: float, text: str) -> Cell:
    """A cell with a number that is written as given."""
    return Cell(text=text, value=rounded(value))


# --- numbers and fields -------------------------------------------------------------------------------


def rounded(value: float) -> float:
    """Six significant digits: what figures draw and tables hold."""
    return float(f"{value:.6g}")


def compact(values: Iterable[float | None]) -> list[float | None]:
    """Rounded numbers of a trace."""
    return [None if v is None else rounded(v) for v in values]


def at(item: object, path: str) -> Any:
    """The value at a path of fields or places in rows, as `1.source`; None where one on the way is None."""
    found: Any = item
    for name in path.split("."):
        if found is not None:
            found = found[int(name)] if name.isdecimal() else getattr(found, name)
    return found


def fields(item: object, *paths: str, **renamed: str) -> dict[str, Any]:
    """Fields of an item as `--json` writes them: under the last names of their paths, or renamed."""
    keys = {path.rpartition(".")[2]: path for path in paths} | renamed
    return {key: at(item, path) for key, path in keys.items()}


def each(items: Iterable[object], *paths: str, **renamed: str) -> list[dict[str, Any]]:
    """The named fields of every item."""
    return [fields(item, *paths, **renamed) for item in items]


def added(items: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Sums by key, in the order in which keys come."""
    sums: dict[K, float] = {}
    for key, amount in items:
        sums[key] = sums.get(key, 0.0) + amount
    return sums
