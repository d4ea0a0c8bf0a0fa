"""Targets that the user sets: read from text, turned into limits of the search, checked on a plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Literal, cast

from rlhfsim import units
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.plan import AskedRun, Plan
from rlhfsim.search.request import RELATIONS, STALE, Request
from rlhfsim.step.prediction import joules_per_step, usd_per_step

Relation = Literal["<", "<=", ">", ">="]
QUANTITIES: dict[str, tuple[units.Dimension, str]] = {
    "step_time": ("s", "seconds of one step: step_time<90s"),
    "time_of_run": ("s", "all steps of --steps N: time_of_run<24h"),
    "tokens_per_s": ("1", "prompt and response tokens of the whole cluster: tokens_per_s>20000"),
    "tokens_per_s_per_gpu": ("1", "the same for one GPU"),
    "cost_per_step": ("usd", "rent of the cluster: cost_per_step<5"),
    "cost_of_run": ("usd", "rent over --steps N: cost_of_run<2000"),
    "energy": ("J", "of one step, with cooling: energy<5kWh"),
    "memory": ("byte", "the fullest GPU: memory<70GB, memory<90%"),
    "oom": ("1", "risk of running out of memory: oom<1%"),
    "staleness": ("1", "policy versions of lag: staleness<=1"),
}
"""Name -> dimension and meaning."""
CONFIDENCE = 0.8
"""Probability with which targets must be met unless somebody asks for another."""
_FORM = re.compile(r"^\s*([a-z_]+)\s*(<=|>=|<|>)\s*(\S.*)$")
SLACK = 1e-9
"""Relative distance by which a strict limit is kept."""


@frozen
class Requirement:
    """One target: `step_time<90s`."""

    quantity: str
    """Name among `QUANTITIES`."""
    relation: Relation
    value: float
    """In base units; a share of the capacity where `share`."""
    text: str
    """As the user wrote it."""
    share: bool = False
    """Memory in percent of what a process can use."""
    name: str = ""
    """`deadline` or `budget` where it was asked for by that name; else quantity and relation."""

    def __post_init__(self) -> None:
        """Name it."""
        if not self.name:
            object.__setattr__(self, "name", f"{self.quantity}{self.relation}")

    def holds(self, actual: float) -> bool:
        """Whether a value meets it."""
        return bool(RELATIONS[self.relation](actual, self.value))

    @property
    def most(self) -> float | None:
        """The largest value that meets it; None for a lower bound."""
        if self.relation == "<":
            return self.value * (1 - SLACK)
        return self.value if self.relation == "<=" else None


@frozen
class Verdict:
    """A requirement against a plan."""

    requirement: Requirement
    actual: float | None
    """In base units; None where a price is unknown."""
    probability: float | None = None
    """That the plan meets it (`what_if.risk`); None where nothing is uncertain or nobody asked."""
    confidence: float = CONFIDENCE
    """Probability with which it must."""

    @property
    def drawn(self) -> bool:
        """Whether a probability decides; bytes and what is certain are judged by the plan's own figures."""
        return self.probability is not None and self.requirement.quantity != "memory"

    @property
    def met(self) -> bool:
        """Whether the plan meets it, as surely as was asked; what is unknown is not met."""
        if self.drawn and self.probability is not None:
            return self.probability >= self.confidence
        return self.actual is not None and self.requirement.holds(self.actual)


def requirement(text: str) -> Requirement:
    """`step_time<90s` as a requirement.

    Raises:
        RlhfsimError: another form, an unknown quantity, or a value of another dimension.
    """

    def bad(message: str, help: str | None) -> RlhfsimError:
        return RlhfsimError("bad-requirement", f"--require {message}", help=help)

    shown, match = text[:60], _FORM.match(text.strip())
    if match is None:
        remedy = "write --require 'step_time<90s' (with quotes: < means something to the shell)"
        raise bad(f"{shown!r} is not QUANTITY<VALUE", remedy)
    name, relation, value = match[1], cast(Relation, match[2]), match[3]
    if name not in QUANTITIES:
        raise unknown_name("quantity", name[:40], QUANTITIES)
    share = name == "memory" and value.endswith("%")
    try:
        number = units.parse(value, "1" if share else QUANTITIES[name][0])
    except RlhfsimError as error:
        raise bad(f"{shown}: {error.message}", error.help) from error
    if number < 0:
        raise bad(f"{shown}: {value} is negative", "give a value of 0 or more")
    return Requirement(quantity=name, relation=relation, value=number, text=text.strip(), share=share)


def check_steps(
    requirements: Iterable[Requirement], steps: float | None, remedy: str = "give --steps N"
) -> None:
    """A target over a run needs its length.

    Raises:
        RlhfsimError: it is missing.
    """
    for one in requirements:
        if one.quantity in ("cost_of_run", "time_of_run") and steps is None:
            raise RlhfsimError(
                "missing-steps", f"--require {one.text} needs the length of the run", help=remedy
            )


