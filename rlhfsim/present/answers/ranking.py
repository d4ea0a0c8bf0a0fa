"""The plans of a design side by side, and what the search proved about them."""

from __future__ import annotations

from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.answers.choices import short_kind
from rlhfsim.present.answers.tree import Column, Note, TypedTable, table_of
from rlhfsim.present.tables import COUNT, FINE_SHARE, NAME, NUMBER, RIGHT, SHARE, STEP, STEP_ENDS
from rlhfsim.specs.placement.backends import sums_fp32
from rlhfsim.units import TERA
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.rivals import TOLERANCE
from rlhfsim.what_if.simplest import CLOSE

UNPROVEN = "? unproven"
"""Mark next to a plan of whose kind a better one may exist; `--detail proof` says by how much."""


def ranking(answer: Design) -> TypedTable:
    """The chosen plan first, then the best, and the best of every other kind."""
    first = answer.chosen if answer.simpler else answer.best
    return table_of(
        "Plans",
        _listed(answer, short=False),
        Column("#", 0, RIGHT),
        Column("plan", 2),
        Column("actor", lambda row: words.layout_labels(row[1])[0], NAME),
        Column("rollout", lambda row: words.layout_labels(row[1])[1], NAME),
        Column("step", 1, STEP),
        Column("P10-P90", 1, STEP_ENDS, narrow=""),
        Column("tok/s/GPU", "1.prediction.tokens_per_s_per_gpu", NUMBER, narrow=""),
        Column("memory", lambda row: words.full(row[1].prediction), SHARE),
        Column("USD", "1.prediction.usd_per_step", NUMBER.where("unknown")),
        style=lambda row: "bold green" if row[1] is first else "",
    )


def both(answer: Design) -> tuple[Plan, Plan]:
    """The chosen plan and the best one, where a plan fits."""
    assert answer.chosen is not None
    assert answer.best is not None
    return answer.chosen, answer.best


def aims(answer: Design) -> tuple[float, float]:
    """What is aimed at, bytes or seconds, of the chosen plan and of the best one."""
    mine, its = (p.prediction for p in both(answer))
    if answer.request.objective == "memory":
        return mine.peak_memory_bytes, its.peak_memory_bytes
    return mine.step_s, its.step_s


def unlisted(answer: Design) -> str:
    """The best plan of every kind but the chosen one, each with its step: none is without a word."""
    rest = _listed(answer, short=True)[1:]
    return "; ".join(f"{name} {STEP.shown(plan)}" for _, plan, name in rest)


def _listed(answer: Design, *, short: bool) -> list[tuple[str, Plan, str]]:
    """Number, plan and name of each, the chosen one first.

    Without the best in `short` where that is of the kind of the chosen one.
    """
    chosen, best = both(answer)
    asked, gaps = answer.request.workload, [0.0, *answer.gaps]
    rows = [
        (str(i), plan, _named(plan, answer) + (f" {UNPROVEN}" if _open(gap) else ""))
        for i, (plan, gap) in enumerate(zip([best, *answer.runners_up], gaps, strict=True), start=1)
    ]
    if answer.simpler:
        name = short_kind(chosen, asked)
        same = short and rows[0][2] == name
        rows = [("*", chosen, name), *rows[same:]]
    return rows


def _named(plan: Plan, answer: Design) -> str:
    """The kind of a plan, and that it sums gradients in another precision than the chosen one."""
    ours, its = sums_in_fp32(both(answer)[0]), sums_in_fp32(plan)
    sums = "" if ours == its else f", {'FP32' if its else 'BF16'} sums"
    return short_kind(plan, answer.request.workload) + sums


def sums_in_fp32(plan: Plan) -> bool:
    """Whether a plan sums its gradients in FP32."""
    return sums_fp32(plan.workload, plan.placement.backend)


def considered(answer: Design) -> Note:
    """The certificate in full."""
    c = answer.certificate
    best = "uses less memory" if answer.request.objective == "memory" else "is faster"
    space, unexplored = rounded(c.space), rounded(c.unexplored)
    proof = f"proven: no plan of the space {best}"
    if not c.proven:
        far = FINE_SHARE.shown(c.gap)
        proof = f"ended early: {unexplored} plans not looked at, one of them could be up to {far} better"
    if answer.simpler:
        proof += " than plan 1"
    lines = [
        *([_recommended(answer)] if answer.simpler else []),
        f"certificate: {space} complete plans" + f"; {proof}",
        f"  {rounded(c.infeasible)} do not fit, {rounded(c.dominated)} are beaten or equalled in "
        "everything by another,",
        f"  {rounded(c.bounded)} cannot be better, by their lower bound; "
        f"{COUNT.shown(c.simulated)} simulated",
    ]
    if c.proven and answer.request.stale:
        lines.append(
            "  asynchronous: a slower learner is taken to shorten no step; in 1 of 60 cases it could, by 5 %"
        )
    if answer.confidence is not None and answer.request.objective != "memory":
        likely = words.likely(answer.confidence)
        lines.append(
            f"plan 1 is faster than plan 2 with a probability of {likely} (intervals of the coefficients)"
        )
    if answer.runners_up:
        lines.append(f"plans 2, 3, ... are the best of every other kind{_of_kind(answer)}")
    return Note("\n".join(lines), "aside")


def _of_kind(answer: Design) -> str:
    """How well that is known about the runners-up."""
    open_ = [(i, gap) for i, gap in enumerate(answer.gaps, start=2) if _open(gap)]
    if not open_:
        return f", proven to {words.percent(TOLERANCE)}"
    listed = [
        f"plan {i}" + ("" if gap is None else f" (up to {FINE_SHARE.shown(gap)} better)") for i, gap in open_
    ]
    return f" that were met; not proven: {', '.join(listed)}"


def _open(gap: float | None) -> bool:
    """Whether a kind may hold a plan that is better by more than the tolerance of rivals."""
    return gap is None or gap > TOLERANCE


def _recommended(answer: Design) -> str:
    """What the plan with the star is."""
    mine, its = (FINE_SHARE.shown(p.prediction.probability_out_of_memory) for p in both(answer))
    in_bytes = answer.request.objective == "memory"
    held, least = aims(answer)
    name = "leanest" if in_bytes else "fastest"
    far = held > (1 + CLOSE) * least
    of = f"the {name} one that sums few gradients in BF16, not plan 1" if far else "plan 1"
    near = f"the simplest plan within {words.percent(CLOSE)} of {of}"
    return (
        f"* is recommended: {near}, which --fastest writes\n"
        f"  risk of running out of memory {mine}, of plan 1 {its}"
    )


def rounded(count: int) -> str:
    """A number of plans in words."""
    return words.count(count, largest=1000 * TERA)


def proof(answer: Design) -> str:
    """In a sentence: how far any plan of the space can be better than the chosen one."""
    c = answer.certificate
    better = "leaner" if answer.request.objective == "memory" else "faster"
    if not c.proven:
        on = "" if answer.request.time_limit else "; goes on with --time-limit 1h"
        return f"ended early: a plan not looked at could be up to {words.percent(c.gap)} {better}{on}"
    space = rounded(c.space)
    if not answer.simpler:
        return f"proven: of {space} complete plans none is {better}"
    mine, its = aims(answer)
    far = f"{FINE_SHARE.shown(1 - its / mine)} {better}"
    if mine > (1 + CLOSE) * its:
        return f"proven: none of {space} plans is faster than that of --fastest"
    return f"proven: of {space} plans none is more than {far}; the simplest within {words.percent(CLOSE)}"
