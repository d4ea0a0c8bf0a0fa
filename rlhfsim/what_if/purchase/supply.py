"""How many GPUs of which kind to buy, reserve and rent in every quarter: one mixed-integer program.

    x[j, o, s, q]   runs of job j in quarter q on option o (kind and number of GPUs) from supply s
    B[g, q]         nodes of kind g that arrive in quarter q;  R[g, q]  nodes reserved for a year from q on
    own             1 where anything is bought

    min  sum B (purchase + network - resale + quarters left x (power + colocation + maintenance + staff))
         + sum R x year x rent  +  sum x GPU-hours x rent (spot: / goodput)  +  own x engineers x pay, storage
    sum_os x[j, o, s, q] = runs[j, q];     sum_jo GPU-hours x <= fill x hours x GPUs that are there
    a run on n GPUs needs n of them: x <= runs z,  n z <= GPUs that are there

Solved by HiGHS (scipy.optimize.milp). Nodes are paid when they arrive and draw power all the time; a
reservation is for a year that lies within the horizon. Money is not discounted. Not known here: taxes,
insurance, egress, and what a broken node costs beyond its maintenance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.step.prediction import joules_per_step
from rlhfsim.units import DAY, HOUR
from rlhfsim.what_if.purchase.document import QUARTERS, CostTerms, Portfolio, Supply, resale_share
from rlhfsim.what_if.risk.step import Floats

NODES: tuple[Supply, ...] = ("bought", "reserved")
"""Supplies that come in whole nodes."""
YEAR_H = 365.25 * DAY / HOUR
QUARTER_H = YEAR_H / QUARTERS
MONTHS = 3
"""Months of a quarter."""
KILO = 1000.0
GAP = 1e-4
"""Relative distance from the proven optimum at which the solver may end."""
LIMIT_S = 60.0
"""Longest solution."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunOption:
    """One way to run a job: a kind and a number of GPUs."""

    job: str
    gpu: str
    gpus: int
    hours: float
    """Median hours of a run, failures counted."""
    in_time: float
    """Probability that a run which starts at once is done by its deadline."""
    drawn_h: Floats
    """(draws,) hours of a run."""
    plan: Plan | None = None
    """What was priced; None where only its time is known."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of one run."""
        return self.gpus * self.hours


@frozen
class Purchase:
    """What is bought, reserved and rented, and what it costs."""

    bought: Mapping[str, tuple[int, ...]]
    """Kind -> nodes that arrive in each quarter."""
    reserved: Mapping[str, tuple[int, ...]]
    """Kind -> nodes reserved for a year from each quarter on."""
    runs: Mapping[tuple[str, str, int, Supply, int], float]
    """Job, kind, GPUs, supply, quarter -> runs."""
    cash: tuple[float, ...]
    """USD paid in each quarter; the resale comes back in the last one."""
    by_item: Mapping[str, float]
    """USD by what it is for."""
    fill: float
    """Share of the hours of owned and reserved GPUs that may be planned."""

    @property
    def usd(self) -> float:
        """All of it."""
        return sum(self.cash)

    @property
    def given(self) -> dict[tuple[str | int, ...], int]:
        """Supply, kind, quarter -> nodes that come."""
        kept = zip(NODES, (self.bought, self.reserved), strict=True)
        return {(s, gpu, q): n for s, by in kept for gpu, each in by.items() for q, n in enumerate(each)}

    def nodes(self, gpu: str, quarter: int) -> int:
        """Nodes of a kind that are there in a quarter, owned and reserved."""
        owned = sum(self.bought.get(gpu, ())[: quarter + 1])
        return owned + sum(self.reserved.get(gpu, ())[max(0, quarter - QUARTERS + 1) : quarter + 1])


@frozen
class JobMix:
    """What a purchase is decided on."""

    portfolio: Portfolio
    terms: CostTerms
    profiles: Mapping[str, Profile]
    """Kinds of GPU by the names of their profiles."""
    options: Sequence[RunOption]

    def runs_in(self, quarter: int) -> dict[str, float]:
        """Runs of each job in a quarter; growth comes in yearly steps."""
        year = quarter // QUARTERS
        return {
            j.name: j.runs_per_year / QUARTERS * (1 + self.terms[f"growth of {j.name}"]) ** year
            for j in self.portfolio.jobs
        }


def watts(profile: Profile) -> float:
    """Mean draw of one node without cooling."""
    cluster = Cluster(node_groups=(node_group(profile, profile.node.gpus),))
    return joules_per_step(cluster, 1.0) / profile["pue"]


def peak_watts(profile: Profile) -> float:
    """Most that one node draws, for which space is rented."""
    server = profile.node.power.value if profile.node.power else 0.0
    return profile.node.gpus * profile.tdp.value + server


