"""The plans of a design side by side, and what the search proved about them."""

from __future__ import annotations

from rlhfsim.plan import Plan
from rlhfsim.present import words
from rlhfsim.present.tables import WORDS, TableData, grid
from rlhfsim.present.terminal.choices import short_kind
from rlhfsim.present.terminal.console import NARROW, WIDTH, Part, drawn, styled
from rlhfsim.specs.placement.backends import sums_fp32
from rlhfsim.units import TERA, format, significant
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.rivals import TOLERANCE
from rlhfsim.what_if.simplest import CLOSE

UNPROVEN = "? unproven"
"""Beside a plan of whose kind a better one may exist; by how much stands in `--detail proof`."""


def ranking(answer: Design, width: int = WIDTH) -> Part:
    """One line a plan, the chosen one first; roles stand beside the architecture where they do not share."""
    return drawn(ranked(answer, width), None)  # no figure is cut


def ranked(answer: Design, width: int) -> TableData:
    """The chosen plan, the best, and the best of every other kind."""
    assert answer.chosen is not None
    assert answer.best is not None
    wide = width >= NARROW
    titles = [
        ">#",
        "plan",
        "actor",
        "rollout",
        ">step",
        *[">P10-P90", ">tok/s/GPU"] * wide,
        ">memory",
        ">USD",
    ]
    rows: list[tuple[str, ...]] = []
    for number, plan, name in _listed(answer, short=False):
        rows.append((number, name, *_row(plan, wide=wide)))
    styles = ["bold green", *[""] * (len(rows) - 1)] if rows else []
    return grid(titles, rows, fit={"plan": WORDS}, styles=styles)


def unlisted(answer: Design) -> str:
    """The best plan of every kind but the chosen one, each with its step: none is without a word."""
    rest = _listed(answer, short=True)[1:]
    return "; ".join(f"{name} {format(plan.prediction.step_s, 's')}" for _, plan, name in rest)


def _listed(answer: Design, *, short: bool) -> list[tuple[str, Plan, str]]:
    """Number, plan and name of each, the chosen one first.

    Without the best in `short` where that is of the kind of the chosen one.
    """
    assert answer.chosen is not None
    assert answer.best is not None
    asked, gaps = answer.request.workload, [0.0, *answer.gaps]
    rows = [
        (str(i), plan, _named(plan, answer) + (f" {UNPROVEN}" if _open(gap) else ""))
        for i, (plan, gap) in enumerate(zip([answer.best, *answer.runners_up], gaps, strict=True), start=1)
    ]
    if answer.simpler:
        name = short_kind(answer.chosen, asked)
        same = short and rows[0][2] == name
        rows = [("*", answer.chosen, name), *rows[same:]]
    return rows


def _named(plan: Plan, answer: Design) -> str:
    """The kind of a plan, and that it sums gradients in another precision than the chosen one."""
    assert answer.chosen is not None
    ours, its = sums_in_fp32(answer.chosen), sums_in_fp32(plan)
    sums = "" if ours == its else f", {'FP32' if its else 'BF16'} sums"
    return short_kind(plan, answer.request.workload) + sums


def sums_in_fp32(plan: Plan) -> bool:
    """Whether a plan sums its gradients in FP32."""
    return sums_fp32(plan.workload, plan.placement.backend)


def _row(plan: Plan, *, wide: bool) -> list[str]:
    p = plan.prediction
    return [
        *words.layout_labels(plan),
        format(p.step_s, "s"),
        *[f"{significant(p.low_s)}-{significant(p.high_s)}", significant(p.tokens_per_s_per_gpu)] * wide,
        f"{p.peak_memory_bytes / p.capacity_bytes:.0%}".replace("%", " %"),
        "unknown" if p.usd_per_step is None else significant(p.usd_per_step),
    ]


