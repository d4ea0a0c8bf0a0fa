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

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.step.prediction import joules_per_step
from rlhfsim.units import DAY, HOUR
from rlhfsim.what_if.purchase.document import QUARTERS, CostTerms, Portfolio, Supply, resale_share
from rlhfsim.what_if.risk.step import Floats

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


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def nodes(self, gpu: str, quarter: int) -> int:
        """Nodes of a kind that are there in a quarter, owned and reserved."""
        owned = sum(self.bought.get(gpu, ())[: quarter + 1])
        return owned + sum(self.reserved.get(gpu, ())[max(0, quarter - QUARTERS + 1) : quarter + 1])


def runs_in(portfolio: Portfolio, terms: CostTerms, quarter: int) -> dict[str, float]:
    """Runs of each job in a quarter; growth comes in yearly steps."""
    year = quarter // QUARTERS
    return {
        j.name: j.runs_per_year / QUARTERS * (1 + terms[f"growth of {j.name}"]) ** year
        for j in portfolio.jobs
    }


def watts(profile: Profile) -> float:
    """Mean draw of one node without cooling."""
    cluster = Cluster(node_groups=(node_group(profile, profile.node.gpus),))
    return joules_per_step(cluster, 1.0) / profile["pue"]


def peak_watts(profile: Profile) -> float:
    """Most that one node draws, for which space is rented."""
    server = profile.node.power.value if profile.node.power else 0.0
    return profile.node.gpus * profile.tdp.value + server


@dataclass(frozen=True, slots=True, kw_only=True)
class _PurchaseColumn:
    """One variable with what it costs in each quarter, by what it is for."""

    key: tuple[str, ...]
    cash: Mapping[str, NDArray[np.float64]]
    whole: bool
    most: float


class _PurchaseProgram:
    """The mixed-integer program of one portfolio."""

    def __init__(
        self,
        portfolio: Portfolio,
        terms: CostTerms,
        profiles: Mapping[str, Profile],
        options: Sequence[RunOption],
        fill: float,
        supply: Sequence[Supply],
    ) -> None:
        self.portfolio, self.terms, self.profiles, self.fill = portfolio, terms, profiles, fill
        self.supply = [s for s in supply if s in portfolio.supply]
        self.kept = [s for s in ("bought", "reserved") if s in self.supply]
        self.options = options
        self.quarters = range(portfolio.quarters)
        self.lead = math.ceil(terms["lead_time"] / HOUR / QUARTER_H - 1e-9)
        self.runs = [runs_in(portfolio, terms, q) for q in self.quarters]
        self.columns: list[_PurchaseColumn] = [*self._nodes(), *self._uses(), *self._needs()]
        self.index = {c.key: i for i, c in enumerate(self.columns)}

    # columns

    def _nodes(self) -> Iterator[_PurchaseColumn]:
        most = math.ceil(
            sum(o.gpu_hours * r[o.job] for o in self.options for r in self.runs) / QUARTER_H / self.fill
        ) + max(o.gpus for o in self.options)
        for gpu, profile in self.profiles.items():
            for q in self.quarters:
                if f"{gpu} bought" in self.terms and "bought" in self.supply and q >= self.lead:
                    yield _PurchaseColumn(
                        key=("bought", gpu, str(q)), cash=self._owning(profile, q), whole=True, most=most
                    )
                whole_year = q + QUARTERS <= len(self.quarters)
                if f"{gpu} reserved" in self.terms and "reserved" in self.supply and whole_year:
                    yield _PurchaseColumn(
                        key=("reserved", gpu, str(q)), cash=self._reserving(profile, q), whole=True, most=most
                    )
        if "bought" in self.supply:
            pay = self._each_quarter(
                (self.portfolio.engineers or 0.0) * self.terms["salary"] / QUARTERS, self.lead
            )
            yield _PurchaseColumn(key=("own",), cash={"staff": pay}, whole=True, most=1)

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

    def _uses(self) -> Iterator[_PurchaseColumn]:
        for i, o in enumerate(self.options):
            for s in self.supply:
                if f"{o.gpu} {s}" not in self.terms:
                    continue
                hourly = self.terms[f"{o.gpu} {s}"] if s in ("on-demand", "spot") else 0.0
                usd = o.gpu_hours * hourly / ((self.portfolio.spot_goodput or 1.0) if s == "spot" else 1.0)
                for q in self.quarters:
                    cash = self._each_quarter(usd, q, q + 1)
                    yield _PurchaseColumn(
                        key=("run", str(i), s, str(q)), cash={s: cash}, whole=False, most=math.inf
                    )

    def _needs(self) -> Iterator[_PurchaseColumn]:
        sizes = sorted({(o.gpu, o.gpus) for o in self.options})
        for gpu, gpus in sizes:
            for s in self.kept:
                for q in self.quarters:
                    yield _PurchaseColumn(
                        key=("needs", gpu, str(gpus), s, str(q)), cash={}, whole=True, most=1
                    )

    # rows: (coefficients by column, low, high)

    def rows(self) -> Iterator[tuple[dict[int, float], float, float]]:
        """Every constraint."""
        for q in self.quarters:
            for job in self.portfolio.jobs:
                mine = {
                    self.index["run", str(i), s, str(q)]: 1.0
                    for i, o in enumerate(self.options)
                    if o.job == job.name
                    for s in self.supply
                    if ("run", str(i), s, str(q)) in self.index
                }
                yield mine, self.runs[q][job.name], self.runs[q][job.name]
            for gpu, profile in self.profiles.items():
                for s in self.kept:
                    yield from self._there(gpu, profile.node.gpus, s, q)
        if "bought" in self.supply:
            bought = [i for c, i in self.index.items() if c[0] == "bought"]
            yield (
                {
                    **dict.fromkeys(bought, 1.0),
                    self.index["own",]: -sum(self.columns[i].most for i in bought),
                },
                -math.inf,
                0.0,
            )

    def _there(
        self, gpu: str, per_node: int, s: str, q: int
    ) -> Iterator[tuple[dict[int, float], float, float]]:
        first = 0 if s == "bought" else max(0, q - QUARTERS + 1)
        nodes = {
            self.index[s, gpu, str(p)]: float(per_node)
            for p in range(first, q + 1)
            if (s, gpu, str(p)) in self.index
        }
        uses = {
            self.index["run", str(i), s, str(q)]: o
            for i, o in enumerate(self.options)
            if o.gpu == gpu and ("run", str(i), s, str(q)) in self.index
        }
        hours = {i: -self.fill * QUARTER_H * gpus for i, gpus in nodes.items()}
        yield {**hours, **{i: o.gpu_hours for i, o in uses.items()}}, -math.inf, 0.0
        for gpus in sorted({o.gpus for o in uses.values()}):
            need = self.index["needs", gpu, str(gpus), s, str(q)]
            mine = {i: 1.0 for i, o in uses.items() if o.gpus == gpus}
            yield {**mine, need: -sum(self.runs[q].values())}, -math.inf, 0.0
            yield {**{i: -g for i, g in nodes.items()}, need: float(gpus)}, -math.inf, 0.0