Key = tuple[str | int, ...]
"""What a variable means: the supply, the kind of GPU or option, the quarter."""
Row = tuple[dict[Key, float], float, float]
"""Coefficients, and the least and the most of their sum; a variable that there is not counts as 0."""


@frozen
class _PurchaseColumn:
    """One variable with what it costs in each quarter, by what it is for."""

    cash: Mapping[str, NDArray[np.float64]]
    most: float = 1
    whole: bool = True


class _PurchaseProgram:
    """The mixed-integer program of one portfolio."""

    def __init__(self, mix: JobMix, fill: float, supply: Sequence[Supply]) -> None:
        self.mix, self.portfolio, self.terms, self.fill = mix, mix.portfolio, mix.terms, fill
        self.supply = [s for s in supply if s in self.portfolio.supply]
        self.kept = [s for s in NODES if s in self.supply]
        self.quarters = range(self.portfolio.quarters)
        self.lead = math.ceil(self.terms["lead_time"] / HOUR / QUARTER_H - 1e-9)
        self.runs = [mix.runs_in(q) for q in self.quarters]
        self.columns = dict(chain(self._nodes(), self._uses(), self._needs()))

    def _nodes(self) -> Iterator[tuple[Key, _PurchaseColumn]]:
        options, terms = self.mix.options, self.terms
        most = math.ceil(
            sum(o.gpu_hours * r[o.job] for o in options for r in self.runs) / QUARTER_H / self.fill
        ) + max(o.gpus for o in options)
        for (gpu, profile), q in product(self.mix.profiles.items(), self.quarters):
            if f"{gpu} bought" in terms and "bought" in self.kept and q >= self.lead:
                yield ("bought", gpu, q), _PurchaseColumn(cash=self._owning(profile, q), most=most)
            whole_year = q + QUARTERS <= len(self.quarters)
            if f"{gpu} reserved" in terms and "reserved" in self.kept and whole_year:
                yield ("reserved", gpu, q), _PurchaseColumn(cash=self._reserving(profile, q), most=most)
        if "bought" in self.kept:
            pay = (self.portfolio.engineers or 0.0) * terms["salary"] / QUARTERS
            yield ("own",), _PurchaseColumn(cash={"staff": self._each_quarter(pay, self.lead)})

    def _each_quarter(self, usd: float, start: int = 0, end: int | None = None) -> NDArray[np.float64]:
        cash = np.zeros(len(self.quarters))
        cash[start:end] = usd
        return cash

    def _owning(self, profile: Profile, q: int) -> dict[str, NDArray[np.float64]]:
        """Cash of one node that arrives in a quarter and is sold after the last."""
        terms, gpus = self.terms, profile.node.gpus
        price = gpus * terms[f"{profile.name} bought"]
        age = (len(self.quarters) - q) / QUARTERS
        sold = self._each_quarter(0.0)
        sold[-1] = -price * resale_share(terms, age)
        power = watts(profile) * terms["pue"] / KILO * QUARTER_H * terms["power"]
        return {
            "GPUs and servers": self._each_quarter(price, q, q + 1),
            "network": self._each_quarter(gpus * terms["network"], q, q + 1),
            "resale": sold,
            "power": self._each_quarter(power, q),
            "colocation": self._each_quarter(peak_watts(profile) / KILO * MONTHS * terms["colocation"], q),
            "maintenance": self._each_quarter(price * (self.portfolio.maintenance or 0.0) / QUARTERS, q),
            "staff": self._each_quarter(terms["salary"] / QUARTERS / terms["nodes_per_engineer"], q),
        }

    def _reserving(self, profile: Profile, q: int) -> dict[str, NDArray[np.float64]]:
        rent = profile.node.gpus * QUARTER_H * self.terms[f"{profile.name} reserved"]
        return {"reserved": self._each_quarter(rent, q, q + QUARTERS)}

    def _uses(self) -> Iterator[tuple[Key, _PurchaseColumn]]:
        for i, o in enumerate(self.mix.options):
            for s in self.supply:
                if f"{o.gpu} {s}" not in self.terms:
                    continue
                hourly = 0.0 if s in NODES else self.terms[f"{o.gpu} {s}"]
                usd = o.gpu_hours * hourly / ((self.portfolio.spot_goodput or 1.0) if s == "spot" else 1.0)
                for q in self.quarters:
                    cash = self._each_quarter(usd, q, q + 1)
                    yield ("run", i, s, q), _PurchaseColumn(cash={s: cash}, most=math.inf, whole=False)

    def _needs(self) -> Iterator[tuple[Key, _PurchaseColumn]]:
        sizes = sorted({(o.gpu, o.gpus) for o in self.mix.options})
        for (gpu, gpus), s, q in product(sizes, self.kept, self.quarters):
            yield ("needs", gpu, gpus, s, q), _PurchaseColumn(cash={})

    def rows(self) -> Iterator[Row]:
        """Every constraint."""
        options = [*enumerate(self.mix.options)]
        for q in self.quarters:
            for job, runs in self.runs[q].items():
                mine = [i for i, o in options if o.job == job]
                yield {("run", i, s, q): 1.0 for i in mine for s in self.supply}, runs, runs
            for (gpu, profile), s in product(self.mix.profiles.items(), self.kept):
                if f"{gpu} {s}" in self.terms:
                    yield from self._there(gpu, profile.node.gpus, s, q)
        if "bought" in self.kept:
            bought = {key: column.most for key, column in self.columns.items() if key[0] == "bought"}
            yield {**dict.fromkeys(bought, 1.0), ("own",): -sum(bought.values())}, -math.inf, 0.0

    def _there(self, gpu: str, per_node: int, s: Supply, q: int) -> Iterator[Row]:
        first = 0 if s == "bought" else max(0, q - QUARTERS + 1)
        nodes: list[Key] = [(s, gpu, p) for p in range(first, q + 1)]
        uses = {("run", i, s, q): o for i, o in enumerate(self.mix.options) if o.gpu == gpu}
        hours = dict.fromkeys(nodes, -self.fill * QUARTER_H * per_node)
        yield {**hours, **{key: o.gpu_hours for key, o in uses.items()}}, -math.inf, 0.0
        for gpus in sorted({o.gpus for o in uses.values()}):
            need = ("needs", gpu, gpus, s, q)
            mine = [key for key, o in uses.items() if o.gpus == gpus]
            yield {**dict.fromkeys(mine, 1.0), need: -sum(self.runs[q].values())}, -math.inf, 0.0
            yield {**dict.fromkeys(nodes, -float(per_node)), need: float(gpus)}, -math.inf, 0.0