def considered(answer: Design) -> Part:
    """The certificate in full."""
    c = answer.certificate
    best = "uses less memory" if answer.request.objective == "memory" else "is faster"
    space, unexplored = rounded(c.space), rounded(c.unexplored)
    proof = f"proven: no plan of the space {best}"
    if not c.proven:
        proof = (
            f"ended early: {unexplored} plans not looked at, one of them could be up to {c.gap:.1%} better"
        )
    if answer.simpler:
        proof += " than plan 1"
    lines = [
        *([_recommended(answer)] if answer.simpler else []),
        f"certificate: {space} complete plans" + f"; {proof}",
        f"  {rounded(c.infeasible)} do not fit, {rounded(c.dominated)} are beaten or equalled in "
        "everything by another,",
        f"  {rounded(c.bounded)} cannot be better, by their lower bound; {c.simulated:,} simulated",
    ]
    if c.proven and answer.request.stale:
        lines.append(
            "  among asynchronous plans dominance compares bounds, not simulated steps: proven up to that"
        )
    if answer.confidence is not None and answer.request.objective != "memory":
        likely = words.likely(answer.confidence)
        lines.append(
            f"plan 1 is faster than plan 2 with a probability of {likely} (intervals of the coefficients)"
        )
    if answer.runners_up:
        lines.append(f"plans 2, 3, ... are the best of every other kind{_of_kind(answer)}")
    return styled("\n".join(lines), style="dim")


def _of_kind(answer: Design) -> str:
    """How well that is known of the runners-up."""
    open_ = [(i, gap) for i, gap in enumerate(answer.gaps, start=2) if _open(gap)]
    if not open_:
        return f", proven to {words.percent(TOLERANCE)}"
    listed = [f"plan {i}" + ("" if gap is None else f" (up to {gap:.1%} better)") for i, gap in open_]
    return f" that were met; not proven: {', '.join(listed)}"


def _open(gap: float | None) -> bool:
    """Whether a kind may hold a plan that is better by more than the tolerance of rivals."""
    return gap is None or gap > TOLERANCE


def _recommended(answer: Design) -> str:
    """What the plan with the star is."""
    assert answer.chosen is not None
    assert answer.best is not None
    mine, its = (100 * p.prediction.probability_out_of_memory for p in (answer.chosen, answer.best))
    in_bytes = answer.request.objective == "memory"
    held, least = (
        p.prediction.peak_memory_bytes if in_bytes else p.prediction.step_s
        for p in (answer.chosen, answer.best)
    )
    name = "leanest" if in_bytes else "fastest"
    far = held > (1 + CLOSE) * least
    of = f"the {name} one that sums few gradients in BF16, not plan 1" if far else "plan 1"
    near = f"the simplest plan within {words.percent(CLOSE)} of {of}"
    return (
        f"* is recommended: {near}, which --fastest writes\n"
        f"  risk of running out of memory {mine:.1f} %, of plan 1 {its:.1f} %"
    )


def rounded(count: int) -> str:
    """A number of plans in words."""
    return words.count(count, largest=1000 * TERA)


def proof(answer: Design) -> str:
    """In a sentence: how far any plan of the space can be better than the chosen one."""
    c = answer.certificate
    assert answer.chosen is not None
    assert answer.best is not None
    in_bytes = answer.request.objective == "memory"
    better = "leaner" if in_bytes else "faster"
    if not c.proven:
        on = "" if answer.request.time_limit else "; goes on with --time-limit 1h"
        return f"ended early: a plan not looked at could be up to {100 * c.gap:.0f} % {better}{on}"
    space = rounded(c.space)
    if not answer.simpler:
        return f"proven: of {space} complete plans none is {better}"
    mine, its = (
        p.prediction.peak_memory_bytes if in_bytes else p.prediction.step_s
        for p in (answer.chosen, answer.best)
    )
    far = f"{100 * (1 - its / mine):.1f} % {better}"
    if mine > (1 + CLOSE) * its:
        return f"proven: none of {space} plans is faster than that of --fastest"
    return f"proven: of {space} plans none is more than {far}; the simplest within {words.percent(CLOSE)}"