def purchase(
    portfolio: Portfolio,
    terms: CostTerms,
    profiles: Mapping[str, Profile],
    options: Sequence[RunOption],
    *,
    fill: float = 1.0,
    supply: Sequence[Supply] | None = None,
    decided: Purchase | None = None,
) -> Purchase | None:
    """The cheapest purchase in which every run has its GPUs; None where there is none.

    `supply`: only these; `decided`: what is bought and reserved is given, only its use is chosen anew.

    Raises:
        RlhfsimError: the solver did not end.
    """
    program = _PurchaseProgram(portfolio, terms, profiles, options, fill, supply or portfolio.supply)
    columns, rows = program.columns, list(program.rows())
    cost = np.array([sum(c.sum() for c in column.cash.values()) for column in columns])
    low, high = np.zeros(len(columns)), np.array([c.most for c in columns])
    for i, column in enumerate(columns):
        if decided is not None and column.key[0] in ("bought", "reserved"):
            kept = getattr(decided, column.key[0]).get(column.key[1], ())
            low[i] = high[i] = kept[int(column.key[2])] if kept else 0
    table = sparse.lil_array((len(rows), len(columns)))
    for i, (coefficients, _, _) in enumerate(rows):
        for j, value in coefficients.items():
            table[i, j] = value
    found = milp(
        cost,
        integrality=np.array([int(c.whole) for c in columns]),
        bounds=Bounds(low, high),
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
    return _read(program, np.asarray(found.x))


def _read(program: _PurchaseProgram, x: NDArray[np.float64]) -> Purchase:
    """The solution in words of the portfolio."""
    quarters = len(program.quarters)
    nodes: dict[str, dict[str, list[int]]] = {"bought": {}, "reserved": {}}
    runs: dict[tuple[str, str, int, Supply, int], float] = {}
    items: dict[str, NDArray[np.float64]] = {
        "storage": np.full(quarters, MONTHS * (program.portfolio.storage or 0.0))
    }
    for column, amount in zip(program.columns, x, strict=True):
        count = round(amount) if column.whole else float(amount)
        kind, *rest = column.key
        if kind in nodes and count:
            nodes[kind].setdefault(rest[0], [0] * quarters)[int(rest[1])] = int(count)
        if kind == "run" and count > 1e-6:
            o = program.options[int(rest[0])]
            supply: Supply = next(s for s in program.supply if s == rest[1])
            runs[o.job, o.gpu, o.gpus, supply, int(rest[2])] = count
        for item, cash in column.cash.items():
            items[item] = items.get(item, np.zeros(quarters)) + count * cash
    return Purchase(
        bought={g: tuple(n) for g, n in nodes["bought"].items()},
        reserved={g: tuple(n) for g, n in nodes["reserved"].items()},
        runs=runs,
        cash=tuple(sum(items.values(), np.zeros(quarters)).tolist()),
        by_item={item: float(cash.sum()) for item, cash in items.items() if abs(cash).sum() > 0},
        fill=program.fill,
    )