def purchase(
    mix: JobMix, *, fill: float = 1.0, supply: Sequence[Supply] | None = None, decided: Purchase | None = None
) -> Purchase | None:
    """The cheapest purchase in which every run has its GPUs; None where there is none.

    `supply`: only these; `decided`: what is bought and reserved is given, only its use is chosen anew.

    Raises:
        RlhfsimError: the solver did not end.
    """
    program = _PurchaseProgram(mix, fill, supply or mix.portfolio.supply)
    columns, rows = program.columns, list(program.rows())
    given = decided.given if decided else {}
    fixed = NODES if decided else ()
    table = sparse.lil_array((len(rows), len(columns)))
    place = {key: j for j, key in enumerate(columns)}
    for i, (coefficients, _, _) in enumerate(rows):
        for key in coefficients.keys() & place.keys():
            table[i, place[key]] = coefficients[key]
    found = milp(
        np.array([sum(c.sum() for c in column.cash.values()) for column in columns.values()]),
        integrality=np.array([int(c.whole) for c in columns.values()]),
        bounds=Bounds(
            [given.get(key, 0) for key in columns],
            [given.get(key, 0) if key[0] in fixed else c.most for key, c in columns.items()],
        ),
        constraints=LinearConstraint(table.tocsr(), [r[1] for r in rows], [r[2] for r in rows]),
        options={"time_limit": LIMIT_S, "mip_rel_gap": GAP},
    )
    if found.x is None:
        if found.status == 2:  # infeasible
            return None
        raise RlhfsimError(
            "solver-ended",
            f"the purchase was not solved: {found.message}",
            help="fewer jobs, sizes or kinds of GPU",
        )
    amounts = dict(zip(columns, found.x.tolist(), strict=True))
    return _read(program, {key: round(x) if columns[key].whole else x for key, x in amounts.items()})


def _read(program: _PurchaseProgram, amounts: Mapping[Key, float]) -> Purchase:
    """The solution in words of the portfolio."""
    mix, quarters = program.mix, program.quarters
    items = {"storage": np.full(len(quarters), MONTHS * (program.portfolio.storage or 0.0))}
    for key, column in program.columns.items():
        for item, cash in column.cash.items():
            items[item] = items.get(item, np.zeros(len(quarters))) + amounts[key] * cash

    def nodes(supply: Supply) -> dict[str, tuple[int, ...]]:
        each = {gpu: tuple(int(amounts.get((supply, gpu, q), 0)) for q in quarters) for gpu in mix.profiles}
        return {gpu: counts for gpu, counts in each.items() if any(counts)}

    return Purchase(
        bought=nodes("bought"),
        reserved=nodes("reserved"),
        runs={
            (o.job, o.gpu, o.gpus, s, q): amounts["run", i, s, q]
            for (i, o), s, q in product(enumerate(mix.options), program.supply, quarters)
            if amounts.get(("run", i, s, q), 0.0) > 1e-6
        },
        cash=tuple(sum(items.values(), np.zeros(len(quarters))).tolist()),
        by_item={item: float(cash.sum()) for item, cash in items.items() if abs(cash).sum() > 0},
        fill=program.fill,
    )