def verdicts(
    requirements: Sequence[Requirement], plan: Plan, steps: int | None = None
) -> tuple[Verdict, ...]:
    """Every requirement against a plan."""
    return tuple(Verdict(requirement=one, actual=_actual(one, plan, steps)) for one in requirements)


def meets(judged: Sequence[Verdict], together: float | None) -> bool:
    """Whether a plan fits and meets all targets in one, as surely as was asked.

    `together`: the probability that it does; None where nothing was drawn.
    """
    if together is None or not any(v.drawn for v in judged):
        return all(v.met for v in judged)
    return together >= judged[0].confidence and all(v.met for v in judged if not v.drawn)


def meets_all(plan: Plan) -> bool:
    """The same of a plan that carries the run that it was asked for."""
    return meets(verdicts_of(plan), plan.run.odds.together if plan.run and plan.run.odds else None)


def verdicts_of(plan: Plan) -> tuple[Verdict, ...]:
    """Every target that the plan was asked for, against it, with the probability that was found."""
    if plan.run is None:
        return ()
    chances = [target.probability for target in plan.run.targets]
    judged = verdicts(requirements_of(plan.run), plan, plan.run.steps)
    sure = plan.run.confidence or CONFIDENCE
    return tuple(replace(v, probability=p, confidence=sure) for v, p in zip(judged, chances, strict=True))


def requirements_of(run: AskedRun | None) -> tuple[Requirement, ...]:
    """The targets of a run that a plan carries."""
    names = [f.name for f in fields(Requirement)]
    return tuple(Requirement(**{n: getattr(t, n) for n in names}) for t in (run.targets if run else ()))


def _actual(one: Requirement, plan: Plan, steps: int | None) -> float | None:
    p, usd = plan.prediction, plan.prediction.usd_per_step
    values = {
        "step_time": p.step_s,
        "time_of_run": p.step_s * (steps or 1),
        "tokens_per_s": p.tokens_per_s_per_gpu * sum(h.gpus for h in plan.hardware),
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "cost_per_step": usd,
        "cost_of_run": None if usd is None else usd * (steps or 1),
        "energy": p.kwh_per_step * units.JOULE_PER_KWH,
        "memory": p.peak_memory_bytes / (p.capacity_bytes if one.share else 1.0),
        "oom": p.probability_out_of_memory,
        "staleness": plan.placement.schedule.staleness,
    }
    return values[one.quantity]


def narrowed(request: Request, requirements: Iterable[Requirement]) -> Request:
    """The request without plans that miss a target on memory, risk or staleness."""
    for one in requirements:
        limit = one.most
        if limit is None:
            continue
        if one.quantity == "memory":
            usable = min(p.profile.usable_memory.value for p in request.cluster.node_groups)
            cap = limit * (usable if one.share else 1.0)
            request = replace(request, max_memory=min(cap, request.max_memory or math.inf))
        elif one.quantity == "oom":
            request = replace(request, max_oom=min(request.max_oom, limit))
        elif one.quantity == "staleness":
            lag = min(request.max_staleness, limit)
            allow = request.allow if lag >= 1 else request.allow - STALE
            request = replace(request, max_staleness=max(1.0, lag), allow=allow)
    return request


def most_seconds(
    request: Request, requirements: Iterable[Requirement], tokens: float, steps: int | None
) -> float:
    """The longest step on a cluster that meets every target on time, throughput, money and energy.

    The cluster is rented and powered whole, so each of these is the step time in other units; inf
    where none is set, 0 where no step meets them.
    """
    return min((_seconds(request, one, tokens, steps) for one in requirements), default=math.inf)


def _seconds(request: Request, one: Requirement, tokens: float, steps: int | None) -> float:
    cluster, limit = request.cluster, one.most
    if one.quantity.startswith("tokens_per_s"):
        if one.relation in ("<", "<="):
            return math.inf
        gpus = cluster.gpus if one.quantity.endswith("gpu") else 1
        return tokens / gpus / one.value if one.value > 0 else math.inf
    if limit is None or one.quantity in ("memory", "oom", "staleness"):
        return math.inf
    rate = usd_per_step(cluster, 1.0, request.price)
    each = {
        "step_time": 1.0,
        "time_of_run": float(steps or 1),
        "cost_per_step": rate,
        "cost_of_run": None if rate is None else rate * (steps or 1),
        "energy": joules_per_step(cluster, 1.0),
    }[one.quantity]
    if each is None:
        return 0.0
    return limit / each if each > 0 else math.inf


def shown(one: Requirement, actual: float | None) -> str:
    """The value that a plan reaches, in the unit of the requirement."""
    if actual is None:
        return "unknown price"
    if one.share or one.quantity == "oom":
        return f"{100 * actual:.3g} %"
    return units.format(actual, QUANTITIES[one.quantity][0])
