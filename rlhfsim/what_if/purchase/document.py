"""A portfolio of jobs as it is written in its file, and the figures of owning with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from rlhfsim import units
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import MAX_GPUS, Price, Profile
from rlhfsim.specs.hardware.prices import prices
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.loading import checked, convert, load, parse_yaml, read_text
from rlhfsim.specs.quantities import Coefficient, CoefficientText, Ratio, Share, Text
from rlhfsim.what_if.scenarios.document import Above, AskedWork, RunSteps

Supply = Literal["bought", "reserved", "on-demand", "spot"]
SUPPLIES: tuple[Supply, ...] = get_args(Supply)
QUARTERS = 4
"""Quarters of a year."""
MAX_JOBS = 16
FIGURES = Path(__file__).parent / "figures.yaml"


def _given(data: object) -> object:
    """A number alone is a figure without a range."""
    if isinstance(data, str | int | float) and not isinstance(data, bool):
        return {"value": data, "low": data, "high": data, "source": "given in the portfolio"}
    return data


Ranged = Annotated[CoefficientText, BeforeValidator(_given)]
"""A number, or one with its range and source."""
Usd = Annotated[float, BeforeValidator(lambda value: units.parse(value, "usd")), Field(ge=0, le=1e12)]
Rate = Annotated[float, Field(gt=0, le=100_000)]


@checked
@frozen
class FigureTable:
    """The shipped figures."""

    purchase: dict[str, CoefficientText]
    resale: dict[Literal["1", "2", "3"], CoefficientText]
    """Years -> share of the purchase price."""
    figures: dict[str, CoefficientText]


@checked
@frozen
class PortfolioJob:
    """One kind of job, run again and again."""

    name: Text
    workload: AskedWork
    steps: RunSteps
    runs_per_year: Rate
    """In the first year."""
    growth: Ranged = field(default_factory=lambda: Coefficient(value=0, low=0, high=0, source="none given"))
    """Share by which the runs of a year exceed those of the year before."""
    deadline: Above
    """From the day a run is asked for until it is done."""


@checked
@frozen
class Portfolio:
    """The whole file."""

    title: str = ""
    years: Annotated[int, Field(ge=1, le=3)] = 3
    jobs: Annotated[tuple[PortfolioJob, ...], Field(min_length=1, max_length=MAX_JOBS)]
    gpus: Annotated[tuple[Text, ...], Field(min_length=1, max_length=8)]
    """Kinds of GPU that may be bought or rented."""
    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_GPUS)], ...], Field(min_length=1, max_length=8)]
    """GPUs that one run may have."""
    supply: Annotated[tuple[Supply, ...], Field(min_length=1)] = SUPPLIES
    engineers: Annotated[float, Field(ge=0, le=1000)] | None = None
    """People needed as soon as anything is owned; must be given where GPUs may be bought."""
    maintenance: Annotated[Ratio, Field(le=1)] | None = None
    """Share of the purchase price a year; likewise."""
    storage: Usd | None = None
    """USD a month, whatever is bought or rented; must be given."""
    on_demand_available: Share = 1.0
    """Probability that GPUs on demand are there on the day on which a run needs them."""
    spot_goodput: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of spot time that makes progress; must be given where spot may be used."""
    figures: dict[str, Ranged] = field(default_factory=dict)
    """Figures of your own in place of the shipped ones."""
    prices: dict[str, dict[Supply, Ranged]] = field(default_factory=dict)
    """GPU -> purchase price (bought), or USD an hour of the other supplies, in place of the listed ones."""

    def __post_init__(self) -> None:
        """What no public source says must be given."""
        needed = {
            "storage": True,
            "engineers": "bought" in self.supply,
            "maintenance": "bought" in self.supply,
        }
        needed["spot_goodput"] = "spot" in self.supply
        for name, wanted in needed.items():
            if wanted and getattr(self, name) is None:
                raise RlhfsimError(
                    "missing-key",
                    f"{name!r} is missing: no public source says it for you",
                    help=f"give {name}, or leave out of supply what needs it",
                )
        names = [job.name for job in self.jobs]
        if len(set(names)) < len(names):
            raise RlhfsimError("name-twice", "two jobs have one name", help="give each its own")

    @property
    def quarters(self) -> int:
        """All of them."""
        return self.years * QUARTERS


@cache
def shipped() -> FigureTable:
    """The figures of owning that ship with their sources."""
    return convert(FigureTable, parse_yaml(read_text(FIGURES), str(FIGURES)))


def read_portfolio(path: Path) -> Portfolio:
    """A portfolio from its file.

    Raises:
        RlhfsimError: the first thing wrong, with its place.
    """
    return load(Portfolio, path)


# --- figures in force ---------------------------------------------------------------------------------


@frozen
class CostTerms:
    """Every figure that a purchase rests on, by name; one may be set to its low or high value."""

    known: Mapping[str, Coefficient]

    def __getitem__(self, name: str) -> float:
        return self.known[name].value

    def __contains__(self, name: object) -> bool:
        return name in self.known

    def at(self, name: str, end: Literal["low", "high"]) -> CostTerms:
        """The same with one figure at an end of its range."""
        moved = self.known[name]
        return CostTerms(known={**self.known, name: replace(moved, value=getattr(moved, end))})


def terms_of(portfolio: Portfolio, profiles: Mapping[str, Profile]) -> CostTerms:
    """The figures of a portfolio: its own, else the shipped ones; names are `GPU supply` for prices.

    Raises:
        RlhfsimError: an unknown figure, or a kind of GPU without any price.
    """
    table, listed = shipped(), prices()
    for name in portfolio.figures:
        if name not in {*table.figures, "pue"}:
            raise unknown_name("figure", name[:40], [*table.figures, "pue"])
    profile = next(iter(profiles.values()))
    known: dict[str, Coefficient] = {"pue": profile.coefficient("pue"), **table.figures, **portfolio.figures}
    known |= {f"resale after {years} years": share for years, share in table.resale.items()}
    for gpu in profiles:
        own = {load_profile(name).name: given for name, given in portfolio.prices.items()}.get(gpu, {})
        for supply in portfolio.supply:
            price = own.get(supply)
            if price is None:
                price = (
                    table.purchase.get(gpu) if supply == "bought" else _rent(listed.get(gpu, {}).get(supply))
                )
            if price is not None:
                known[f"{gpu} {supply}"] = price
        if not any(f"{gpu} {supply}" in known for supply in portfolio.supply):
            raise RlhfsimError(
                "unknown-price",
                f"no price of {gpu} is known for {', '.join(portfolio.supply)}",
                help=f"give prices: {{{gpu}: {{bought: 30000 USD}}}} in the portfolio",
            )
    known |= {f"growth of {job.name}": job.growth for job in portfolio.jobs}
    return CostTerms(known=known)


def _rent(price: Price | None) -> Coefficient | None:
    if price is None:
        return None
    return Coefficient(
        value=price.value,
        low=price.low,
        high=price.high,
        source=f"{price.date}: {price.source}",
        dimension="usd/h",
    )


def resale_share(terms: CostTerms, years: float) -> float:
    """Share of the purchase price after some years, on geometric lines between whole ones."""
    known = [1.0, *(terms[f"resale after {n} years"] for n in (1, 2, 3))]
    low = min(int(years), 2)
    part = years - low
    return float(known[low] ** (1 - part) * known[low + 1] ** part)


def profiles_of(portfolio: Portfolio) -> dict[str, Profile]:
    """The kinds of GPU by the names of their profiles."""
    return {p.name: p for p in map(load_profile, portfolio.gpus)}
